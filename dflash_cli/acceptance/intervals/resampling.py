"""Confidence intervals of ratios of sums, such as tokens per step, from few units of unequal size.

A unit is a whole conversation, so conversations are resampled, never turns or steps. A percentile bootstrap of few
units is too narrow. Three corrections widen the interval:

- The bootstrap divides by n instead of n - 1. Here n is the effective number of units by their steps (Kish 1965).
- The spread is itself an estimate, so the interval has the tails of Student's t: the expanded percentile interval of
  Hesterberg 2015, "What Teachers Should Know about the Bootstrap".
- The precision of the spread depends on its distribution over the units. The degrees of freedom come from the observed
  fourth moment (Satterthwaite 1946): they are few if a few units cause most of the spread.

This method was chosen among ten by coverage: docs/explanation/statistics.md.

numpy is imported inside functions, so reading headers does not load it.
"""

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from dflash_cli.acceptance.intervals.student import student_quantile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[Any]

MIN_FREEDOM = 4
"""Lower limit of the degrees of freedom, as for five equal units. Without the limit, intervals are too wide."""
MAX_DRAWN = 4_000_000
"""Number of indices drawn at one time. It bounds the memory of a bootstrap."""


def resampled_bounds(units: "Floats", *, confidence: float, num_resamples: int, seed: int) -> "Floats":
    """Return lower and upper ends `[W, 2]` of W intervals over the same units.

    `units` is `[W, sides, U, 2]`: numerator and denominator of each unit. Some denominators may be 0. With one side the
    quantity is the ratio of the sums. With two sides it is the second ratio minus the first. Each resample draws the
    same units for all quantities and sides.
    """
    import numpy as np

    estimates = np.sort(_resample(units, num_resamples, seed), axis=0)
    tails = np.array([NormalDist().cdf(-width) for width in tail_widths(units, confidence)])
    return np.stack([_quantiles(estimates, share) for share in (tails, 1 - tails)], axis=-1)


def linear_bounds(units: "Floats", *, confidence: float) -> "Floats":
    """Return the bounds by the delta method: cheap, and close to `resampled_bounds` if there are many units."""
    import numpy as np

    centre = estimate(units)
    half = tail_widths(units, confidence) * np.sqrt(np.square(influence(units)).sum(axis=-1))
    return np.stack([centre - half, centre + half], axis=-1)


def tail_widths(units: "Floats", confidence: float) -> "Floats":
    """Return the half-width of each interval in standard errors of the bootstrap: `[W]`."""
    import numpy as np

    worth = _worth(units)
    freedoms = freedom_of(influence(units, leaves_out=True)).tolist()
    quantiles = [student_quantile((1 + confidence) / 2, freedom) for freedom in freedoms]
    widths: Floats = np.sqrt(worth / (worth - 1)) * np.array(quantiles)
    return widths


def _worth(units: "Floats") -> "Floats":
    """Return the effective number of units by their denominators, the smaller of the two sides: `[W]`."""
    import numpy as np

    sizes = units[..., 1]
    worth: Floats = (sizes.sum(axis=-1) ** 2 / np.square(sizes).sum(axis=-1)).min(axis=-1)
    return worth


def freedom_of(influences: "Floats") -> "Floats":
    """Return the degrees of freedom of an estimated variance, from its fourth moment, `[..., U]` -> `[...]`.

    `influences` are contributions that leave their unit out.
    """
    import numpy as np

    num_units = influences.shape[-1]
    squares = np.square(influences)
    total, fourth = squares.sum(axis=-1), np.square(squares).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        carrying = np.where(fourth > 0, total**2 / fourth, num_units / 3)
    found = 2 * num_units * carrying / np.maximum(num_units - carrying, 1e-3 * num_units)
    freedom: Floats = np.maximum(found, MIN_FREEDOM)
    return freedom


def influence(units: "Floats", *, leaves_out: bool = False) -> "Floats":
    """Return the first-order contribution of each unit to the estimate's error, `[..., sides, U, 2]` -> `[..., U]`.

    A unit pulls the ratio towards itself, so leaving it out moves the ratio by more than its residual. `leaves_out`
    corrects for this.
    """
    sums = units.sum(axis=-2, keepdims=True)
    residuals = (units[..., 0] - sums[..., 0] / sums[..., 1] * units[..., 1]) / sums[..., 1]
    return _between(residuals / (1 - units[..., 1] / sums[..., 1]) if leaves_out else residuals, axis=-2)


def estimate(units: "Floats") -> "Floats":
    """Return the ratio of the sums, or the difference of the two sides' ratios, `[..., sides, U, 2]` -> `[...]`."""
    sums = units.sum(axis=-2)
    return _between(sums[..., 0] / sums[..., 1], axis=-1)


def _between(values: "Floats", axis: int) -> "Floats":
    """Return the second side minus the first, or the only side."""
    last: Floats = values.take(-1, axis)
    return last - values.take(0, axis) if values.shape[axis] == 2 else last


def _resample(units: "Floats", num_resamples: int, seed: int) -> "Floats":
    """Return the ratio, or the difference of two ratios, in each resample: `[num_resamples, W]`."""
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
        parts.append(estimate((times.astype(np.float64) @ table).reshape(count, num_worlds, num_sides, 1, 2)))
    return np.concatenate(parts)


def _quantiles(ordered: "Floats", shares: "Floats") -> "Floats":
    """Return each column's quantile at its own share, interpolated linearly."""
    import numpy as np

    places = shares * (len(ordered) - 1)
    below = places.astype(np.int64)
    above, columns = np.minimum(below + 1, len(ordered) - 1), np.arange(ordered.shape[1])
    low, high = ordered[below, columns], ordered[above, columns]
    found: Floats = low + (places - below) * (high - low)
    return found
