"""Figures by hand, and intervals: one bootstrap and one quantile rule, for one sample and for the difference of two."""

import json
import random
import time

import pytest

from dflash_cli.evaluation.statistics import (
    Interval,
    StepCounts,
    bootstrap_interval,
    paired_interval,
    pooled_acceptance_len,
    summarise,
)
from dflash_runtime.scheduling.request import FinishReason, RequestOutput


def compare(base: StepCounts, other: StepCounts) -> Interval | None:
    return paired_interval(base, other, confidence=0.95, num_resamples=2000, seed=0)


def sample(seed: int, mean: float, count: int = 40) -> list[tuple[int, int]]:
    """Requests of ten steps each."""
    generator = random.Random(seed)
    return [(sum(1 + (generator.random() < mean) for _ in range(10)), 10) for _ in range(count)]


def test_pooled_length_is_tokens_over_steps() -> None:
    assert pooled_acceptance_len([(6, 2), (2, 2)]) == 2.0
    assert pooled_acceptance_len([(0, 0)]) == 1.0


def test_a_sample_does_not_differ_from_itself() -> None:
    base = sample(0, 0.5)
    interval = compare(base, base)
    assert interval is not None
    assert (interval.low, interval.high, interval.confidence) == (0.0, 0.0, 0.95)


def test_a_constant_difference_is_known_exactly() -> None:
    """Pairs share their chance, so an interval over them is narrower than one over either side."""
    base = sample(0, 0.5)
    other = [(tokens + 5, steps) for tokens, steps in base]
    interval = compare(base, other)
    assert interval is not None
    assert abs(interval.low - 0.5) < 1e-9
    assert abs(interval.high - 0.5) < 1e-9


def test_an_independent_difference_is_covered() -> None:
    interval = compare(sample(1, 0.3, 400), sample(2, 0.6, 400))
    assert interval is not None
    assert 0.2 < interval.low < 0.3 < interval.high < 0.4


def test_pairs_without_steps_do_not_count() -> None:
    assert compare([(3, 1), (0, 0)], [(3, 1), (4, 1)]) is None


def output(lengths: list[int], kept: list[int] | None = None, prefill: int = 1) -> RequestOutput:
    kept = kept or lengths
    return RequestOutput(
        index=0,
        prompt_token_ids=(1,),
        token_ids=(1,) * (sum(kept) + prefill),
        finish_reason=FinishReason.LENGTH,
        acceptance_lengths=tuple(lengths),
        committed_lengths=tuple(kept),
    )


def test_every_definition_by_hand() -> None:
    """Two requests, K = 3; the second one's last step is cut from 4 to 2 by its limit."""
    summary = summarise([output([1, 4, 2]), output([3, 4], kept=[3, 2])], 3, num_resamples=0)
    assert summary.definitions == pytest.approx(
        {
            "vllm": 14 / 5,
            "zlab": (7 / 3 + 5 / 2) / 2,
            "zlab_untruncated": (7 / 3 + 7 / 2) / 2,
            "sglang": (8 / 3 + 6 / 2) / 2,
            "committed": 12 / 5,
            "mlx_ratio": 9 / 14,
        }
    )
    assert summary.histogram == (1, 1, 1, 2)
    assert summary.conditional_rates == [4 / 5, 3 / 4, 2 / 3]


def test_no_steps_are_no_figures() -> None:
    summary = summarise([output([])], 3)
    assert summary.counts.acceptance_len is None
    assert summary.interval is None
    assert set(summary.definitions.values()) == {None}
    json.dumps(summary.to_json(), allow_nan=False)


@pytest.mark.parametrize(("num_conversations", "num_turns"), [(8, 1), (16, 1), (64, 1), (8, 5), (32, 5)])
def test_the_interval_covers_as_often_as_it_says(num_conversations: int, num_turns: int) -> None:
    """Conversations with their own difficulty: 95% intervals cover the truth in 92% to 98% of 500 worlds.

    A plain percentile interval covers it in 88% of those of 8 conversations, one over turns in 65% of those of 5 turns.
    The bounds are three standard errors of 500 worlds away from 95%.
    """
    generator = random.Random(num_conversations + num_turns)
    covered = 0
    for world in range(500):
        outputs, names = [], []
        for conversation in range(num_conversations):
            accept = generator.choice([0.3, 0.8])
            for _ in range(num_turns):
                outputs.append(output([draw_length(generator, accept) for _ in range(12)]))
                names.append(conversation)
        interval = bootstrap_interval(outputs, names, confidence=0.95, num_resamples=400, seed=world)
        assert interval is not None
        covered += interval.low <= TRUE_LENGTH <= interval.high
    assert 460 <= covered <= 490


def draw_length(generator: random.Random, accept: float) -> int:
    """Tokens that a step gives, of 8 at most, where each drafted token is accepted with a chance of its own."""
    length = 1
    while length < 8 and generator.random() < accept:
        length += 1
    return length


TRUE_LENGTH = sum(sum(accept**place for place in range(8)) for accept in (0.3, 0.8)) / 2


def test_the_bootstrap_of_a_large_set_is_quick() -> None:
    """1,319 prompts and 10,000 resamples, by the processor's clock."""
    generator = random.Random(0)
    outputs = [output([draw_length(generator, 0.6) for _ in range(20)]) for _ in range(1319)]
    started = time.process_time()
    bootstrap_interval(outputs, confidence=0.95, num_resamples=10_000, seed=0)
    assert time.process_time() - started < 2


def test_an_interval_needs_eight_conversations_and_is_repeatable() -> None:
    outputs = [output([1, 2]), output([5, 6]), output([3]), output([2, 2])] * 2
    assert bootstrap_interval(outputs[:7], confidence=0.9, num_resamples=100, seed=0) is None
    turns = [0, 0, 1, 2, 3, 4, 5, 6]
    assert bootstrap_interval(outputs, turns, confidence=0.9, num_resamples=100, seed=0) is None
    first, again = (bootstrap_interval(outputs, confidence=0.9, num_resamples=100, seed=3) for _ in range(2))
    assert first == again
