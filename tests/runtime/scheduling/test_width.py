"""The adaptive width, simulated: its speed at known acceptance rates, and how it uses observations.

Step times come from a model of one H200 with the Qwen3-8B shape (docs/measurements/decode-steps.md). At batch 1, 8
and 32 a plain step takes 5.05, 5.24 and 5.89 ms, and a step with a whole block 5.93, 6.56 and 16.4 ms.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from time import perf_counter

import pytest

from dflash_runtime.scheduling.width import AdaptiveWidth, FixedWidth, StepTimes, SurvivalEstimate, widths_for

K = 15
BLOCK = K + 1
BATCHES = (1, 4, 8, 16, 32, 64)
IN_FLIGHT = 2

Draw = Callable[[random.Random], int]
"""Draws how many drafts of a whole block a step would accept."""


def step_ms(batch: int, width: int) -> float:
    """Milliseconds of a step: reading weights or multiplying, whichever is longer. Drafts always run whole blocks."""
    verify = longer(5.0 + 0.027 * (batch - 1), 0.0262 * batch * width)
    if width == 1:
        return verify + 0.05
    return verify + longer(0.9, 0.0037 * batch * BLOCK) + 0.002 * batch * (width - 1)


def longer(bytes_ms: float, operations_ms: float) -> float:
    """A smooth maximum of the two times."""
    return float((bytes_ms**4 + operations_ms**4) ** 0.25)


TIMES = StepTimes({batch: {width: step_ms(batch, width) for width in widths_for(K)} for batch in BATCHES})


def steady(rate: float) -> Draw:
    """Every position is accepted at the same rate."""

    def draw(generator: random.Random) -> int:
        return next((count for count in range(K) if generator.random() >= rate), K)

    return draw


@cache
def geometric(length: float) -> Draw:
    """Draws with one rate for all positions, such that whole blocks give `length` tokens per step on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**position for position in range(BLOCK)) < length else (low, rate)
    return steady(low)


@cache
def bimodal(length: float) -> Draw:
    """Draws from two kinds of steps: easy steps accept nearly every draft, hard steps hardly any."""
    easy, hard = steady(0.95), steady(0.2)
    means = [sum(rate**position for position in range(BLOCK)) for rate in (0.95, 0.2)]
    share = max(0.0, (length - means[1]) / (means[0] - means[1]))
    return lambda generator: (easy if generator.random() < share else hard)(generator)


