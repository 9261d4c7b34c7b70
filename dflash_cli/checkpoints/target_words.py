"""Describe a target's layers, rope and experts in words."""

from collections import Counter
from collections.abc import Iterator, Sequence

from dflash_runtime.checkpoint.targets.layer_kinds import CHUNKED, FEED_FORWARD, STATE_KINDS
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.target_config import TargetFacts

MOST_LISTED = 8
"""The most layers of one kind whose numbers are listed, if they do not follow a rule."""


def layers_in_words(facts: TargetFacts) -> str:
    """`32 layers: 24 linear, 8 full, every 4th`."""
    if not facts.layer_kinds:
        return f"{facts.num_layers} layers, of kinds that the config does not state"
    counts = Counter(facts.layer_kinds)
    if len(counts) == 1:
        return f"{facts.num_layers} layers, all {_kind(facts, facts.layer_kinds[0])}"
    by_frequency = sorted(counts, key=lambda kind: -counts[kind])
    parts = [f"{counts[kind]} {_kind(facts, kind)}" for kind in by_frequency]
    rarest = by_frequency[-1]
    where = _where([index for index, kind in enumerate(facts.layer_kinds) if kind == rarest], facts.num_layers)
    return f"{facts.num_layers} layers: {', '.join(parts)}{where}"


def ropes_in_words(facts: TargetFacts) -> Iterator[str]:
    """The rope of all layers, or the rope of each kind of layer and the kinds of layers without rope."""
    if not facts.ropes:
        if facts.rope is not None:
            yield rope_in_words(facts.rope)
        return
    for kind, rope in facts.ropes.items():
        yield f"{kind}: {rope_in_words(rope)}"
    without = set(facts.layer_kinds) - set(facts.ropes) - {*STATE_KINDS, FEED_FORWARD}
    if without and not set(facts.ropes) - set(facts.layer_kinds):
        yield f"none in {', '.join(sorted(without))} layers"


def rope_in_words(rope: RopeConfig) -> str:
    """`yarn, theta 150000, factor 32`."""
    theta = int(rope.theta) if float(rope.theta).is_integer() else rope.theta
    return f"{rope.kind}, theta {theta}" + "".join(f", {key} {value}" for key, value in rope.params.items())


def experts_in_words(facts: TargetFacts) -> str:
    """`128, 8 per token`; empty without experts."""
    if facts.num_experts is None:
        return ""
    chosen = facts.num_experts_per_token
    return str(facts.num_experts) if chosen is None else f"{facts.num_experts}, {chosen} per token"


def _kind(facts: TargetFacts, kind: str) -> str:
    """A kind of layer with its window or chunk size."""
    windows = {window for window, name in zip(facts.windows, facts.layer_kinds, strict=True) if name == kind} - {None}
    if windows:
        return f"{kind} (window {', '.join(str(window) for window in windows)})"
    return f"{kind} (chunks of {facts.chunk_size})" if kind == CHUNKED and facts.chunk_size else kind


def _where(layers: Sequence[int], depth: int) -> str:
    """The positions of some layers: a rule such as `, every 4th`, a short list, or nothing."""
    period = layers[1] - layers[0] if len(layers) > 1 else 0
    if len(layers) > 2 and list(layers) == list(range(layers[0], depth, period)):
        start = "" if layers[0] == period - 1 else f" from layer {layers[0]} on"
        return f", every {_ordinal(period)}{start}"
    return f" (layers {', '.join(map(str, layers))})" if len(layers) <= MOST_LISTED else ""


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"
