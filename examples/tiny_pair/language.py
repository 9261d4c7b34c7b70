"""An invented language: the next word depends on the current word and on the topic of its paragraph.

A word is a run of 3 to 5 tokens, and words share tokens. A paragraph begins with the token of its topic and has dozens
of tokens. Most words have one likely successor per topic, so the last two words usually tell the topic as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

END, MASK, PAD = 0, 3, 4
FIRST_TOPIC = 8


@dataclass(frozen=True)
class Language:
    """Sizes and seed of a language. `noise` is the share of words that do not follow from topic and word."""

    vocab_size: int = 384
    num_topics: int = 6
    num_words: int = 96
    noise: float = 0.12
    end_share: float = 0.06
    seed: int = 0

    def stream(self, num_tokens: int) -> Tensor:
        """A text of at least `num_tokens` ids, [T]."""
        rules, chance = random.Random(self.seed), random.Random(self.seed + 1)
        first_word_token = FIRST_TOPIC + self.num_topics
        words = [
            [rules.randrange(first_word_token, self.vocab_size) for _ in range(rules.choice((3, 4, 4, 5)))]
            for _ in range(self.num_words)
        ]
        table = [
            [rules.sample(range(self.num_words), 3) for _ in range(self.num_words)] for _ in range(self.num_topics)
        ]
        ends = [[rules.random() < self.end_share for _ in words] for _ in range(self.num_topics)]
        ids: list[int] = []
        topic, word = 0, 0
        while len(ids) < num_tokens:
            ids += [FIRST_TOPIC + topic] if not ids else []
            ids += words[word]
            if ends[topic][word]:
                topic = (topic + word + 1) % self.num_topics
                ids.append(FIRST_TOPIC + topic)
            word = table[topic][word][chance.randrange(1, 3) if chance.random() < self.noise else 0]
        return torch.tensor(ids)
