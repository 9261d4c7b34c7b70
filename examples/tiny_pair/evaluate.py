"""Exact acceptance on held-out prompts, computed in batches.

Speculative decoding writes the same text as plain decoding, so the text is generated once without a draft. The draft
then proposes after every position in parallel. A walk over these proposals visits exactly the steps of a real loop of
drafting and verifying.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import Qwen3ForCausalLM

from .data import Prompt
from .draft import RIGHT_READING, Draft, Head, Reading
from .settings import Settings
from .target import generate, tapped_features

GRAM = 4
Figures = dict[str, object]


@dataclass(frozen=True)
class Passage:
    """One prompt with the target's continuation, truncated after the end token."""

    prompt: Prompt
    token_ids: tuple[int, ...]

    @property
    def start(self) -> int:
        """Position of the first anchor, which is the first token that the prefill chooses."""
        return len(self.prompt.token_ids)

    def anchors(self, block_size: int) -> range:
        """Positions with a whole block of known tokens after them."""
        return range(self.start, len(self.token_ids) - block_size + 1)


@dataclass(frozen=True)
class Step:
    """One step of drafting and verifying."""

    passage: Passage
    anchor: int
    accepted: int


Proposals = dict[int, list[int]]
Tally = tuple[int, int]


def write_passages(
    target: Qwen3ForCausalLM, prompts: Sequence[Prompt], new_tokens: int, temperature: float, end: int
) -> list[Passage]:
    """Continue every prompt in one batch."""
    device = target.device
    longest = max(len(prompt.token_ids) for prompt in prompts)
    rows = [[*prompt.token_ids, *[0] * (longest - len(prompt.token_ids))] for prompt in prompts]
    lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=device)
    ids = generate(target, torch.tensor(rows, device=device), lengths, new_tokens, temperature).tolist()
    return [_passage(prompt, row, new_tokens, end) for prompt, row in zip(prompts, ids, strict=True)]


def _passage(prompt: Prompt, row: Sequence[int], new_tokens: int, end: int) -> Passage:
    start = len(prompt.token_ids)
    written = list(row[start : start + new_tokens])
    if end in written:
        written = written[: written.index(end) + 1]
    return Passage(prompt, (*prompt.token_ids, *written))


@torch.no_grad()
def propose(
    draft: Draft,
    head: Head,
    target: Qwen3ForCausalLM,
    passages: Sequence[Passage],
    taps: Sequence[int],
    batch_size: int,
    reading: Reading = RIGHT_READING,
) -> list[Proposals]:
    """The draft's greedy proposals after every anchor of every passage."""
    proposals: list[Proposals] = []
    for first in range(0, len(passages), batch_size):
        group = passages[first : first + batch_size]
        longest = max(len(passage.token_ids) for passage in group)
        rows = [[*passage.token_ids, *[0] * (longest - len(passage.token_ids))] for passage in group]
        ids = torch.tensor(rows, device=target.device)
        ranges = [passage.anchors(draft.num_draft_tokens + 1) for passage in group]
        count = max(1, *(len(places) for places in ranges))
        # Passages that end early repeat an anchor to fill the batch. The repeats are dropped below.
        anchors = torch.tensor([[*places, *[0] * (count - len(places))] for places in ranges], device=target.device)
        features = tapped_features(target, ids, taps)
        hidden = draft(features, ids, anchors, target.model.embed_tokens.weight, reading)
        chosen = head.token_ids[draft.choose(hidden, head.weight, ids.gather(1, anchors))].tolist()
        for places, tokens in zip(ranges, chosen, strict=True):
            proposals.append(dict(zip(places, tokens[: len(places)], strict=True)))
    return proposals


def look_up(passages: Iterable[Passage], block_size: int, gram: int = 3) -> list[Proposals]:
    """Proposals by prompt lookup: copy the tokens after the last occurrence of the same few tokens."""
    return [
        {
            anchor: _copied(passage.token_ids[: anchor + 1], block_size - 1, gram)
            for anchor in passage.anchors(block_size)
        }
        for passage in passages
    ]


