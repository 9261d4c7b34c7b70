"""Measure how often intervals of the acceptance length cover the truth, by method, in simulated worlds.

    python examples/benchmarks/interval_coverage.py         # tables of docs/measurements/coverage.md: half an hour
    python examples/benchmarks/interval_coverage.py --methods widened,delta-t,percentile --replications 2000
    python examples/benchmarks/interval_coverage.py --worlds heavy --prompts 20 --methods widened,BCa

Each of 10,000 replications draws prompts from a world. Each prompt has its own acceptance probability and its own
answer lengths. Then an interval of tokens per step is computed. A 95% method should cover the truth in 93 to 97 of 100
replications; the standard error of a number is 0.25. Numbers of prompts without an interval are measured all the same.
`verdict_rates.py` measures comparisons in the same worlds.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_INTERVAL
from dflash_cli.acceptance.intervals.resampling import linear_bounds, resampled_bounds
from dflash_cli.acceptance.intervals.student import student_quantile

Floats = NDArray[Any]
Generator = np.random.Generator

K = 7
CONFIDENCE = 0.95
LENGTHS = np.arange(1, K + 2)
MANY_TOKENS = 10_000
"""Longer answers need more draws for the truth."""
PART = 500
"""Replications at one time, which bounds the memory."""


@dataclass(frozen=True, slots=True)
class World:
    """How prompts are drawn: acceptance probability and median answer length of each prompt, and the spread of lengths.

    Lengths are log-normal with spread `sigma`, cut at `longest`. With `sigma` 0 all answers have length `longest`. Each
    prompt is drawn `repeats` times.
    """

    meaning: str
    draw: Callable[[Generator, tuple[int, int]], tuple[Floats, Floats | float]]
    sigma: float
    longest: int
    repeats: int = 1

    def draw_kinds(self, rng: Generator, shape: tuple[int, int]) -> tuple[Floats, Floats | float]:
        """Return chance and median length of conversations `[replications, conversations]`, with repeats of prompts."""
        chance, median = self.draw(rng, (shape[0], shape[1] // self.repeats))
        if self.repeats == 1:
            return chance, median
        return chance.repeat(self.repeats, axis=1), np.broadcast_to(median, chance.shape).repeat(self.repeats, axis=1)


def _two_kinds(share: float, high: float, low: float) -> Callable[[Generator, tuple[int, int]], tuple[Floats, float]]:
    return lambda rng, shape: (np.where(rng.random(shape) < share, high, low), 200.0)


def _spread_out(rng: Generator, shape: tuple[int, int]) -> tuple[Floats, float]:
    return rng.beta(2, 2, shape), 150.0


def _two_clouds(rng: Generator, shape: tuple[int, int]) -> tuple[Floats, float]:
    return np.where(rng.random(shape) < 0.5, rng.beta(12, 1.5, shape), rng.beta(1.5, 8, shape)), 200.0


def _loops(rng: Generator, shape: tuple[int, int]) -> tuple[Floats, Floats]:
    """6% of the answers repeat themselves up to the limit, and nearly all their draft tokens are accepted."""
    is_loop = rng.random(shape) < 0.06
    return np.where(is_loop, 0.97, rng.beta(4, 4, shape)), np.where(is_loop, 1e9, 150.0)


def _pareto(exponent: float) -> Callable[[Generator, tuple[int, int]], tuple[Floats, Floats]]:
    return lambda rng, shape: (rng.beta(2, 2, shape), 60 * (1 - rng.random(shape)) ** (-1 / exponent))


CATEGORIES = np.array([[0.85, 300], [0.8, 250], [0.4, 150], [0.6, 60], [0.3, 120]])
"""Mean probability and median length of code, mathematics, chat, extraction, translation."""


def _categories(rng: Generator, shape: tuple[int, int]) -> tuple[Floats, Floats]:
    mean, length = np.moveaxis(CATEGORIES[rng.integers(0, len(CATEGORIES), shape)], -1, 0)
    return rng.beta(4 * mean, 4 * (1 - mean)), length


WORLDS = {
    "even": World("two kinds, answers of one length", _two_kinds(0.5, 0.8, 0.3), 0, 128),
    "bimodal": World("40% nearly all accepted, 60% nearly none", _two_kinds(0.4, 0.95, 0.1), 0.6, 512),
    "few-high": World("25% nearly all accepted, 75% nearly none", _two_kinds(0.25, 0.95, 0.1), 0.6, 512),
    "few-low": World("75% nearly all accepted, 25% nearly none", _two_kinds(0.75, 0.95, 0.1), 0.6, 512),
    "heavy": World("any chance, heavy-tailed lengths", _spread_out, 1.2, 2048),
    "both": World("two clouds, heavy-tailed lengths", _two_clouds, 1.0, 2048),
    "categories": World("five categories with their own", _categories, 0.8, 1024),
    "pareto": World("any chance, Pareto lengths of infinite variance", _pareto(1.5), 1e-9, 1_000_000),
    "pareto-1.2": World("the same, heavier", _pareto(1.2), 1e-9, 1_000_000),
    "repeats": World("like bimodal, each prompt four times", _two_kinds(0.4, 0.95, 0.1), 0.6, 512, repeats=4),
    "loops": World("6% of answers loop up to the limit", _loops, 0.6, 2048),
}


def draw_counts(world: World, rng: Generator, shape: tuple[int, int], num_turns: int) -> Floats:
    """Counts of each acceptance length in each conversation: `[replications, conversations, K + 1]`."""
    chance, median = world.draw_kinds(rng, shape)
    turns = (*shape, num_turns)
    spread = np.exp(world.sigma * rng.normal(size=turns)) if world.sigma else np.full(turns, math.inf)
    num_tokens = np.clip(np.asarray(median)[..., None] * spread, 2, world.longest)
    # Turns of a conversation are similar, but not equal.
    odds = np.log(np.clip(chance, 1e-6, 1 - 1e-6) / np.clip(1 - chance, 1e-6, 1))[..., None]
    shares = _shares(1 / (1 + np.exp(-odds - 0.3 * rng.normal(size=turns))))
    num_steps = np.maximum(1, np.rint(num_tokens / (shares @ LENGTHS))).astype(np.int64)
    counts: Floats = rng.multinomial(num_steps, shares).sum(axis=2)
    return counts


def _shares(chance: Floats) -> Floats:
    """Share of steps of each acceptance length for this acceptance probability: `[..., K + 1]`."""
    reached = chance[..., None] ** np.arange(K + 1)
    return np.concatenate([reached[..., :-1] - reached[..., 1:], reached[..., -1:]], axis=-1)


def as_units(counts: Floats) -> Floats:
    """Tokens and steps `[replications, 1, conversations, 2]`."""
    return np.stack([counts @ LENGTHS, counts.sum(axis=-1)], axis=-1)[:, None].astype(np.float64)


def as_position_units(counts: Floats) -> Floats:
    """Steps that accepted each position, and all steps: `[replications * K, 1, conversations, 2]`."""
    steps = counts.sum(axis=-1, keepdims=True)
    accepted = steps - counts.cumsum(axis=-1)[..., :-1]
    pairs = np.stack([accepted, np.broadcast_to(steps, accepted.shape)], axis=-1).astype(np.float64)
    return pairs.transpose(0, 2, 1, 3).reshape(-1, 1, counts.shape[1], 2)


@cache
def true_ratio(world: World, num_turns: int, position: int = 0) -> float:
    """Tokens per step over very many conversations, or the share of steps that accept `position`."""
    rng, sums = np.random.default_rng(99), np.zeros(K + 1)
    for _ in range(40 if world.longest > MANY_TOKENS else 4):
        sums += draw_counts(world, rng, (100, 500), num_turns).sum(axis=(0, 1))
    return float((sums @ LENGTHS if position == 0 else sums[position:].sum()) / sums.sum())


def widened(units: Floats, num_resamples: int) -> Floats:
    """The method that `dflash` uses."""
    return resampled_bounds(units, confidence=CONFIDENCE, num_resamples=num_resamples, seed=1)


def linear(units: Floats, num_resamples: int) -> Floats:
    """The method of the progress line."""
    return linear_bounds(units, confidence=CONFIDENCE)


def _parts(units: Floats) -> tuple[Floats, Floats, int, Floats]:
    """Tokens, steps, number of units, and the ratio of sums."""
    tokens, steps = units[:, 0, :, 0], units[:, 0, :, 1]
    return tokens, steps, tokens.shape[1], tokens.sum(1) / steps.sum(1)


def _drawn(units: Floats, num_resamples: int) -> tuple[Floats, Floats]:
    """Counts of each unit in each resample `[num_resamples, U]`, and the ratios of the resamples."""
    tokens, steps, count, _ = _parts(units)
    times = np.random.default_rng(1).multinomial(count, np.full(count, 1 / count), num_resamples).astype(float)
    return times, (times @ tokens.T) / (times @ steps.T)


def delta_t(units: Floats, num_resamples: int) -> Floats:
    """Linearised ratio with Student's t (Cochran 1977)."""
    tokens, steps, count, ratio = _parts(units)
    residuals = tokens - ratio[:, None] * steps
    error = np.sqrt(count / (count - 1) * np.square(residuals).sum(1)) / steps.sum(1)
    half = student_quantile((1 + CONFIDENCE) / 2, count - 1) * error
    return np.stack([ratio - half, ratio + half], axis=-1)


