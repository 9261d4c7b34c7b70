"""The alternative readings of a draft. Each changes one setting of the config, or the meaning of some tensors.

To add a reading, yield it from a function below, and list the function in `FAMILIES`. Readings that
only one family of drafts has are in a file of `family_readings/`, with the rules that report them. The `factor` of a
reading selects its rule, and its `cause` names the fault if the reading explains the draft.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from typing import TYPE_CHECKING, Any

from dflash_cli.diagnosis.equal_scales import EMBEDDING, equal_names
from dflash_cli.diagnosis.weight_readings import probes, weight_readings
from dflash_cli.diagnosis.weight_rewrites import Rewrite, Spot
from dflash_cli.diagnosis.weight_space import MOST_LAYERS_ALONE, WeightReading, WeightSpace
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.registry import Registry
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from torch import Tensor

THETAS = (10_000.0, 100_000.0, 150_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 10_000_000.0)
"""Rope bases that published targets use."""

WINDOWS = (8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)
BLOCKS = (4, 7, 8, 10, 12, 16)
"""Block sizes of published drafts."""

EPSILONS = (1e-6, 1e-5)

FARTHEST_TAP = 5
"""The most layers between a tap and the layer that may have been tapped instead."""

LARGEST_BLOCK = 4
"""The longest block that is tried, in blocks of the config."""

DFLASH = "dflash"

MIN_LEN = 1.5
ANCHOR_MIN_LEN = 2.0
"""Higher than MIN_LEN: on repetitive text, an untrained draft that predicts at the anchor reaches 1.5 by echoing it."""

ORDERED_TAPS = "the columns of fc.weight belong to the tapped layers in another order"

MAX_PERMUTED = 4
"""Up to this number of tapped layers, every order is tried; else rotations, the reverse, and exchanges of two."""


@dataclass(frozen=True, slots=True)
class AlternativeReading:
    """Another way to read a draft.

    factor      the changed setting
    name        the change, in words
    cause       the fault of the draft if this reading is right
    rewrite     changes the tensors; None if only the config changes
    is_guess    it is one of very many readings, and the screen keeps only the best
    is_free     training does not choose its value, so its loss says nothing about the causes of other readings
    is_neutral  it leaves out a part of the draft; it restores nothing, and tells that the part harms
    is_scale    it multiplies a part of the draft by a factor
    changes_values  it changes values in another way than by a factor: offsets, bits, zero points
    shift       the amount that it adds to norms
    equal       names of readings that equal it by the algebra of the network
    touches     the parts of the draft that it changes, with their layers
    halves      the halves of an exchange, as rewrites
    min_len     below this acceptance length, in tokens per step, the reading explains nothing
    """

    factor: str
    name: str
    config: DraftConfig
    cause: str = ""
    rewrite: Rewrite | None = None
    is_guess: bool = False
    is_free: bool = False
    is_neutral: bool = False
    is_scale: bool = False
    changes_values: bool = False
    shift: float = 0.0
    equal: tuple[str, ...] = ()
    touches: frozenset[Spot] = frozenset()
    halves: tuple[Rewrite, ...] = ()
    min_len: float = MIN_LEN

    @property
    def only_moves(self) -> bool:
        """Whether it uses every value of the draft as it is: orders, exchanges, layouts, and settings."""
        return not (self.is_scale or self.is_neutral or self.changes_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingSpace:
    """The input of `alternative_readings`.

    masks       ids that may be the mask -> their names
    rare_ids    ids that texts rarely contain, so that each may have been the mask
    text_len    tokens of the longest text of the run; a wider window changes nothing
    weights     the draft's tensors as the runtime holds them
    """

    config: DraftConfig
    target: TargetConfig
    masks: Mapping[int, str] = field(default_factory=dict)
    rare_ids: Sequence[int] = ()
    text_len: int = 1 << 20
    weights: "Mapping[str, Tensor]" = field(default_factory=dict)


Family = Callable[[ReadingSpace], Iterator[AlternativeReading]]

FAMILY_READINGS: Registry[Family] = Registry("readings of a draft family")
"""Draft family -> the readings that only its drafts have."""


def alternative_readings(space: ReadingSpace) -> tuple[AlternativeReading, ...]:
    """Every reading to try, without repeats and without the config's own reading."""
    found = {(repr(space.config), ""): AlternativeReading("", "as configured", space.config)}
    for family in (*FAMILIES, *_of_family(space.config)):
        for reading in family(space):
            found.setdefault((repr(reading.config), "" if reading.rewrite is None else reading.name), reading)
    return tuple(found.values())[1:]


