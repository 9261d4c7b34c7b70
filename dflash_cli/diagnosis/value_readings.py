"""Readings that change the values of tensors: other scales, signs, bits and zero points, and norms that count twice."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.equal_scales import equal_names, parts_alone, scale_name, scaled_values
from dflash_cli.diagnosis.weight_looks import has_odd_bits, is_offset, scale_beside_siblings
from dflash_cli.diagnosis.weight_orders import DOWN, GATE, KEY, OUT, QUERY, UP, VALUE
from dflash_cli.diagnosis.weight_rewrites import ENDS, LAYER_NORMS, MATRICES, NORMS, Rewrite, part_of
from dflash_cli.diagnosis.weight_space import WeightReading, WeightSpace, Where, named, only, short, spots
from dflash_cli.rules.themes.unpacked import is_one_sided
from dflash_runtime.draft_config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor

FACTORS = (-1.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0)

FAR = (1 / 64, 1 / 16, 16.0, 64.0)

BESIDE = "attention and MLPs have the wrong scale beside each other (v_proj, o_proj, up_proj or down_proj)"
"""Attention of all layers times 2 is nearly the same as MLPs of all layers times a half: a norm follows their sum."""

BEFORE, BEHIND = (QUERY, KEY, VALUE, GATE, UP), (OUT, DOWN)
"""Matrices that read the residual stream, and matrices that add to it."""

GROUPS = {
    "o_proj and down_proj": BEHIND,
    "matrices of layers": (*BEFORE, *BEHIND),
}
"""Matrices that are scaled together. A scale of all matrices of attention is a scale of v_proj or o_proj."""

WRITTEN = {
    **GROUPS,
    "matrices of the MLP": (GATE, UP, DOWN),
    "matrices of attention": (QUERY, KEY, VALUE, OUT),
    "all matrices": MATRICES,
}
"""Matrices that are written in the same number format."""


def value_readings(space: WeightSpace) -> Iterator[WeightReading]:
    """Every reading of the values of tensors."""
    for family in (_scales, _scales_of_groups, _sizes_of_siblings, _folded_norms, _other_bits, _zero_points):
        yield from family(space)


def _scales(space: WeightSpace) -> Iterator[WeightReading]:
    """Tensors times a factor: usual factors for norms, and the factor that brings a tensor to its siblings' size."""
    for part in rewrites.PARTS:
        if part == "norm":
            continue
        for layer in space.layers if part not in ENDS else (None,):
            factors: set[float] = {*FACTORS, space.config.head_dim**-0.5, space.config.head_dim**0.5}
            factors = factors if part in NORMS else {-1.0}
            if space.weights and layer is not None:
                beside = scale_beside_siblings(space.weights, space.config, part, layer)
                factors |= set(beside)
                yield from (_scaled_elsewhere(space, part, layer, 1 / factor) for factor in beside)
            if part in MATRICES and (layer is None or part in {VALUE, OUT, DOWN, UP}):
                factors |= {0.125, 0.25, 0.5, 2.0, 4.0, 8.0} if part not in {QUERY, KEY, "fc"} else set()
            if part in BEHIND and layer is None:
                factors |= _residual_factors(space.config)
            for factor in sorted(factors):
                yield scaled_parts(space.config, (part,), factor, layer)


def scaled_parts(
    config: DraftConfig, parts: tuple[str, ...], factor: float, layer: Where, *, name: str = ""
) -> WeightReading:
    """Parts times the same factor. It also touches every single part with an equal scale."""
    is_beside = layer is None and factor > 0 and len(parts) == 1 and parts[0] in {VALUE, OUT, UP, DOWN}
    return WeightReading(
        named(f"{name} times {factor:.3g}", layer) if name else scale_name(parts, factor, layer),
        rewrites.change_parts(dict.fromkeys(parts, rewrites.scale(factor)), only(layer)),
        BESIDE if is_beside else scaled_values(parts, factor, layer, config),
        spots(parts_alone(parts, factor, layer, config), layer),
        is_guess=True,
        is_scale=True,
        equal=equal_names(parts, factor, layer, config),
    )


def _residual_factors(config: DraftConfig) -> set[float]:
    """Factors that some trainers apply to what each layer adds to the residual stream."""
    roots = [(2 * config.num_layers) ** 0.5, config.num_layers**0.5]
    return {factor for root in roots for factor in (root, 1 / root)} - {1.0}


def _scales_of_groups(space: WeightSpace) -> Iterator[WeightReading]:
    """Several matrices times the same factor."""
    for (name, parts), layer in product(GROUPS.items(), space.layers):
        if "fc" in parts:
            continue
        factors = {-1.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0} | (
            _residual_factors(space.config) if layer is None else set()
        )
        for factor in sorted(factors):
            yield scaled_parts(space.config, parts, factor, layer, name=name)


def _scaled_elsewhere(space: WeightSpace, part: str, layer: int, factor: float) -> WeightReading:
    """A part times a factor in every other layer. Few layers do not tell which of them were scaled."""
    others = tuple(at for at in range(space.config.num_layers) if at != layer)
    found = scaled_parts(space.config, (part,), factor, others)
    return replace(found, touches=spots((part,), others), is_guess=False)


