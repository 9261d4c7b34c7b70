"""The parts of a draft to read in other ways: parts that it misses least, and parts whose scale matters most."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_cli.diagnosis.reading_results import ReadingResult
from dflash_cli.diagnosis.weight_rewrites import ENDS, HEAD_NORMS, MATRICES, NORMS, PARTS, QKV, Spot, part_of
from dflash_runtime.config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor


FEATURES: frozenset[Spot] = frozenset({("fc", None)})


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


def working_spots(left_out: Sequence[ReadingResult], own_loss: float) -> frozenset[Spot]:
    """The parts without which a draft is worse. The smallest group of parts that is left out decides about a part."""
    found: dict[Spot, bool] = {}
    for item in sorted(left_out, key=lambda item: -len(item.alternative.touches)):
        found |= dict.fromkeys(item.alternative.touches - FEATURES, item.score.loss > own_loss)
    return frozenset(spot for spot, is_working in found.items() if is_working)


def most_pulled(pulls: "Mapping[str, Tensor]", config: DraftConfig, count: int) -> frozenset[Spot]:
    """The parts of all layers, and of single layers, whose scale changes the loss most. `pulls` sum to that change."""
    single: dict[Spot, float] = {}
    whole: dict[Spot, float] = {}
    for part in PARTS:
        found = [float(item.float().sum()) for item in _values(pulls, config, part)]
        whole[part, None] = sum(map(abs, found))
        single |= {} if part in ENDS else {(part, layer): abs(value) for layer, value in enumerate(found)}
    return frozenset(spot for spots in (whole, single) for spot in sorted(spots, key=lambda at: -spots[at])[:count])


def most_strained(pulls: "Mapping[str, Tensor]", config: DraftConfig, count: int) -> frozenset[Spot]:
    """The matrices of single layers whose values change the loss most, whatever their signs."""
    found: dict[Spot, float] = {}
    for part in MATRICES:
        if part not in ENDS:
            sizes = [float(item.float().abs().sum()) for item in _values(pulls, config, part)]
            found |= {(part, layer): size for layer, size in enumerate(sizes)}
    return frozenset(sorted(found, key=lambda at: -found[at])[:count])


def _values(pulls: "Mapping[str, Tensor]", config: DraftConfig, part: str) -> "list[Tensor]":
    layers = [None] if part in ENDS else range(config.num_layers)
    return [part_of(pulls, config, part, layer) for layer in layers]