def percentile(units: Floats, num_resamples: int) -> Floats:
    return np.quantile(_drawn(units, num_resamples)[1], [0.025, 0.975], axis=0).T


def expanded(units: Floats, num_resamples: int) -> Floats:
    """Percentiles with Student's tails for equal units (Hesterberg 2015)."""
    count = units.shape[2]
    tail = NormalDist().cdf(-math.sqrt(count / (count - 1)) * student_quantile(0.975, count - 1))
    return np.quantile(_drawn(units, num_resamples)[1], [tail, 1 - tail], axis=0).T


def accelerated(units: Floats, num_resamples: int) -> Floats:
    """BCa (Efron 1987)."""
    tokens, steps, _, ratio = _parts(units)
    drawn = np.sort(_drawn(units, num_resamples)[1], axis=0)
    normal, columns = NormalDist(), np.arange(len(ratio))
    below = np.clip((drawn < ratio).mean(0), 1e-4, 1 - 1e-4)
    bias = np.array([normal.inv_cdf(share) for share in below])
    without = (tokens.sum(1)[:, None] - tokens) / (steps.sum(1)[:, None] - steps)
    moved = without.mean(1)[:, None] - without
    speed = (moved**3).sum(1) / (6 * np.maximum(np.square(moved).sum(1), 1e-300) ** 1.5)
    ends = []
    for z in (-1.96, 1.96):
        shares = [normal.cdf(value) for value in bias + (bias + z) / (1 - speed * (bias + z))]
        ends.append(drawn[np.clip(np.array(shares) * num_resamples, 0, num_resamples - 1).astype(int), columns])
    return np.stack(ends, axis=-1)