def _sizes_of_siblings(space: WeightSpace) -> Iterator[WeightReading]:
    """Bring each matrix of a layer to the size of the same matrix in other layers, if both differ."""
    for layer in range(space.config.num_layers) if space.weights and len(space.layers) > 1 else ():
        found = {
            part: beside[0]
            for part in (*BEFORE, *BEHIND)
            if (beside := scale_beside_siblings(space.weights, space.config, part, layer))
        }
        if len(found) > 1:
            rewrite = rewrites.change_parts({part: rewrites.scale(factor) for part, factor in found.items()}, (layer,))
            names = ", ".join(map(short, found))
            title = f"{names} brought to the size of other layers in layer {layer}"
            cause = f"the values of {names} are scaled"
            yield WeightReading(title, rewrite, cause, spots(found, layer), True, is_scale=True)


def _folded_norms(space: WeightSpace) -> Iterator[WeightReading]:
    """The columns of matrices divided by the norm before them: the norm was folded into them, and counts twice.

    A norm around 0 with both signs holds offsets. Nobody folds these, and without them the norm is nearly even.
    """
    attention = (QUERY, KEY, VALUE)
    groups = {
        "gate_proj and up_proj": {GATE: LAYER_NORMS[1], UP: LAYER_NORMS[1]},
        "v_proj": {VALUE: LAYER_NORMS[0]},
        "q_proj, k_proj and v_proj": dict.fromkeys(attention, LAYER_NORMS[0]),
    }
    groups["v_proj, gate_proj and up_proj"] = groups["v_proj"] | groups["gate_proj and up_proj"]
    groups["all matrices behind layer norms"] = groups["q_proj, k_proj and v_proj"] | groups["gate_proj and up_proj"]
    for (name, parts), layer in product(groups.items(), space.layers):
        norms = set(parts.values())
        if space.weights and any(is_offset(space.weights, space.config, (norm,), layer) for norm in norms):
            continue
        title = named(f"{name} divided by the norm before", layer)
        cause = "layer norms are folded into the matrices behind them and kept, so they count twice"
        yield WeightReading(title, _divided(parts, layer), cause, spots(parts, layer), True, changes_values=True)


def _divided(norms: Mapping[str, str], layer: int | None) -> Rewrite:
    def rewrite(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
        for at in range(config.num_layers) if layer is None else (layer,):
            changes = {part: partial(_over, part_of(weights, config, norm, at)) for part, norm in norms.items()}
            weights = rewrites.change_parts(changes, (at,))(weights, config)
        return weights

    return rewrite


def _over(norm: "Tensor", values: "Tensor") -> "Tensor":
    """Return columns divided by a norm. A bias lacks columns: it has the norm's length by chance only."""
    import torch

    if values.dim() == 1 and len(values) != len(norm):
        return values
    return values / torch.where(norm.abs() < 1e-3, torch.ones_like(norm), norm)


def _other_bits(space: WeightSpace) -> Iterator[WeightReading]:
    """Read 16-bit values in the other 16-bit number format."""
    if not space.weights:
        return
    ways = {"float16": _as_float16, "bfloat16": _as_bfloat16}
    parts = {**WRITTEN, **{short(part): (part,) for part in MATRICES}}
    for (name, chosen), layer in product(parts.items(), space.layers):
        if layer is not None and "fc" in chosen:
            continue
        if not has_odd_bits(space.weights, space.config, chosen, layer):
            continue
        for form, change in ways.items():
            rewrite = rewrites.change_parts(dict.fromkeys(chosen, change), only(layer))
            title = named(f"{name} read as {form} bits", layer)
            cause, touches = f"the bits of {name} are {form}", spots(chosen, layer)
            yield WeightReading(title, rewrite, cause, touches, changes_values=True)


def _as_float16(tensor: "Tensor") -> "Tensor":
    return _viewed(tensor, "bfloat16", "float16")


def _as_bfloat16(tensor: "Tensor") -> "Tensor":
    return _viewed(tensor, "float16", "bfloat16")


def _viewed(tensor: "Tensor", stored: str, meant: str) -> "Tensor":
    import torch

    values = tensor.to(getattr(torch, stored)).contiguous().view(getattr(torch, meant))
    return values.to(tensor.dtype).nan_to_num(0.0, 0.0, 0.0)


def _zero_points(space: WeightSpace) -> Iterator[WeightReading]:
    """Subtract the mean of each row from matrices with rows of one sign."""
    found: dict[int | None, list[str]] = {}
    for part in MATRICES if space.weights else ():
        for layer in range(space.config.num_layers) if part not in ENDS else (None,):
            if is_one_sided(part_of(space.weights, space.config, part, layer)):
                found.setdefault(layer, []).append(part)
    if found:
        changes: list[Rewrite] = []
        for layer, parts in found.items():
            changes.append(rewrites.change_parts(dict.fromkeys(parts, _centred), only(layer)))
        touches = frozenset(spot for layer, parts in found.items() for spot in spots(parts, layer))
        names = ", ".join(sorted({short(part) for parts in found.values() for part in parts}))
        title = f"rows of {names} less their mean"
        cause = f"the zero points of {names} were not subtracted"
        yield WeightReading(title, rewrites.together(*changes), cause, touches, changes_values=True)


def _centred(tensor: "Tensor") -> "Tensor":
    return tensor - tensor.float().mean(dim=-1, keepdim=True).to(tensor.dtype) if tensor.dim() > 1 else tensor