def _copied(known: Sequence[int], wanted: int, gram: int) -> list[int]:
    for size in range(gram, 0, -1):
        tail = tuple(known[-size:])
        for place in range(len(known) - size - 1, -1, -1):
            if tuple(known[place : place + size]) == tail:
                period = len(known) - size - place
                # Copying may continue into the tokens that it has just proposed.
                return [known[place + size + index % period] for index in range(wanted)]
    return [-1] * wanted


def walk(passages: Sequence[Passage], proposals: Sequence[Proposals], block_size: int) -> list[Step]:
    """The steps of a loop of drafting and verifying `block_size` rows."""
    steps: list[Step] = []
    for passage, drafts in zip(passages, proposals, strict=True):
        places = passage.anchors(block_size)
        anchor = passage.start
        while anchor in places:
            accepted = leading_matches(drafts[anchor], passage.token_ids[anchor + 1 :])
            steps.append(Step(passage, anchor, accepted))
            anchor += accepted + 1
    return steps


def leading_matches(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """Number of correct draft tokens before the first wrong one."""
    for count, (draft, token) in enumerate(zip(drafts, truth, strict=False)):
        if draft != token:
            return count
    return min(len(drafts), len(truth))


def acceptance_length(steps: Sequence[Step]) -> float:
    """Tokens per step, pooled over all steps: accepted draft tokens and the target's own token."""
    return 1 + sum(step.accepted for step in steps) / max(1, len(steps))


def interval(steps: Sequence[Step], rounds: int = 1000) -> list[float]:
    """A 95% bootstrap interval of the acceptance length over prompts."""
    tallies = list(totals(steps).values())
    chance = random.Random(0)
    means = sorted(1 + _pooled(chance.choices(tallies, k=len(tallies))) for _ in range(rounds))
    return [round(means[rounds * 25 // 1000], 3), round(means[rounds * 975 // 1000], 3)]


def totals(steps: Iterable[Step]) -> dict[str, Tally]:
    """Accepted draft tokens and steps of every prompt."""
    totals: dict[str, Tally] = {}
    for step in steps:
        accepted, count = totals.get(step.passage.prompt.id, (0, 0))
        totals[step.passage.prompt.id] = (accepted + step.accepted, count + 1)
    return totals


def _pooled(tallies: Iterable[Tally]) -> float:
    """Accepted draft tokens per step, pooled over prompts."""
    accepted, steps = map(sum, zip(*tallies, strict=True))
    return float(accepted / max(1, steps))


def summary(steps: Sequence[Step], num_draft_tokens: int) -> Figures:
    """Pooled numbers, by position and by category. Rates are over all steps, so they add up to the accepted mean."""
    by_category: dict[str, list[Step]] = defaultdict(list)
    for step in steps:
        by_category[step.passage.prompt.category].append(step)
    reached = [sum(step.accepted >= k for step in steps) for k in range(1, num_draft_tokens + 1)]
    return {
        "acceptance_length": round(acceptance_length(steps), 4),
        "interval_95": interval(steps),
        "steps": len(steps),
        "accepted": sum(step.accepted for step in steps),
        "per_position_rates": [round(count / max(1, len(steps)), 4) for count in reached],
        "per_category": {name: round(acceptance_length(group), 4) for name, group in by_category.items()},
    }


def _repeated_at(tokens: Sequence[int], place: int) -> bool:
    """Whether the n-gram that ends at `place` occurred before."""
    tail = tuple(tokens[place - GRAM + 1 : place + 1])
    return any(tuple(tokens[at : at + GRAM]) == tail for at in range(place - GRAM + 1))


def is_loop(passage: Passage) -> bool:
    """Whether most of the last 64 written tokens end a 4-gram that occurred before within these 64."""
    tail = passage.token_ids[passage.start :][-64:]
    grams = [tuple(tail[at : at + GRAM]) for at in range(len(tail) - GRAM + 1)]
    return len(grams) >= 32 and len(set(grams)) < 0.5 * len(grams)


def repetition(passages: Sequence[Passage], steps: Sequence[Step], block_size: int) -> Figures:
    """Acceptance in repetitive and in new text."""
    written = [_repeated_at(one.token_ids, place) for one in passages for place in range(one.start, len(one.token_ids))]
    accepted = [
        _repeated_at(step.passage.token_ids, step.anchor + k) for step in steps for k in range(1, step.accepted + 1)
    ]
    after_repeat = [step for step in steps if _repeated_at(step.passage.token_ids, step.anchor)]
    after_fresh = [step for step in steps if not _repeated_at(step.passage.token_ids, step.anchor)]
    copied = walk(passages, look_up(passages, block_size), block_size)
    return {
        "written_tokens_in_repeated_4_gram": round(sum(written) / max(1, len(written)), 4),
        "accepted_drafts_in_repeated_4_gram": round(sum(accepted) / max(1, len(accepted)), 4),
        "acceptance_length_after_repeated_4_gram": round(acceptance_length(after_repeat), 4),
        "acceptance_length_after_fresh_4_gram": round(acceptance_length(after_fresh), 4),
        "steps_after_fresh_4_gram": len(after_fresh),
        "passages_that_loop": sum(is_loop(passage) for passage in passages),
        "acceptance_length_without_looping_passages": round(
            acceptance_length([step for step in steps if not is_loop(step.passage)]), 4
        ),
        "prompt_lookup_acceptance_length": round(acceptance_length(copied), 4),
        "prompt_lookup_without_looping_passages": round(
            acceptance_length([step for step in copied if not is_loop(step.passage)]), 4
        ),
    }


@dataclass(frozen=True)
class Judge:
    """A draft with everything needed to measure it."""

    draft: Draft
    head: Head
    target: Qwen3ForCausalLM
    settings: Settings

    def steps(
        self,
        passages: Sequence[Passage],
        reading: Reading = RIGHT_READING,
        tap_shift: int = 0,
        head: Head | None = None,
    ) -> list[Step]:
        taps = [tap + tap_shift for tap in self.settings.target_layer_ids]
        size = self.settings.evaluation.batch_size
        proposals = propose(self.draft, head or self.head, self.target, passages, taps, size, reading)
        return walk(passages, proposals, self.draft.num_draft_tokens + 1)

    def wrong_readings(self, passages: Sequence[Passage], pad: int) -> Figures:
        """Acceptance for wrong readings of the checkpoint that load and run without an error."""
        lost = Reading(rope_theta=self.settings.shape.lost_rope_theta)
        trials: dict[str, Callable[[], list[Step]]] = {
            "taps_plus_1": lambda: self.steps(passages, tap_shift=1),
            "taps_minus_1": lambda: self.steps(passages, tap_shift=-1),
            "causal_block": lambda: self.steps(passages, Reading(causal_block=True)),
            f"rope_theta_{self.settings.shape.lost_rope_theta:.0f}": lambda: self.steps(passages, lost),
            "mask_is_pad_token": lambda: self.steps(passages, Reading(mask_token_id=pad)),
        }
        if len(self.head.token_ids) < self.settings.vocab_size:
            rows = torch.arange(len(self.head.token_ids), device=self.head.token_ids.device)
            trials["id_map_ignored"] = lambda: self.steps(passages, head=Head(self.head.weight, rows))
        right = self.steps(passages)
        return {name: _loss_against(right, trial()) for name, trial in trials.items()}


def _loss_against(right: Sequence[Step], wrong: Sequence[Step]) -> Figures:
    """Loss of accepted draft tokens per step against the right reading, with a 95% interval over the same prompts."""
    right_totals, wrong_totals = totals(right), totals(wrong)
    names = sorted(right_totals.keys() & wrong_totals.keys())
    chance = random.Random(0)
    lost = sorted(
        _percent_lost([right_totals[name] for name in drawn], [wrong_totals[name] for name in drawn])
        for drawn in (chance.choices(names, k=len(names)) for _ in range(1000))
    )
    return {
        "acceptance_length": round(acceptance_length(wrong), 4),
        "accepted_drafts_lost_percent": round(_percent_lost(right_totals.values(), wrong_totals.values()), 1),
        "lost_interval_95": [round(lost[25], 1), round(lost[975], 1)],
    }


def _percent_lost(right: Iterable[Tally], wrong: Iterable[Tally]) -> float:
    right_mean, wrong_mean = _pooled(right), _pooled(wrong)
    return 100 * (1 - wrong_mean / right_mean) if right_mean > 0 else 0.0