def _of_family(config: DraftConfig) -> "list[Family]":
    if not len(FAMILY_READINGS):
        FAMILY_READINGS.discover("dflash_cli.diagnosis.family_readings")
    return [FAMILY_READINGS[config.family]] if config.family in FAMILY_READINGS else []


def _taps(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """Taps one and two layers earlier and later. A tap at an end stays, unless two taps would become the same layer."""
    taps, depth = space.config.target_layer_ids, space.target.num_layers
    for offset, count in ((-1, "one"), (1, "one"), (-2, "two"), (2, "two")):
        moved = tuple(min(max(tap + offset, 0), depth - 1) for tap in taps)
        if len(set(moved)) == len(set(taps)):
            name, late = ("earlier", "late") if offset < 0 else ("later", "early")
            yield _with_taps(space, moved, f"tapped layers {count} {name}", f"the tapped layers are {count} too {late}")
    spaced = tuple(round(1 + index * (depth - 4) / max(1, len(taps) - 1)) for index in range(len(taps)))
    if len(set(spaced)) == len(taps) and spaced[0] >= 0 and spaced[-1] < depth:
        yield _with_taps(space, spaced, "tapped layers spread evenly", "the tapped layers differ from training")
    yield from moved_taps(space)


def moved_taps(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """Another layer for one tap. The target's outputs of every such layer are kept, so layers far away are left out."""
    taps = space.config.target_layer_ids
    for index, tap in enumerate(taps):
        for other in range(space.target.num_layers):
            if other not in taps and abs(other - tap) <= FARTHEST_TAP:
                moved = (*taps[:index], other, *taps[index + 1 :])
                reading = _with_taps(space, moved, f"layer {other} tapped for {tap}", "one tapped layer is wrong")
                yield replace(reading, is_guess=abs(other - tap) > 1)


def _tap_orders(space: ReadingSpace) -> Iterator[AlternativeReading]:
    taps = space.config.target_layer_ids
    count = len(taps)
    orders: set[tuple[int, ...]] = {taps[shift:] + taps[:shift] for shift in range(count)} | {taps[::-1]}
    if count <= MAX_PERMUTED:
        orders |= set(permutations(taps))
    for first, second in combinations(range(count), 2):
        swapped = list(taps)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        orders.add(tuple(swapped))
    for order in sorted(orders):
        yield _with_taps(space, order, "tapped layers in the order", ORDERED_TAPS)


def _with_taps(space: ReadingSpace, taps: tuple[int, ...], name: str, cause: str) -> AlternativeReading:
    return changed(space, "taps", f"{name} {list(taps)}", cause, target_layer_ids=taps)


def _causality(space: ReadingSpace) -> Iterator[AlternativeReading]:
    config = space.config
    readings = {
        "all layers causal": (True,) * config.num_layers,
        "no layer causal": (False,) * config.num_layers,
        "sliding layers causal, full layers not": tuple(window is not None for window in config.windows),
    }
    for name, causal in readings.items():
        yield changed(space, "causality", name, "the causality within a block differs from training", causal=causal)


def _anchor(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """Predictions from the anchor on: a DSpark draft without a Markov head, published as a DFlash draft."""
    if space.config.family == DFLASH:
        yield AlternativeReading(
            "anchor",
            "predictions from the anchor on",
            replace(space.config, family="dspark", sample_from_anchor=True),
            "the draft predicts from the anchor on, one position earlier than DFlash drafts do",
            min_len=ANCHOR_MIN_LEN,
        )


def _rope(space: ReadingSpace) -> Iterator[AlternativeReading]:
    own, target = space.config.rope, space.target.rope
    if (target.kind, target.params) != (own.kind, own.params):
        name = f"the target's rope ({target.kind}, base {target.theta:.12g})"
        yield changed(space, "rope", name, "the draft was trained with the target's rope", rope=target)
    if own.kind != "default":
        name, plain = f"no rope scaling, base {own.theta:.12g}", RopeConfig(theta=own.theta)
        cause = "the draft was trained without the rope scaling that the config states"
        yield changed(space, "rope", name, cause, rope=plain)
    for theta in dict.fromkeys((target.theta, *THETAS)):
        rope = replace(own, theta=theta)
        yield changed(space, "rope", f"rope base {theta:.12g}", "the rope base differs from training", rope=rope)


def _masks(space: ReadingSpace) -> Iterator[AlternativeReading]:
    own = space.config.mask_token_id
    named = {token: f"mask {name} ({token})" for token, name in space.masks.items()}
    named |= {own + step: f"mask {own + step}, next to {own}" for step in (-1, 1) if own + step not in named}
    rare = {token: f"mask {token}, a rarely used id" for token in space.rare_ids if token not in named}
    for token, name in (named | rare).items():
        if 0 <= token < space.config.vocab_size:
            reading = changed(space, "mask", name, "the mask token differs from training", mask_token_id=token)
            yield replace(reading, is_guess=token in rare)


def _windows(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """No window, a window on every layer, and windows of other widths."""
    own, num_layers = space.config.windows, space.config.num_layers
    stated = {window for window in own if window is not None}
    cause = "the draft was trained with another attention window"
    if stated:
        without = (None,) * num_layers
        yield changed(space, "window", "no attention window", "the draft was trained without a window", windows=without)
    for windows in sorted(set(permutations(own)) - {own}, key=str) if stated and len(own) <= MAX_PERMUTED else ():
        moved = "the attention windows belong to other layers"
        yield changed(space, "window", f"windows {list(windows)}", moved, windows=windows)
    for layer in range(num_layers) if stated and 1 < num_layers <= MOST_LAYERS_ALONE else ():
        changed_at = None if own[layer] is not None else min(stated)
        windows = (*own[:layer], changed_at, *own[layer + 1 :])
        name = f"{'no window' if changed_at is None else f'a window of {changed_at}'} in layer {layer}"
        yield changed(space, "window", name, "a layer was trained with another attention window", windows=windows)
    for width in sorted({*WINDOWS, *stated, *(window for window in space.target.windows if window is not None)}):
        if width >= space.text_len:
            continue
        yield changed(space, "window", f"a window of {width} on every layer", cause, windows=(width,) * num_layers)
        if stated and None in own:
            there = tuple(None if window is None else width for window in own)
            yield changed(space, "window", f"a window of {width}", cause, windows=there)


def _blocks(space: ReadingSpace) -> Iterator[AlternativeReading]:
    own, cause = space.config.block_size, "the draft was trained with another block size"
    for block in sorted({*BLOCKS, own - 1, own + 1, own // 2, own * 2}):
        if 2 <= block <= LARGEST_BLOCK * own:
            yield changed(space, "block", f"blocks of {block}", cause, block_size=block)


def _embedding_scales(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """The target's embedding with and without the factor that the target multiplies it by."""
    factor, config = space.target.embedding_scale, space.config
    if config.has_own_width:
        return
    raw = {"has_target_scale": False, "input_embedding_scale": 1.0}
    own = (factor if config.has_target_scale else 1.0) * config.input_embedding_scale
    if own != 1.0:
        reading = changed(space, "embedding", "raw embeddings", "the draft was trained on raw embeddings", **raw)
        yield with_equal_scales(reading, EMBEDDING, own)
    if not config.has_target_scale and factor != 1.0:
        cause = "the draft was trained on embeddings scaled as the target's"
        scaled = raw | {"has_target_scale": True}
        reading = changed(space, "embedding", f"embeddings times {factor:.4g}", cause, **scaled)
        yield with_equal_scales(reading, EMBEDDING, own / factor)


def _eps(space: ReadingSpace) -> Iterator[AlternativeReading]:
    for eps in EPSILONS:
        yield changed(space, "eps", f"rms_norm_eps {eps:g}", "rms_norm_eps differs from training", rms_norm_eps=eps)


def _weights(space: ReadingSpace) -> Iterator[AlternativeReading]:
    weights = WeightSpace(space.config, space.weights)
    return (of_weights(space.config, item) for item in (weight_readings(weights) if weights.is_known else ()))


def neutral_readings(space: ReadingSpace) -> tuple[AlternativeReading, ...]:
    """Every part of the draft left out."""
    weights = WeightSpace(space.config, space.weights)
    return tuple(of_weights(space.config, item) for item in (probes(weights) if weights.is_known else ()))


def of_weights(config: DraftConfig, item: WeightReading) -> AlternativeReading:
    """The reading of the draft with the tensors of a rewrite."""
    shared = {
        name: getattr(item, name)
        for name in (
            "name",
            "cause",
            "rewrite",
            "is_guess",
            "is_neutral",
            "is_scale",
            "changes_values",
            "shift",
            "equal",
            "touches",
            "halves",
        )
    }
    return AlternativeReading(factor="weights", config=config, **shared)


def with_equal_scales(reading: AlternativeReading, part: str, factor: float) -> AlternativeReading:
    """A reading of a setting with the scales of parts that equal the setting times a factor."""
    return replace(reading, equal=equal_names((part,), factor, None, reading.config))


def changed(space: ReadingSpace, factor: str, name: str, cause: str, **fields: Any) -> AlternativeReading:
    """A reading with other values of some fields of the config."""
    return AlternativeReading(factor, name, replace(space.config, **fields), cause)


FAMILIES = (
    _taps,
    _tap_orders,
    _causality,
    _anchor,
    _rope,
    _masks,
    _windows,
    _blocks,
    _embedding_scales,
    _eps,
    _weights,
)
