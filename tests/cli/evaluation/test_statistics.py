"""Intervals: one bootstrap and one quantile rule, for one sample and for the difference of two."""

import random

from dflash_cli.evaluation.statistics import Interval, StepCounts, paired_interval, pooled_acceptance_len


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