def studentised(units: Floats, num_resamples: int) -> Floats:
    """Bootstrap-t, with the linearised error of each resample."""
    tokens, steps, count, ratio = _parts(units)
    times, drawn = _drawn(units, num_resamples)

    def error(weights: Floats, ratios: Floats) -> Floats:
        squares = weights @ np.square(tokens).T - 2 * ratios * (weights @ (tokens * steps).T)
        squares += ratios**2 * (weights @ np.square(steps).T)
        found: Floats = np.sqrt(np.maximum(count / (count - 1) * squares, 1e-12)) / (weights @ steps.T)
        return found

    low, high = np.quantile((drawn - ratio) / error(times, drawn), [0.025, 0.975], axis=0)
    own = error(np.ones((1, count)), ratio[None])[0]
    return np.stack([ratio - high * own, ratio - low * own], axis=-1)


METHODS = {
    "widened": widened,
    "linear": linear,
    "delta-t": delta_t,
    "percentile": percentile,
    "expanded": expanded,
    "BCa": accelerated,
    "bootstrap-t": studentised,
}


def coverage(bounds: Floats, truth: float) -> float:
    """Percent of replications with the truth between the bounds."""
    return float(100 * ((bounds[:, 0] <= truth) & (truth <= bounds[:, 1])).mean())


