"""Differences of two acceptance lengths: by hand, against tables, and by simulation.

Simulated conversations are easy or hard, and a few are many times as long as most. Both sides of a pair have the same
difficulty and length, and each has its own luck. Over 2,000 worlds, a true share of 5% is measured as 3.5% to 6.5%
(three standard errors). Bounds of 3% and 7% therefore catch methods with a true share of 2% or 8.5%.
"""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_cli.acceptance.intervals.acceptance_difference import (
    MIN_COMPARED,
    AcceptanceDifference,
    holm,
    paired_difference,
    paired_moments,
    unpaired_difference,
    unpaired_moments,
)

NUM_WORLDS = 2000
NUM_DRAFTED = 7
Floats = NDArray[np.float64]


def side(generator: np.random.Generator, accept: Floats, wanted: Floats) -> Floats:
    """Draw tokens and steps of conversations with about `wanted` tokens, [..., N] -> [..., N, 2]."""
    length = sum(accept**place for place in range(NUM_DRAFTED + 1))
    steps = np.maximum(1, np.round(wanted / length)).astype(np.int64)
    tokens, reached = steps.copy(), steps
    for _ in range(NUM_DRAFTED):
        reached = generator.binomial(reached, accept)
        tokens += reached
    return np.stack([tokens, steps], axis=-1).astype(float)


def worlds(
    count: int, *, gain: float = 0.0, luck: float = 0.08, num_worlds: int = NUM_WORLDS, seed: int = 0
) -> tuple[Floats, Floats]:
    """Draw pairs of conversations, two arrays [num_worlds, count, 2]. The second side accepts more by `gain`."""
    generator = np.random.default_rng([seed, count])
    ease = np.where(generator.random((num_worlds, count)) < 0.4, 0.85, 0.35)
    wanted = np.clip(np.exp(generator.normal(4, 0.9, ease.shape)), 8, 2000)
    shifts = [luck * generator.standard_normal(ease.shape) for _ in range(2)]
    base, other = (
        side(generator, np.clip(ease + shift, 0.02, 0.97), wanted) for shift in (shifts[0], shifts[1] + gain)
    )
    return base, other


def differences(value: Floats, error: Floats, freedom: Floats | int) -> list[AcceptanceDifference]:
    """The difference in each world."""
    return [
        AcceptanceDifference(value=float(number), error=float(spread), freedom=int(free), confidence=0.95)
        for number, spread, free in zip(value, error, np.broadcast_to(freedom, value.shape), strict=True)
    ]


def p_values(value: Floats, error: Floats, freedom: Floats | int) -> list[float]:
    return [item.p_value for item in differences(value, error, freedom)]


@pytest.mark.parametrize("count", [MIN_COMPARED, 16, 32, 128])
def test_equal_pairs_are_called_different_in_one_of_twenty_worlds(count: int) -> None:
    value, error = paired_moments(*worlds(count))
    wrong = np.mean(np.array(p_values(value, error, count - 1)) < 0.05)
    assert 0.03 <= wrong <= 0.07


@pytest.mark.parametrize("count", [16, 32, 128])
def test_equal_independent_sides_are_called_different_in_one_of_twenty_worlds(count: int) -> None:
    base, _ = worlds(count, seed=1)
    other, _ = worlds(count, seed=2)
    wrong = np.mean(np.array(p_values(*unpaired_moments(base, other))) < 0.05)
    assert 0.03 <= wrong <= 0.07


def test_pairs_find_a_difference_that_independent_sides_miss() -> None:
    """A gain of 0.2 tokens per step over 128 prompts, between drafts that do well on nearly the same prompts."""
    base, other = worlds(128, gain=0.05, luck=0.02)
    value, error = paired_moments(base, other)
    paired = np.mean(np.array(p_values(value, error, 127)) < 0.05)
    unpaired = np.mean(np.array(p_values(*unpaired_moments(base, other))) < 0.05)
    assert paired > 0.9
    assert unpaired < 0.1
    assert np.mean(value) == pytest.approx(true_gain(0.05, luck=0.02), abs=0.02)


def true_gain(gain: float, luck: float = 0.08) -> float:
    base, other = worlds(400_000, gain=gain, luck=luck, num_worlds=1)
    return float(paired_moments(base, other)[0][0])


@pytest.mark.parametrize("count", [16, 32, 128])
def test_sides_that_differ_by_the_tolerance_are_rarely_called_equivalent(count: int) -> None:
    """The verdict is wrong there, and is given in at most 5% of worlds. The bound adds 2% for chance."""
    value, error = paired_moments(*worlds(count, gain=0.03, seed=3))
    edge = true_gain(0.03)
    shares = [item.equivalence_p_value(edge) for item in differences(value, error, count - 1)]
    assert np.mean(np.array(shares) < 0.05) <= 0.07


def test_equal_sides_are_called_equivalent_given_enough_prompts() -> None:
    value, error = paired_moments(*worlds(128))
    shares = [item.equivalence_p_value(0.5) for item in differences(value, error, 127)]
    assert np.mean(np.array(shares) < 0.05) > 0.9


def test_holms_correction_keeps_wrong_findings_over_many_categories_rare() -> None:
    """Without the correction, at least one of 8 categories is wrongly found in more than a fifth of the worlds."""
    value, error = paired_moments(*worlds(16, num_worlds=8 * NUM_WORLDS))
    shares = np.array(p_values(value, error, 15)).reshape(NUM_WORLDS, 8)
    assert np.mean(shares.min(axis=1) < 0.05) > 0.2
    assert np.mean([min(holm(list(world))) < 0.05 for world in shares]) <= 0.07


def test_a_difference_by_hand() -> None:
    """Twelve pairs of one step: 0, 1 and 2 tokens more, four times each."""
    base = [(2, 1)] * 12
    other = [(2 + place % 3, 1) for place in range(12)]
    found = paired_difference(base, other, 0.95)
    assert found is not None
    assert found.value == pytest.approx(1)
    assert found.error == pytest.approx(math.sqrt(8) / 11)
    width = 2.200985 * found.error
    assert (found.interval.low, found.interval.high) == pytest.approx((1 - width, 1 + width), abs=1e-5)
    assert found.lower_bound == pytest.approx(1 - 1.795885 * found.error, abs=1e-5)


def test_the_same_counts_do_not_differ() -> None:
    counts = [(place + 2, 1 + place % 5) for place in range(20)]
    found = paired_difference(counts, counts, 0.95)
    assert found is not None
    assert (found.value, found.error, found.p_value) == (0, 0, 1)
    assert found.equivalence_p_value(0.01) == 0
    apart = paired_difference([(2, 1)] * 20, [(3, 1)] * 20, 0.95)
    assert apart is not None
    assert (apart.p_value, apart.equivalence_p_value(0.5), apart.equivalence_p_value(1.5)) == (0, 1, 0)


def test_few_conversations_are_not_compared() -> None:
    """Conversations without steps on both sides are not counted."""
    counts = [(3, 1)] * (MIN_COMPARED - 1) + [(0, 0)]
    assert paired_difference(counts, counts, 0.95) is None
    assert unpaired_difference(counts, [(3, 1)] * 99, 0.95) is None
    assert paired_difference([(0, 0)] * 20, [(3, 1)] * 20, 0.95) is None
    assert paired_difference([*counts, (0, 0)], [*counts, (2, 1)], 0.95) is not None


def test_corrected_p_values_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.2]) == pytest.approx([0.04, 0.09, 0.09, 0.2])
    assert holm([]) == []
