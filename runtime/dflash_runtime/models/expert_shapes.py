"""The tensors of layers with experts, by name and shape. Needs no torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dflash_runtime.checkpoint.layout import Shape, Shapes
from dflash_runtime.target_config import ExpertsConfig

EXPERT_TENSOR = re.compile(
    r"(.*)\.(?:experts\.(?:(\d{1,9})\.)?|(shared_expert)\.)(gate_up|gate|up|down)_proj(?:\.weight)?"
)
"""Owner, number of a single expert, whether the expert is shared, part."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a layer's experts."""

    num_experts: int
    inner: int
    hidden: int
    num_shared: int = 0

    def stack_shape(self, part: str) -> Shape:
        """Return the shape of the stack of all experts, of `gate_up` or `down`."""
        count = self.num_experts + self.num_shared
        return (count, self.hidden, self.inner) if part == "down" else (count, 2 * self.inner, self.hidden)


def experts_shapes(experts: ExpertsConfig, hidden: int) -> dict[str, Shape]:
    """Return the tensors of a layer with experts, by their names in the layer."""
    shapes: dict[str, Shape] = {"mlp.gate.weight": (experts.num_experts, hidden)}
    for expert in range(experts.num_experts):
        shapes |= _shapes_of_one(f"mlp.experts.{expert}", experts.intermediate_size, hidden)
    if experts.shared_size is not None:
        shapes |= _shapes_of_one("mlp.shared_expert", experts.shared_size, hidden)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _shapes_of_one(name: str, inner: int, hidden: int) -> dict[str, Shape]:
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in shapes.items()}


def with_fused_experts(expected: Shapes, stored: Iterable[str]) -> dict[str, Shape]:
    """Return the expected tensors, with fused experts instead of single ones in the layers that are stored so."""
    fused = {
        name for name in stored if (match := EXPERT_TENSOR.fullmatch(name)) and match[2] is None and match[3] is None
    }
    layers = {
        owner: layer for owner, layer in expert_sizes(expected).items() if f"{owner}.experts.gate_up_proj" in fused
    }
    found: dict[str, Shape] = {}
    for name, shape in expected.items():
        match = EXPERT_TENSOR.fullmatch(name)
        if match is None or match[2] is None or match[1] not in layers:
            found[name] = shape
            continue
        layer = replace(layers[match[1]], num_shared=0)
        for part in ("gate_up", "down"):
            found[f"{match[1]}.experts.{part}_proj"] = layer.stack_shape(part)
    return found


def expert_sizes(shapes: Shapes) -> dict[str, ExpertSizes]:
    """Return the sizes of every layer with experts, by the owner of its tensors. The `down` tensors have all sizes."""
    layers: dict[str, ExpertSizes] = {}
    shared: dict[str, int] = {}
    for name, shape in shapes.items():
        match = EXPERT_TENSOR.fullmatch(name)
        if match is None or match[4] != "down":
            continue
        owner, expert, is_shared, _ = match.groups()
        if is_shared:
            shared[owner] = shape[1]
        elif expert is None:
            layers[owner] = ExpertSizes(shape[0], inner=shape[2], hidden=shape[1])
        else:
            count = max(int(expert) + 1, layers[owner].num_experts if owner in layers else 0)
            layers[owner] = ExpertSizes(count, inner=shape[1], hidden=shape[0])
    return {
        owner: replace(layer, num_shared=-(-shared.get(owner, 0) // layer.inner)) for owner, layer in layers.items()
    }
