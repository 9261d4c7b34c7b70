"""Confidence intervals of ratios of sums, such as tokens per step, when few units of unequal size were drawn.

What was drawn are whole conversations, so they are resampled, never their turns or steps. A percentile bootstrap of few
units is too narrow, for three reasons, each of which widens it here:

- the bootstrap divides by n instead of n - 1, where n is what the units are worth beside equal ones: the number of
  Kish (1965), by their steps;
- the spread is itself an estimate, so its tails are those of Student's t (Hesterberg 2015, "What Teachers Should Know
  about the Bootstrap", the expanded percentile interval);
- how good that estimate is depends on what the spread comes from: the degrees of freedom are those of a variance with
  the fourth moment that was seen (Satterthwaite 1946). Where a few units make up most of the spread they are few; where
  units are of two kinds they are many.

Chosen among ten methods by how often they cover the truth: docs/explanation/statistics.md.

numpy is imported where an interval is taken, so that reading headers needs none.
"""

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from dflash_cli.acceptance.intervals.student import student_quantile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[Any]

MIN_UNITS = 12
"""With fewer an interval misses the truth more often than it says, by whatever method: a kind of prompt that is one in
four is missing from one draw of 8 units in ten, and nothing that was drawn shows it; of 12 it is one in thirty."""
MIN_FREEDOM = 4
"""A variance of that many units is not known worse than one of five equal ones; without it intervals are too wide."""
MAX_DRAWN = 4_000_000
"""Indices drawn at a time, which bounds the memory of a bootstrap."""


def resampled_bounds(units: "Floats", *, confidence: float, num_resamples: int, seed: int) -> "Floats":
    """Lower and upper ends `[W, 2]` of W intervals over the same units.

    `units` is `[W, sides, U, 2]`: of each unit numerator and denominator, which may be 0 for some of many. With one
    side the quantity is the ratio of the sums, with two it is how much larger that of the second side is. Each resample
    draws the same units for all.
    """
    import numpy as np

    estimates = np.sort(_resample(units, num_resamples, seed), axis=0)
    tails = np.array([NormalDist().cdf(-width) for width in tail_widths(units, confidence)])
    return np.stack([_quantiles(estimates, share) for share in (tails, 1 - tails)], axis=-1)


def linear_bounds(units: "Floats", *, confidence: float) -> "Floats":
    """What `resampled_bounds` comes to where there are many units, at the cost of a sum: the delta method."""
    import numpy as np

    centre = _estimate(units.sum(axis=2))
    half = tail_widths(units, confidence) * np.sqrt(np.square(_influence(units)).sum(axis=-1))
    return np.stack([centre - half, centre + half], axis=-1)


def tail_widths(units: "Floats", confidence: float) -> "Floats":
    """How many standard errors of a bootstrap an interval takes to either side: `[W]`."""
    import numpy as np

    worth = _worth(units)
    quantiles = [student_quantile((1 + confidence) / 2, freedom) for freedom in _freedom(units)]
    widths: Floats = np.sqrt(worth / (worth - 1)) * np.array(quantiles)
    return widths


def _worth(units: "Floats") -> "Floats":
    """How many units of equal denominators these are worth, on the side where that is less: `[W]`."""
    import numpy as np

    sizes = units[..., 1]
    worth: Floats = (sizes.sum(axis=-1) ** 2 / np.square(sizes).sum(axis=-1)).min(axis=-1)
    return worth


def _freedom(units: "Floats") -> "Floats":
    """Degrees of freedom of the variance that was estimated, by its fourth moment: `[W]`."""
    import numpy as np

    num_units = units.shape[2]
    # Left out, a unit moves the ratio by more than its residual says: it has drawn the ratio to itself.
    shares = units[..., 1] / units[..., 1].sum(axis=-1, keepdims=True)
    squares = np.square(_influence(units, leverage=1 - shares))
    total, fourth = squares.sum(axis=-1), np.square(squares).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        carrying = np.where(fourth > 0, total**2 / fourth, num_units / 3)
    found = 2 * num_units * carrying / np.maximum(num_units - carrying, 1e-3 * num_units)
    freedom: Floats = np.maximum(found, MIN_FREEDOM)
    return freedom


def _influence(units: "Floats", leverage: "Floats | float" = 1.0) -> "Floats":
    """What each unit contributes to the error of the estimate, to first order: `[W, U]`."""
    sums = units.sum(axis=2, keepdims=True)
    residuals = units[..., 0] - sums[..., 0] / sums[..., 1] * units[..., 1]
    return _between(residuals / leverage / sums[..., 1], axis=1)


def _estimate(sums: "Floats") -> "Floats":
    """The quantity from sums `[..., sides, 2]`."""
    return _between(sums[..., 0] / sums[..., 1], axis=-1)


def _between(values: "Floats", axis: int) -> "Floats":
    """The second of two sides minus the first; the only one where there is one."""
    last: Floats = values.take(-1, axis)
    return last - values.take(0, axis) if values.shape[axis] == 2 else last


def _resample(units: "Floats", num_resamples: int, seed: int) -> "Floats":
    """The quantity in each resample: `[num_resamples, W]`."""
    import numpy as np

    num_worlds, num_sides, num_units, _ = units.shape
    table = units.transpose(2, 0, 1, 3).reshape(num_units, -1).astype(np.float64)
    generator = np.random.default_rng(seed)
    chunk = max(1, MAX_DRAWN // num_units)
    parts = []
    for start in range(0, num_resamples, chunk):
        count = min(chunk, num_resamples - start)
        drawn = generator.integers(0, num_units, (count, num_units), dtype=np.uint32)
        places = drawn + np.arange(count)[:, None] * num_units
        times = np.bincount(places.ravel(), minlength=count * num_units).reshape(count, num_units)
        parts.append(_estimate((times.astype(np.float64) @ table).reshape(count, num_worlds, num_sides, 2)))
    return np.concatenate(parts)


def _quantiles(ordered: "Floats", shares: "Floats") -> "Floats":
    """Of each column the quantile of its own share, between the two values next to it."""
    import numpy as np

    places = shares * (len(ordered) - 1)
    below = places.astype(np.int64)
    above, columns = np.minimum(below + 1, len(ordered) - 1), np.arange(ordered.shape[1])
    low, high = ordered[below, columns], ordered[above, columns]
    found: Floats = low + (places - below) * (high - low)
    return found
