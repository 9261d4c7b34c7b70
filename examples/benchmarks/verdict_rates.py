"""Measure how often comparisons, gates and `tune` claim a false thing, in the worlds of `interval_coverage.py`.

    python examples/benchmarks/verdict_rates.py           # tables of docs/measurements/coverage.md: ten minutes
    python examples/benchmarks/verdict_rates.py --replications 1000 --worlds heavy

10,000 replications, so the standard error of a rate of 5% is 0.2. A verdict at 95% may be false in at most 5.5 of 100.
Intervals of differences should cover the truth in 93 to 97 of 100 replications in which they are printed.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dflash_cli.acceptance.context_curve import compared_pairs, falling
from dflash_cli.acceptance.intervals.acceptance_difference import (
    MIN_DIFFERING,
    MIN_UNEVEN,
    AcceptanceDifference,
    holm,
    paired_moments,
    unpaired_moments,
)
from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_INTERVAL
from dflash_cli.acceptance.intervals.resampling import tail_widths
from dflash_cli.comparing.position_contrasts import few_differ
from dflash_cli.tuning.round_intervals import half_width
from interval_coverage import (
    CONFIDENCE,
    WORLDS,
    Floats,
    Generator,
    K,
    World,
    as_units,
    draw_counts,
    parts_of,
    print_head,
    print_row,
    true_ratio,
    widened,
)

PROMPTS = (12, 16, 32, 64, 96, 128)
LUCK = 0.08
"""Spread of the chance of one prompt between two drafts that are equally good."""
SHARE, BEFORE, AFTER = 0.05, 4.0, 1.5
"""A draft that falls from 4 to 1.5 tokens per step on 5% of the prompts."""
NOISE = 0.1
"""Spread of the steps of the other prompts, as a share of their number."""
ROUND_NOISE = 0.05
"""Spread of the logarithm of a step time between rounds."""


def draw_sides(world: World, rng: Generator, shape: tuple[int, int], num_sides: int = 2) -> list[Floats]:
    """Counts of acceptance lengths `[replications, prompts, K + 1]` of equally good drafts on the same prompts."""
    chance, median = world.draw(rng, shape)
    spread = np.exp(world.sigma * rng.normal(size=shape)) if world.sigma else math.inf
    length = np.clip(median * spread, 2, world.longest)
    sides = []
    for _ in range(num_sides):
        moved = np.clip(chance + LUCK * rng.normal(size=shape), 0.02, 0.97)
        fixed = replace(world, draw=partial(_fixed, moved, length), sigma=1e-9)
        sides.append(draw_counts(fixed, rng, shape, 1))
    return sides


def _fixed(chance: Floats, length: Floats, *_: object) -> tuple[Floats, Floats]:
    return chance, length


def differences(
    base: Floats, other: Floats, *, is_paired: bool, confidence: float = CONFIDENCE
) -> Iterator[AcceptanceDifference]:
    """Yield the difference in each replication, as `dflash compare` computes it.

    Degrees of freedom have three digits here, so that quantiles are computed once.
    """
    _, error, freedom = (paired_moments if is_paired else unpaired_moments)(base, other)
    first, second = (side.sum(axis=1) for side in (base, other))
    num_prompts = min(base.shape[1], other.shape[1])
    num_differing = np.full(len(base), num_prompts)
    if is_paired:
        num_differing = (base[..., 0] * other[..., 1] != other[..., 0] * base[..., 1]).sum(axis=1)
    rows = (first[:, 0] / first[:, 1], second[:, 0] / second[:, 1], error, freedom, num_differing)
    for was, now, spread, free, count in zip(*(row.tolist() for row in rows), strict=True):
        yield AcceptanceDifference(
            base=was, other=now, error=spread, freedom=float(f"{free:.3g}"), confidence=confidence,
            num_prompts=num_prompts, num_differing=count, is_paired=is_paired,
        )  # fmt: skip


def is_called_different(item: AcceptanceDifference) -> bool:
    """Whether the p-value is below 5%, without computing it."""
    return abs(item.value) > item.half_width and item.num_differing >= MIN_DIFFERING


def covers(
    found: Sequence[AcceptanceDifference], truth: float, is_shown: Callable[[AcceptanceDifference], bool] = bool
) -> float:
    """Percent of the printed intervals that contain the truth; NaN if fewer than 1 in 20 is printed."""
    intervals = (item.interval for item in found if is_shown(item))
    printed = [interval.low <= truth <= interval.high for interval in intervals if interval is not None]
    return 100 * float(np.mean(printed)) if len(printed) >= len(found) / 20 else math.nan


def false_differences(world: World, count: int, replications: int, kind: str) -> tuple[float, float]:
    """Percent of replications in which two equally good drafts differ by more than luck, and coverage of intervals."""
    rng, found = np.random.default_rng(count), list[AcceptanceDifference]()
    for part in parts_of(replications):
        if kind == "paired":
            base, other = (as_units(side)[:, 0] for side in draw_sides(world, rng, (part, count)))
        else:
            sizes = (count, count if kind == "unpaired" else 4 * count)
            base, other = (as_units(draw_counts(world, rng, (part, size), 1))[:, 0] for size in sizes)
        found += differences(base, other, is_paired=kind == "paired")
    return 100 * float(np.mean(list(map(is_called_different, found)))), covers(found, 0)


def as_position(counts: Floats, position: int) -> Floats:
    """Tokens and steps `[replications, prompts, 2]` if only this draft position is drafted."""
    steps = counts.sum(axis=-1)
    return np.stack([steps + counts[..., position:].sum(axis=-1), steps], axis=-1).astype(np.float64)


def false_positions(world: World, count: int, replications: int, *, is_paired: bool = True) -> tuple[float, ...]:
    """Percent of replications in which any position of two equally good drafts differs, and coverage by position.

    As `dflash compare`: p-values are corrected over positions. Coverage is lowest and highest over the positions that
    have an interval in 1 of 20 replications.
    """
    rng, found = np.random.default_rng(count), [list[AcceptanceDifference]() for _ in range(K)]
    for part in parts_of(replications):
        if is_paired:
            sides = draw_sides(world, rng, (part, count))
        else:
            sides = [draw_counts(world, rng, (part, count), 1) for _ in range(2)]
        for place, items in enumerate(found):
            items += differences(*(as_position(side, place + 1) for side in sides), is_paired=is_paired)
    called = [min(holm([item.p_value for item in row])) < 1 - CONFIDENCE for row in zip(*found, strict=True)]
    covered = (covers(items, 0, lambda item: few_differ(item) is None) for items in found)
    printed = [share for share in covered if not math.isnan(share)] or [math.nan]
    return 100 * float(np.mean(called)), min(printed), max(printed)


def false_falls(world: World, count: int, replications: int, num_lengths: int) -> float:
    """Percent of replications that name a fall, if a draft is equally good at every context length."""
    rng, found = np.random.default_rng(count + num_lengths), list[bool]()
    pairs = compared_pairs(range(num_lengths))
    level = 1 - (1 - CONFIDENCE) / len(pairs)
    for part in parts_of(replications):
        sides = [as_units(side)[:, 0] for side in draw_sides(world, rng, (part, count), num_lengths)]
        rows = (differences(sides[one], sides[two], is_paired=True, confidence=level) for one, two in pairs)
        found += [any(falling(item) is not None for item in row) for row in zip(*rows, strict=True)]
    return 100 * float(np.mean(found))


def draw_fall(rng: Generator, shape: tuple[int, int], noise: float) -> tuple[Floats, Floats]:
    """Tokens and steps of a draft, and of another that falls on few prompts. The texts are the same."""
    base = np.broadcast_to(np.array([200.0, 200 / BEFORE]), (*shape, 2))
    steps = np.maximum(25, np.rint(200 / BEFORE * (1 + noise * rng.normal(size=shape))))
    steps = np.where(rng.random(shape) < SHARE, np.rint(200 / AFTER), steps)
    return base, np.stack([base[..., 0], steps], axis=-1)


def false_passes(count: int, replications: int, noise: float) -> tuple[float, float]:
    """Percent of replications in which a gate passes the fall, if its tolerance is just the true fall, and coverage."""
    base, other = (side.sum(axis=(0, 1)) for side in draw_fall(np.random.default_rng(9), (2000, 1000), noise))
    edge = float(base[0] / base[1] - other[0] / other[1])
    rng, found = np.random.default_rng(count), list[AcceptanceDifference]()
    for part in parts_of(replications):
        found += differences(*draw_fall(rng, (part, count), noise), is_paired=True)
    passed = [item.lower_bound >= -edge or item.equivalence_p_value(edge) < 1 - CONFIDENCE for item in found]
    return 100 * float(np.mean(passed)), covers(found, -edge)


def draw_trade(rng: Generator, shape: tuple[int, int], noise: float) -> tuple[Floats, Floats]:
    """Tokens and steps of two drafts that are equal over all prompts. The second loses on few prompts only."""
    base, other = draw_fall(rng, shape, noise)
    is_fallen = other[..., 1] == np.rint(200 / AFTER)
    gained = (200 / BEFORE - SHARE * np.rint(200 / AFTER)) / (1 - SHARE) / (200 / BEFORE)
    return base, np.stack([other[..., 0], np.where(is_fallen, other[..., 1], other[..., 1] * gained)], axis=-1)


def false_trades(count: int, replications: int, noise: float) -> tuple[float, float]:
    """Percent of replications that call the drafts of `draw_trade` different, one way or the other, and coverage."""
    rng, found = np.random.default_rng(count), list[AcceptanceDifference]()
    for part in parts_of(replications):
        sides = draw_trade(rng, (part, count), noise)
        for ordered in (sides, sides[::-1]):
            found += differences(*ordered, is_paired=True)
    wrong = [is_called_different(item) and item.outweighs_unseen for item in found]
    return 100 * float(np.mean(wrong)), covers(found, 0)


def false_payoffs(num_candidates: int, num_rounds: int, replications: int, count: int = 64) -> float:
    """Percent of replications in which the best of several candidates is said to pay. All are as fast as plain steps.

    The candidates have independent prompts, which is the worst case.
    """
    world, rng, found = WORLDS["categories"], np.random.default_rng(num_candidates), []
    length, level = true_ratio(world, 1), 1 - (1 - CONFIDENCE) / num_candidates
    for part in parts_of(replications):
        units = as_units(draw_counts(world, rng, (part * num_candidates, count), 1))
        estimates = units[:, 0, :, 0].sum(axis=1) / units[:, 0, :, 1].sum(axis=1)
        wider = tail_widths(units, level) / tail_widths(units, CONFIDENCE)
        below = (wider * np.log(estimates / widened(units, 1000)[:, 0])).reshape(part, -1)
        noise = ROUND_NOISE * rng.normal(size=(part, 1 + num_candidates, num_rounds))
        plain, drafting = np.exp(noise[:, :1]), length * np.exp(noise[:, 1:])
        speedups = estimates.reshape(part, -1) * plain.mean(axis=-1) / drafting.mean(axis=-1)
        for place, best in enumerate(speedups.argmax(axis=1)):
            of_times = half_width((noise[place, 0] - noise[place, 1 + best]).tolist(), level)
            found.append(math.log(speedups[place, best]) > math.hypot(below[place, best], of_times))
    return 100 * float(np.mean(found))


def print_rates(start: Sequence[str], names: Sequence[str], found: Sequence[Sequence[float]]) -> None:
    """Print a row for each rate. A rate that was not measured is `-`."""
    for place, name in enumerate(names):
        print_row([*start, name, *("-" if math.isnan(item[place]) else f"{item[place]:.1f}" for item in found)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    names = [name for name, world in WORLDS.items() if world.repeats == 1]
    parser.add_argument("--worlds", type=lambda text: text.split(","), default=names)
    parser.add_argument("--replications", type=int, default=10_000)
    options = parser.parse_args(arguments)
    print_head(["equally good drafts", "samples", "rate", *(f"{count} prompts" for count in PROMPTS)])
    for name in options.worlds:
        for kind in ("paired", "unpaired", "unpaired, 1 to 4"):
            counts = [count for count in PROMPTS if kind != "unpaired, 1 to 4" or count >= MIN_UNEVEN]
            missing = [(math.nan, math.nan)] * (len(PROMPTS) - len(counts))
            rates = [false_differences(WORLDS[name], count, options.replications, kind) for count in counts]
            print_rates([name, kind], ("called different", "interval covers"), [*missing, *rates])
    print()
    print_head(["equally good drafts, by position", "samples", "rate", *(f"{count} prompts" for count in PROMPTS)])
    for name in options.worlds:
        for kind in ("paired", "unpaired"):
            of_positions = [
                false_positions(WORLDS[name], count, options.replications, is_paired=kind == "paired")
                for count in PROMPTS
            ]
            titles = ("any position called different", "lowest coverage", "highest coverage")
            print_rates([name, kind], titles, of_positions)
    print()
    counts = [count for count in PROMPTS if count >= MIN_FOR_INTERVAL]
    print_head(["falls with the context, though equally good", "lengths", *(f"{count} prompts" for count in counts)])
    for name in options.worlds:
        for number in (2, 3, 5):
            shares = (false_falls(WORLDS[name], count, options.replications, number) for count in counts)
            print_row([name, number, *(f"{share:.1f}" for share in shares)])
    print()
    for title, of_world, label in (
        ("fall on 5% of prompts", false_passes, "passes the gate"),
        ("fall on 5% of prompts, rise on the others", false_trades, "called different"),
    ):
        print_head([title, "rate", *(f"{count} prompts" for count in (*PROMPTS, 256, 512))])
        for noise, text in ((0.0, "the others stay equal"), (NOISE, "the others vary")):
            rates = [of_world(count, options.replications, noise) for count in (*PROMPTS, 256, 512)]
            print_rates([text], (label, "interval covers"), rates)
        print()
    print_head(["said to pay, though as fast as plain", "2 rounds", "4 rounds", "8 rounds"])
    for number in (1, 5):
        found_rates = (false_payoffs(number, num_rounds, options.replications) for num_rounds in (2, 4, 8))
        print_row([f"best of {number}", *(f"{rate:.1f}" for rate in found_rates)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