def measure(options: argparse.Namespace, name: str, num_turns: int, count: int) -> list[float]:
    """Coverage of each method in one world. Repeats of a prompt are one unit."""
    world = WORLDS[name]
    rng, truth = np.random.default_rng(count + num_turns), true_ratio(world, num_turns)
    bounds: dict[str, list[Floats]] = {method: [] for method in options.methods}
    for part in parts_of(options.replications):
        counts = draw_counts(world, rng, (part, count * world.repeats), num_turns)
        units = as_units(counts.reshape(part, count, world.repeats, K + 1).sum(axis=2))
        for method, found in bounds.items():
            found.append(METHODS[method](units, options.bootstrap))
    return [coverage(np.concatenate(found), truth) for found in bounds.values()]


def parts_of(replications: int) -> Iterator[int]:
    """Yield the number of replications of each part."""
    for done in range(0, replications, PART):
        yield min(PART, replications - done)


def measure_positions(options: argparse.Namespace, name: str, count: int) -> list[float]:
    """Coverage of `widened` for the share of each position, in conversations of one turn."""
    rng, found = np.random.default_rng(count + 1), []
    for part in parts_of(options.replications):
        units = as_position_units(draw_counts(WORLDS[name], rng, (part, count), 1))
        found.append(widened(units, options.bootstrap).reshape(-1, K, 2))
    bounds = np.concatenate(found)
    truths = (true_ratio(WORLDS[name], 1, position) for position in range(1, K + 1))
    return [coverage(bounds[:, place], truth) for place, truth in enumerate(truths)]


def print_row(cells: Iterable[object]) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def print_head(cells: Sequence[object]) -> None:
    print_row(cells)
    print("|---" * len(cells) + "|")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--worlds", type=_words, default=list(WORLDS))
    parser.add_argument("--methods", type=_words, default=["widened"])
    parser.add_argument("--prompts", type=_words, default=["12", "16", "32", "64", "128"])
    parser.add_argument("--replications", type=int, default=10_000)
    parser.add_argument("--bootstrap", type=int, default=1000)
    options = parser.parse_args()
    counts, found = [int(text) for text in options.prompts], {}
    print_head([f"{options.methods[0]}, by world", "turns", *(f"{count} prompts" for count in counts)])
    for name, num_turns in product(options.worlds, (1, 5)):
        for count in counts:
            found[name, num_turns, count] = measure(options, name, num_turns, count)
        shown = (f"{found[name, num_turns, count][0]:.1f}" for count in counts)
        print_row([f"{name}: {WORLDS[name].meaning}", num_turns, *shown])
    print()
    print_head(["lowest to highest, by method", *(f"{count} prompts" for count in counts)])
    for place, method in enumerate(options.methods):
        columns = [[value[place] for key, value in found.items() if key[2] == count] for count in counts]
        print_row([method, *(f"{min(column):.1f} to {max(column):.1f}" for column in columns)])
    print()
    counts = [count for count in counts if count >= MIN_FOR_INTERVAL]
    print_head(["lowest to highest, by position", *(f"{count} prompts" for count in counts)])
    for name in (name for name in options.worlds if WORLDS[name].repeats == 1):
        columns = [measure_positions(options, name, count) for count in counts]
        print_row([name, *(f"{min(column):.1f} to {max(column):.1f}" for column in columns)])
    return 0


def _words(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    sys.exit(main())
