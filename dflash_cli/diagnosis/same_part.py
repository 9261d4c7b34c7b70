"""Readings of other kinds of the same parts: scales, signs, offsets and one value, beside the reading that gains most.

Several mistakes in one part gain from the same readings: a norm times 3 also gains from subtracting 1. So before a
reading of a part is named, the part is read in the other ways as well, and in finer scales than in the search.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.alternatives import AlternativeReading, of_weights
from dflash_cli.diagnosis.reading_results import ReadingResult, by_loss
from dflash_cli.diagnosis.suspect_parts import FEATURES
from dflash_cli.diagnosis.value_readings import scaled_parts
from dflash_cli.diagnosis.weight_looks import is_offset, is_plus_one
from dflash_cli.diagnosis.weight_orders import GATE
from dflash_cli.diagnosis.weight_rewrites import ENDS, HEAD_NORMS, LAYER_NORMS, NORMS
from dflash_cli.diagnosis.weight_space import WeightReading, WeightSpace, Where, named, only, short, spots

if TYPE_CHECKING:
    from torch import Tensor

MOST_PARTS = 4
"""Parts of one reading that are read in other ways. A reading of more parts is an order or a layout of whole layers."""

FACTORS = (-1.0, 1 / 16, 1 / 4, 1 / 2, 2.0, 4.0, 16.0)
ROOT = 2.0**0.5
USUAL = (1.1, 1.2, ROOT, 1.6, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0, 16 * ROOT, 32.0)
FINER = (*(1 / factor for factor in reversed(USUAL)), *USUAL)
"""Usual factors. Factors near the best of FACTORS are tried."""

NEAR = 2.5

ON_TOP = (1 / ROOT, ROOT)
"""Factors of a part on top of a reading of it. Training chose the scale, so that both raise the loss."""

Estimate = Callable[[AlternativeReading], ReadingResult]


def readings_of_same_parts(
    best: AlternativeReading, weights: "Mapping[str, Tensor]", estimate: Estimate
) -> list[ReadingResult]:
    """Estimates of other kinds of readings of the parts that a reading changes, the lowest loss first."""
    space = WeightSpace(best.config, weights)
    found = []
    for parts, where in contested(best):
        if len(parts) == 1:
            found += [estimate(of_weights(best.config, item)) for item in _values(space, parts[0], where)]
        scales = {factor: estimate(_scaled(best, parts, where, factor)) for factor in FACTORS}
        lowest = min(scales, key=lambda factor: scales[factor].score.loss)
        near = [factor for factor in FINER if factor not in scales and lowest / NEAR < factor < lowest * NEAR]
        found += [*scales.values(), *(estimate(_scaled(best, parts, where, factor)) for factor in near)]
    return sorted(found, key=by_loss)


def is_contesting(guess: AlternativeReading, best: AlternativeReading) -> bool:
    """Whether a guess is tried although the best reading restores nearly all: another mistake may look alike.

    A scaled tap may look like another tapped layer, and a scaled norm like another setting of attention.
    """
    if best.factor == "taps":
        return guess.touches >= FEATURES
    is_value = guess.is_scale or guess.changes_values or bool(guess.halves)
    if best.factor == "weights":
        return is_value and bool(guess.touches & best.touches)
    return guess.is_scale and all(part in NORMS and layer is None for part, layer in guess.touches)


def scales_on_top(best: AlternativeReading) -> list[AlternativeReading]:
    """Small changes of the scale of each part that a reading changes, to be tried on top of it."""
    return [_scaled(best, parts, where, factor) for parts, where in contested(best) for factor in ON_TOP]


def contested(best: AlternativeReading) -> list[tuple[tuple[str, ...], Where]]:
    """The parts that a reading changes, with their layers, and all norms among them together.

    Nothing for readings of many matrices, which are orders and layouts. A norm follows fc, so the scale of fc has no
    effect. A norm folded into matrices may instead have been scaled.
    """
    found: dict[str, set[int | None]] = {}
    for part, layer in best.touches:
        found.setdefault(part, set()).add(layer)
    found.pop("fc", None)
    # A query norm times 4 equals a key norm times 4, so both together add nothing.
    is_of_norms = len(found) > 1 and set(found) <= set(NORMS) and set(found) != set(HEAD_NORMS)
    if best.factor != "weights" or best.is_neutral or (len(found) > MOST_PARTS and not is_of_norms):
        return []
    if best.changes_values and GATE in found:
        found.setdefault(LAYER_NORMS[1], found[GATE])
    parts: list[tuple[tuple[str, ...], Where]] = [((part,), _where(layers)) for part, layers in sorted(found.items())]
    if is_of_norms:
        inner = [layers for part, layers in found.items() if part not in ENDS]
        parts.append((tuple(sorted(found)), _where(set().union(*inner)) if inner else None))
    return parts if len(found) <= MOST_PARTS else parts[-1:]


def _where(layers: set[int | None]) -> Where:
    known = sorted(layer for layer in layers if layer is not None)
    if len(known) < len(layers):
        return None
    return known[0] if len(known) == 1 else tuple(known)


def _scaled(best: AlternativeReading, parts: tuple[str, ...], where: Where, factor: float) -> AlternativeReading:
    return of_weights(best.config, scaled_parts(best.config, parts, factor, where))


def _values(space: WeightSpace, part: str, where: Where) -> Iterator[WeightReading]:
    """Offsets of a norm, as far as its values allow them, and the norm with one value."""
    if part not in NORMS:
        return
    name, touches = short(part), spots((part,), where)
    for amount, allows, way, cause in (
        (1.0, is_offset, "read as 1 + w", "hold offsets from 1"),
        (-1.0, is_plus_one, "read as w - 1", "hold weights to which 1 was added"),
    ):
        if isinstance(where, tuple) or not allows(space.weights, space.config, (part,), where):
            continue
        rewrite = rewrites.change_parts({part: rewrites.shift(amount)}, only(where))
        title = named(f"{name} weights {way}", where)
        yield WeightReading(title, rewrite, f"{name} weights {cause}", touches, changes_values=True, shift=amount)
    rewrite = rewrites.change_parts({part: rewrites.flatten}, only(where))
    yield WeightReading(named(f"without {name}", where), rewrite, f"{name} is damaged", touches, is_neutral=True)