def run(
    policy: AdaptiveWidth | FixedWidth, batch: int, phases: Sequence[Draw], num_steps: int
) -> tuple[float, Counter[int]]:
    """Tokens per millisecond, and how often each width was chosen. Results are observed two steps late."""
    generator = random.Random(batch)
    used: Counter[int] = Counter()
    queue: deque[tuple[int, list[int]]] = deque()
    tokens, ms = 0, 0.0
    for step in range(num_steps):
        width = policy.choose([BLOCK] * batch, 100 * batch)
        used[width] += 1
        draw = phases[step * len(phases) // num_steps]
        accepted = [min(draw(generator), width - 1) for _ in range(batch)]
        tokens += batch + sum(accepted)
        ms += step_ms(batch, width)
        queue.append((width, accepted))
        if len(queue) > IN_FLIGHT:
            heard, counts = queue.popleft()
            for count in counts if heard > 1 else ():
                policy.observe(heard - 1, count)
    return tokens / ms, used


def plain_rate(batch: int) -> float:
    return batch / step_ms(batch, 1)


def adaptive(batch: int, phases: Sequence[Draw], num_steps: int = 800) -> float:
    return run(AdaptiveWidth(TIMES, K), batch, phases, num_steps)[0]


@pytest.mark.parametrize("shape", [geometric, bimodal])
@pytest.mark.parametrize("batch", BATCHES)
def test_never_slower_than_plain_decoding(batch: int, shape: Callable[[float], Draw]) -> None:
    for length in (1.1, 1.3, 2.0, 4.24):
        assert adaptive(batch, [shape(length)], 4000 // batch + 200) >= 0.98 * plain_rate(batch), length


def test_a_large_batch_gains_by_verifying_less() -> None:
    """At batch 32. The gain is smaller with two kinds of steps, because the last drafts are accepted more often."""
    for length, least, least_bimodal in ((6.5, 1.15, 1.0), (4.24, 1.35, 1.08)):
        for shape, gain in ((geometric, least), (bimodal, least_bimodal)):
            whole = run(FixedWidth(), 32, [shape(length)], 300)[0]
            assert adaptive(32, [shape(length)]) >= gain * whole


def best_step(batch: int, draw: Draw) -> tuple[float, float]:
    """Tokens and milliseconds of a step of the best fixed width."""
    generator = random.Random(1)
    drawn = [draw(generator) for _ in range(5000)]
    steps = [
        (batch * (1 + sum(min(count, width - 1) for count in drawn) / len(drawn)), step_ms(batch, width))
        for width in widths_for(K)
    ]
    return max(steps, key=lambda step: step[0] / step[1])


@pytest.mark.parametrize("batch", BATCHES)
def test_the_chosen_width_is_nearly_the_best(batch: int) -> None:
    for length in (1.6, 3.0, 6.5):
        tokens, ms = best_step(batch, geometric(length))
        assert adaptive(batch, [geometric(length)]) >= 0.96 * tokens / ms


@pytest.mark.parametrize("lengths", [(1.3, 6.5), (6.5, 1.3), (4.24, 1.2, 6.5)], ids=str)
@pytest.mark.parametrize("batch", [8, 32, 64])
def test_the_width_follows_a_change_of_acceptance(batch: int, lengths: Sequence[float]) -> None:
    """At least 0.9 times as fast as the best width of each phase, and never slower than plain decoding."""
    phases = [geometric(length) for length in lengths]
    tokens, ms = (sum(values) for values in zip(*(best_step(batch, phase) for phase in phases), strict=True))
    found = adaptive(batch, phases, 1000 * len(phases))
    assert found >= 0.9 * tokens / ms
    assert found >= 0.98 * plain_rate(batch)


def test_trials_take_a_hundredth_of_the_time() -> None:
    """With drafts that are always rejected, all the time of drafting is lost."""
    rate, used = run(AdaptiveWidth(TIMES, K), 32, [steady(0.0)], 3000)
    assert 0 < sum(count for width, count in used.items() if width > 1) < 300
    assert rate >= 0.985 * plain_rate(32)


def test_noise_does_not_flip_the_width() -> None:
    """The case in which two widths are about equally good."""
    policy, generator, draw = AdaptiveWidth(TIMES, K), random.Random(0), geometric(5.0)
    taken = []
    for _ in range(2000):
        width = policy.choose([BLOCK] * 32, 0)
        taken.append(policy._width)
        for _ in range(32 if width > 1 else 0):
            policy.observe(width - 1, min(draw(generator), width - 1))
    assert sum(now != then for now, then in pairwise(taken[100:])) < 10


def test_the_same_observations_give_the_same_choices() -> None:
    found = [run(AdaptiveWidth(TIMES, K), 16, [bimodal(3.0), geometric(1.2)], 400) for _ in range(2)]
    assert found[0] == found[1]


def test_survival_is_the_product_of_conditional_rates_and_unverified_positions_keep_their_rate() -> None:
    estimate = SurvivalEstimate(3)
    for _ in range(20_000):
        for num_accepted in (0, 1, 3, 3):
            estimate.add(3, num_accepted, 4000)
    # 3/4 of the steps accept position 1. 2/3 of these accept position 2. All of these accept position 3.
    assert estimate.expected_tokens() == pytest.approx([1, 1.75, 2.25, 2.75], abs=0.01)
    for _ in range(20_000):
        estimate.add(1, 0, 4000)
        estimate.add(1, 1, 4000)
    assert estimate.expected_tokens() == pytest.approx([1, 1.5, 1.5 + 1 / 3, 1.5 + 2 / 3], abs=0.02)


def test_no_step_is_wider_than_the_widest_request() -> None:
    policy = AdaptiveWidth(TIMES, K)
    for _ in range(200):
        policy.observe(15, 15)
        assert policy.choose([4, 2, 3], 0) <= 4
        assert policy.choose([1, 1], 0) == 1
        assert policy.choose([5], 0) <= 5


def test_requests_with_a_small_width_lead_to_a_narrower_step() -> None:
    """With 31 requests of width 2, the last rows of one wide request are not worth their time."""
    together, alone = AdaptiveWidth(TIMES, K), AdaptiveWidth(TIMES, K)
    for policy in (together, alone):
        for _ in range(500):
            policy.observe(15, 15)
    assert together.choose([BLOCK] + [2] * 31, 0) < alone.choose([BLOCK] * 32, 0)


def test_long_context_makes_wide_steps_relatively_cheaper() -> None:
    """Every step reads the whole context, whatever its width."""
    times = StepTimes(TIMES.table, context_ms=3.5e-5, draft_context_ms=5e-6)
    chosen = []
    for num_context in (0, 32 * 16_000):
        policy, generator, draw = AdaptiveWidth(times, K), random.Random(0), geometric(4.24)
        for _ in range(500):
            policy.observe(15, draw(generator))
        chosen.append(policy.choose([BLOCK] * 32, num_context))
    assert chosen[0] < chosen[1]


def test_candidates_leave_out_widths_that_save_almost_no_time() -> None:
    policy = AdaptiveWidth(TIMES, K)
    assert policy.candidates(1, [BLOCK]) == [1, 16]
    assert set(policy.candidates(32, [BLOCK])) >= {1, 4, 6, 8, 12, 16}
    assert policy.candidates(32, [7]) == [width for width in policy.candidates(32, [BLOCK]) if width < 7]
    assert policy.candidates(32, [1]) == [1]
    assert set(policy.candidates(32, [3, BLOCK])) == {*policy.candidates(32, [BLOCK]), 3}
    assert FixedWidth().candidates(32, [3, BLOCK, 3]) == [3, BLOCK]
    assert widths_for(K) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert widths_for(4) == (1, 2, 3, 4, 5)
    assert widths_for(7) == (1, 2, 3, 4, 6, 8)


def test_times_are_interpolated_between_measured_ones() -> None:
    times = StepTimes.between({1: {1: 5.0, 4: 6.0}, 8: {1: 5.7, 4: 9.5}}, [1, 2, 5, 8, 10])
    assert times.row(1) == {1: 5.0, 4: 6.0}
    assert times.row(2) == pytest.approx({1: 5.1, 4: 6.5})
    assert times.row(3) == times.row(5) == pytest.approx({1: 5.4, 4: 8.0})
    assert times.row(10) == times.row(99) == {1: 5.7, 4: 9.5}


def test_a_choice_takes_less_than_200_microseconds() -> None:
    policy = AdaptiveWidth(TIMES, K)
    started = perf_counter()
    for _ in range(1000):
        policy.choose([BLOCK] * 64, 64_000)
    assert (perf_counter() - started) / 1000 < 2e-4


def test_times_between_two_batches_keep_their_order() -> None:
    """Rounding never makes a wider step faster than a narrower step."""
    generator = random.Random(0)
    for _ in range(2000):
        low, wide, high = generator.uniform(0.1, 1), generator.uniform(0.1, 1), generator.uniform(2, 3)
        low, wide = sorted((low, wide))
        times = StepTimes.between({2: {1: low, 2: wide}, 5: {1: high, 2: high}}, (2, 3, 4, 5))
        assert all(row[1] <= row[2] for row in times.table.values())
