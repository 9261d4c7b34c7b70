"""What a target is made of, in words: its layers, rope and experts."""

from collections import Counter
from collections.abc import Iterator, Sequence

from dflash_runtime.checkpoint.layer_kinds import CHUNKED, FEED_FORWARD, STATE_KINDS
from dflash_runtime.config import RopeConfig, TargetFacts

MOST_LISTED = 8
"""Layers of one kind that are named one by one where they follow no rule."""


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
    """The rope, or that of each kind of layer that has one, and the kinds of attention that have none."""
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
    """`128, of which a token goes through 8`; empty where there are none."""
    if facts.num_experts is None:
        return ""
    chosen = facts.num_experts_per_token
    return f"{facts.num_experts}" + (f", of which a token goes through {chosen}" if chosen is not None else "")


def _kind(facts: TargetFacts, kind: str) -> str:
    """A kind of layer with how far it sees."""
    windows = {window for window, name in zip(facts.windows, facts.layer_kinds, strict=True) if name == kind} - {None}
    if windows:
        return f"{kind} (window {', '.join(str(window) for window in windows)})"
    return f"{kind} (chunks of {facts.chunk_size})" if kind == CHUNKED and facts.chunk_size else kind


def _where(layers: Sequence[int], depth: int) -> str:
    """Where the layers of the rarest kind are, if that is soon said."""
    period = layers[1] - layers[0] if len(layers) > 1 else 0
    if len(layers) > 2 and list(layers) == list(range(layers[0], depth, period)):
        start = "" if layers[0] == period - 1 else f" from layer {layers[0]} on"
        return f", every {_ordinal(period)}{start}"
    return f" (layers {', '.join(map(str, layers))})" if len(layers) <= MOST_LISTED else ""


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in (11, 12, 13) else 0, "th")
    return f"{number}{suffix}"
