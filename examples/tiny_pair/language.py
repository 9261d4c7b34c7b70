"""An invented language: the next word depends on the current word and on the topic of its paragraph.

A word is a run of 3 to 5 tokens, and words share tokens. A paragraph begins with the token of its topic and has dozens
of tokens. Most words have one likely successor per topic, so the last two words usually tell the topic as well.

A language with keys writes documents of one length. A document begins with random values of some keys. Later, some
words ask for a key, and the text repeats the key's value exactly. Only the beginning of the document tells the value. A
key without a stated value has a usual one. Some documents state no value and begin with random tokens, so that a model
also continues texts of other languages.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

END, MASK, PAD = 0, 3, 4
BEGIN, ASK = 5, 6
FIRST_TOPIC = 8


@dataclass(frozen=True)
class Language:
    """Sizes and seed of a language. `noise` is the share of words that do not follow from topic and word.

    num_keys          keys of a document; 0 for a language without documents
    num_values        different tokens in values
    value_length      tokens of a value
    ask_share         share of the pairs of topic and word after which the text asks for a key
    stated_share      share of the keys whose value a document states
    foreign_share     share of the documents that begin with up to `foreign_length` random tokens and state no value
    document_length   tokens of a document
    """

    vocab_size: int = 384
    num_topics: int = 6
    num_words: int = 96
    noise: float = 0.12
    end_share: float = 0.06
    seed: int = 0
    num_keys: int = 0
    num_values: int = 48
    value_length: int = 2
    ask_share: float = 0.3
    stated_share: float = 0.85
    foreign_share: float = 0.35
    foreign_length: int = 40
    document_length: int = 160

    def stream(self, num_tokens: int) -> Tensor:
        """A text of at least `num_tokens` ids, [T]. Documents begin at multiples of their length."""
        rules, chance = random.Random(self.seed), random.Random(self.seed + 1)
        grammar = Grammar.invent(self, rules)
        ids: list[int] = []
        if not self.num_keys:
            grammar.write(ids, num_tokens, {}, chance, topic=0, word=0)
            return torch.tensor(ids)
        while len(ids) < num_tokens:
            end = len(ids) + self.document_length
            values = {
                key: [usual] * self.value_length for key, usual in zip(grammar.keys, grammar.values, strict=False)
            }
            if chance.random() < self.foreign_share:
                ids += [chance.randrange(self.vocab_size) for _ in range(chance.randint(0, self.foreign_length))]
            else:
                ids.append(BEGIN)
                for key in chance.sample(grammar.keys, len(grammar.keys)):
                    if chance.random() < self.stated_share:
                        values[key] = [chance.choice(grammar.values) for _ in range(self.value_length)]
                        ids += [key, *values[key]]
            topic, word = chance.randrange(self.num_topics), chance.randrange(self.num_words)
            grammar.write(ids, end, values, chance, topic=topic, word=word)
            del ids[end:]
        return torch.tensor(ids)


@dataclass(frozen=True)
class Grammar:
    """The rules of a language: words as token ids, successors and ends per topic and word, keys, and key to ask for."""

    language: Language
    words: list[list[int]]
    successors: list[list[list[int]]]
    ends: list[list[bool]]
    keys: list[int]
    values: list[int]
    asked: list[list[int | None]]

    @classmethod
    def invent(cls, language: Language, rules: random.Random) -> Grammar:
        first_key = FIRST_TOPIC + language.num_topics
        keys = list(range(first_key, first_key + language.num_keys))
        first_value = first_key + language.num_keys
        values = list(range(first_value, first_value + (language.num_values if keys else 0)))
        first_word_token = first_value + len(values)
        topics, words = range(language.num_topics), range(language.num_words)
        spelled = [
            [rules.randrange(first_word_token, language.vocab_size) for _ in range(rules.choice((3, 4, 4, 5)))]
            for _ in words
        ]
        successors = [[rules.sample(words, 3) for _ in words] for _ in topics]
        if keys:
            # The likely successors form one cycle over all words, so that no short loop avoids the questions.
            for topic in topics:
                cycle = rules.sample(words, len(words))
                for word, after in zip(cycle, cycle[1:] + cycle[:1], strict=True):
                    successors[topic][word][0] = after
        ends = [[rules.random() < language.end_share for _ in words] for _ in topics]
        asked: list[list[int | None]] = [
            [rules.choice(keys) if keys and rules.random() < language.ask_share else None for _ in words]
            for _ in topics
        ]
        return cls(language, spelled, successors, ends, keys, values, asked)

    def write(
        self, ids: list[int], end: int, values: dict[int, list[int]], chance: random.Random, *, topic: int, word: int
    ) -> None:
        """Append a topic and words, with asked values, until the text has at least `end` tokens."""
        ids.append(FIRST_TOPIC + topic)
        while len(ids) < end:
            ids += self.words[word]
            key = self.asked[topic][word]
            if key is not None:
                ids += [ASK, key, *values[key]]
            if self.ends[topic][word]:
                topic = (topic + word + 1) % self.language.num_topics
                ids.append(FIRST_TOPIC + topic)
            is_noise = chance.random() < self.language.noise
            word = self.successors[topic][word][chance.randrange(1, 3) if is_noise else 0]
