"""Scales of parts that no run can tell apart, by the algebra of the network.

A draft depends on the scales of its parts only through a few products. `EFFECTS` and `SIGNS` list, for each part, the
products that it is a factor of. Two sets of parts are equal if they scale the same products: a post_attention_layernorm
times 4 equals a gate_proj and an up_proj times 4, and also a gate_proj and a down_proj times 4.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations

from dflash_cli.diagnosis.weight_orders import DOWN, GATE, KEY, OUT, QUERY, UP, VALUE
from dflash_cli.diagnosis.weight_rewrites import ENDS, HEAD_NORMS, LAYER_NORMS
from dflash_cli.diagnosis.weight_space import Where, short
from dflash_runtime.draft_config import DraftConfig

EMBEDDING, LOGITS = "embeddings", "logits"
"""Settings of the config that scale like parts: the embeddings, and output_multiplier."""

BEFORE_ATTENTION, BEFORE_MLP = LAYER_NORMS
ADDED = ("own values", "context values", "MLP output")
"""The outputs of layers. All outputs times a factor equal the embeddings divided by the factor."""

EFFECTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((QUERY, KEY, "fc"), ()),
    **dict.fromkeys(HEAD_NORMS, ("scores",)),
    BEFORE_ATTENTION: ("own values",),
    "hidden_norm": ("context values",),
    **dict.fromkeys((VALUE, OUT), ("own values", "context values")),
    BEFORE_MLP: ("gate", "MLP output"),
    GATE: ("gate",),
    **dict.fromkeys((UP, DOWN), ("MLP output",)),
    "norm": ("logits",),
    LOGITS: ("logits",),
    EMBEDDING: ADDED,
}
"""Part -> the products that a positive factor of the part multiplies. A norm follows q_proj, k_proj and fc, so
their scale has no effect. The embeddings count inversely. Context rows do not pass input_layernorm."""

SIGNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((QUERY, KEY, *HEAD_NORMS), ("own scores", "context scores")),
    BEFORE_ATTENTION: ("context scores", "own values"),
    **dict.fromkeys(("fc", "hidden_norm"), ("context scores", "context values")),
    **{part: EFFECTS[part] for part in (VALUE, OUT, BEFORE_MLP, GATE, UP, DOWN)},
}
"""The same for the factor -1, which norms pass on. Two of them cancel out."""

OUTSIDE = (*ENDS, EMBEDDING, LOGITS)
"""Parts outside layers. They equal only scales of all layers."""

MOST_PARTS = 2
"""Parts of an equal scale. More parts, with one factor, are one mistake less often."""

Product = frozenset[tuple[str, int]]
"""The scaled products of the network, each with the number of times that the factor multiplies it."""


def equal_scales(parts: Sequence[str], factor: float, where: Where, config: DraftConfig) -> list[tuple[str, ...]]:
    """Every set of parts that has the effect of `parts` if it is multiplied by the same factor, small sets first.

    The given set is among them, unless it is larger than MOST_PARTS and unlike every other.
    """
    effects = _effects(factor, config)
    wanted = _product(parts, effects, factor > 0)
    if not wanted or any(part not in effects for part in parts):
        return [tuple(parts)]
    found = _sets_by_product(tuple(effects.items()), factor > 0, _is_everywhere(where, config)).get(wanted, [])
    return found[:] if any(set(chosen) == set(parts) for chosen in found) else [*found, tuple(parts)]


def scaled_values(parts: Sequence[str], factor: float, where: Where, config: DraftConfig) -> str:
    """The cause of a scale: its parts, and all sets of parts that no run can tell from them."""
    sets = [" and ".join(map(short, chosen)) for chosen in equal_scales(parts, factor, where, config)]
    names = sets[0] if len(sets) == 1 else " or ".join(sets) if _are_single(sets) else ", or of ".join(sets) + ","
    return f"the values of {names} are {'negated' if factor < 0 else 'scaled'}"


def equal_names(parts: Sequence[str], factor: float, where: Where, config: DraftConfig) -> tuple[str, ...]:
    """The names of the readings that equal a scale."""
    others = [chosen for chosen in equal_scales(parts, factor, where, config) if set(chosen) != set(parts)]
    return tuple(scale_name(chosen, factor, where) for chosen in others)


def scale_name(parts: Sequence[str], factor: float, where: Where) -> str:
    """`o_proj and down_proj times 2 in layer 1`. The embeddings are divided by the factor."""
    if tuple(parts) == (EMBEDDING,):
        return f"{EMBEDDING} times {1 / factor:.4g}"
    name = f"{' and '.join(map(short, parts))} times {factor:.3g}"
    if where is None or all(part in OUTSIDE for part in parts):
        return name
    return f"{name} in layer {where}" if isinstance(where, int) else f"{name} in layers {', '.join(map(str, where))}"


def parts_alone(parts: Sequence[str], factor: float, where: Where, config: DraftConfig) -> tuple[str, ...]:
    """The parts of a scale, and every single part with an equal scale."""
    single = (chosen[0] for chosen in equal_scales(parts, factor, where, config) if len(chosen) == 1)
    return tuple(dict.fromkeys((*parts, *(part for part in single if part not in {EMBEDDING, LOGITS}))))


def _effects(factor: float, config: DraftConfig) -> dict[str, tuple[str, ...]]:
    """The table, as far as the draft's family has other readers of the same values."""
    found = dict(SIGNS if factor < 0 else EFFECTS)
    if config.convolution is not None:  # kernels depend on the rows behind the norm
        found |= {part: (*found[part], f"kernels behind {part}") for part in LAYER_NORMS}
    if config.attention_bias:  # o_proj is scaled with its bias, and a norm scales no bias
        found[OUT] = (*found[OUT], "bias of o_proj")
        found |= {part: (*found[part], "no bias") for part in (BEFORE_ATTENTION, "hidden_norm")}
        found |= {EMBEDDING: (*ADDED, "bias of o_proj")} if factor > 0 else {}
    if config.selector is not None or (config.markov is not None and config.markov.head_type != "vanilla"):
        found["norm"] = ("logits", "inputs of pairs")
    if config.has_own_width:
        found.pop(EMBEDDING, None)
    return found


@cache
def _sets_by_product(
    effects: tuple[tuple[str, tuple[str, ...]], ...], is_positive: bool, is_everywhere: bool
) -> Mapping[Product, list[tuple[str, ...]]]:
    """Product -> the sets of up to MOST_PARTS parts that have it, small sets first."""
    able = [part for part, of in effects if of and (is_everywhere or part not in OUTSIDE)]
    found: dict[Product, list[tuple[str, ...]]] = {}
    for count in range(1, MOST_PARTS + 1):
        for chosen in combinations(able, count):
            found.setdefault(_product(chosen, dict(effects), is_positive), []).append(chosen)
    return found


def _product(parts: Sequence[str], effects: Mapping[str, tuple[str, ...]], is_positive: bool) -> Product:
    counts = Counter(effect for part in parts for effect in effects.get(part, ()))
    return frozenset(counts.items() if is_positive else ((effect, 1) for effect in counts if counts[effect] % 2))


def _is_everywhere(where: Where, config: DraftConfig) -> bool:
    layers = {where} if isinstance(where, int) else set(range(config.num_layers) if where is None else where)
    return layers >= set(range(config.num_layers))


def _are_single(sets: Sequence[str]) -> bool:
    return not any(" and " in name for name in sets)
