"""The parts of a draft to read in other ways: parts that it misses least, and parts with the most important scale."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_cli.diagnosis.reading_results import ReadingResult
from dflash_cli.diagnosis.weight_rewrites import ENDS, HEAD_NORMS, MATRICES, NORMS, PARTS, QKV, Spot, part_of
from dflash_runtime.draft_config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor


FEATURES: frozenset[Spot] = frozenset({("fc", None)})

HARM = 0.03
"""Share of the loss that a draft saves without a part that harms. Noise in a matrix of three layers costs 4 to 26%."""


def suspect_spots(left_out: Sequence[ReadingResult], count: int) -> frozenset[Spot]:
    """The parts that a draft misses least: norms, and matrices, of all layers and of single layers, `count` of each.

    A draft hardly misses a norm, so norms do not compete with matrices. A suspect norm of queries or keys makes both
    projections of its layer suspect, and the columns of fc always are. `left_out` starts with the lowest loss.
    """
    ranked: dict[tuple[bool, bool], list[frozenset[Spot]]] = defaultdict(list)
    for item in left_out:
        spots = item.alternative.touches
        if spots == FEATURES:
            continue
        ranked[all(part in NORMS for part, _ in spots), any(layer is None for _, layer in spots)].append(spots)
    found = {spot for group in ranked.values() for spots in group[:count] for spot in spots}
    beside = {(part, layer) for norm, layer in found if norm in HEAD_NORMS for part in QKV[:2]}
    return FEATURES | found | beside


def harmful_spots(left_out: Sequence[ReadingResult], own_loss: float) -> frozenset[Spot]:
    """The parts without which a draft is clearly better. Of single layers, the one with the most harmful part counts.

    The smallest group of parts that is left out decides about a part.
    """
    losses: dict[Spot, float] = {}
    for item in sorted(left_out, key=lambda item: -len(item.alternative.touches)):
        losses |= dict.fromkeys(item.alternative.touches - FEATURES, item.score.loss)
    clear = {spot: loss for spot, loss in losses.items() if loss < (1 - HARM) * own_loss}
    _, worst = min(((loss, layer) for (_, layer), loss in clear.items() if layer is not None), default=(0.0, None))
    return frozenset(spot for spot in clear if spot[1] in {None, worst})


def most_pulled(pulls: "Mapping[str, Tensor]", config: DraftConfig, count: int) -> frozenset[Spot]:
    """Return `count` parts of all or single layers: their scale changes the loss most. `pulls` sum to the change."""
    single: dict[Spot, float] = {}
    whole: dict[Spot, float] = {}
    for part in PARTS:
        found = [float(item.float().sum()) for item in _values(pulls, config, part)]
        whole[part, None] = sum(map(abs, found))
        single |= {} if part in ENDS else {(part, layer): abs(value) for layer, value in enumerate(found)}
    return frozenset(spot for spots in (whole, single) for spot in sorted(spots, key=lambda at: -spots[at])[:count])


def most_strained(pulls: "Mapping[str, Tensor]", config: DraftConfig, count: int) -> frozenset[Spot]:
    """Return `count` matrices of single layers: their values change the loss most, in either direction."""
    found: dict[Spot, float] = {}
    for part in MATRICES:
        if part not in ENDS:
            sizes = [float(item.float().abs().sum()) for item in _values(pulls, config, part)]
            found |= {(part, layer): size for layer, size in enumerate(sizes)}
    return frozenset(sorted(found, key=lambda at: -found[at])[:count])


def _values(pulls: "Mapping[str, Tensor]", config: DraftConfig, part: str) -> "list[Tensor]":
    layers = [None] if part in ENDS else range(config.num_layers)
    return [part_of(pulls, config, part, layer) for layer in layers]
