"""Small targets in every form of FP8 that runs natively, and the same models with rounded activations in transformers.

The rounding here is written without the code under test.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dflash_testing.quantised_models import BLOCK, COMPRESSED, FP8, pack_blocks, pack_rows, quantise

FIXED = 0.02
"""The fixed scale of all activations, of which some are larger than 448 times this."""

PLAIN = r".*(mlp\.gate|shared_expert_gate|in_proj_b|in_proj_a|in_proj_ba)\.weight"
"""Matrices that published checkpoints in FP8 keep plain."""


def pack_matrix(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Pack with one scale per matrix, and a fixed scale of the activations."""
    scale = matrix.abs().amax() / 448
    packed = (matrix / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": packed, "weight_scale": scale, "input_scale": torch.tensor(FIXED)}
    return packed.float() * scale, tensors


def pack_matrix_alone(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    plain, tensors = pack_matrix(matrix)
    return plain, {"weight": tensors["weight"], "weight_scale_inv": tensors["weight_scale"].view(1)}


def pack_named_blocks(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Pack blocks under the names of compressed-tensors."""
    plain, tensors = pack_blocks(matrix)
    return plain, {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    """A config of compressed-tensors with one scheme."""
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {**eight, "dynamic": False, **weights}}
    group["input_activations"] = None if inputs is None else {**eight, **inputs}
    return {**COMPRESSED, "config_groups": {"group_0": group}}


@dataclass(frozen=True)
class Form:
    """A form of FP8: how a matrix is packed, the config, and how activations are rounded.

    length  numbers of a row with one scale; None for the whole row
    fixed   the fixed scale of activations
    """

    pack: Any
    config: dict[str, Any]
    length: int | None = None
    fixed: float | None = None
    rounds: bool = True


ROW, TENSOR = {"strategy": "channel"}, {"strategy": "tensor"}
BLOCKS = {"strategy": "block", "block_structure": [BLOCK, BLOCK]}
TOKEN = {"strategy": "token", "dynamic": True}
GROUP = {"strategy": "group", "group_size": BLOCK, "dynamic": True}

FORMS = {
    "blocks": Form(pack_blocks, FP8, BLOCK),
    "compressed rows": Form(pack_rows, compressed(ROW, TOKEN)),
    "compressed static": Form(pack_matrix, compressed(TENSOR, {**TENSOR, "dynamic": False}), fixed=FIXED),
    "compressed tensor": Form(pack_matrix_alone, compressed(TENSOR, TOKEN)),
    "compressed blocks": Form(pack_named_blocks, compressed(BLOCKS, GROUP), BLOCK),
    "compressed blocks, as text": Form(
        pack_named_blocks, compressed({**BLOCKS, "block_structure": f"{BLOCK}x{BLOCK}"}, GROUP), BLOCK
    ),
    "compressed weights": Form(pack_rows, compressed(ROW, None), rounds=False),
    "matrices": Form(pack_matrix_alone, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "static": Form(pack_matrix, {"quant_method": "fp8", "activation_scheme": "static"}, fixed=FIXED),
    "modelopt": Form(pack_matrix, {"quant_method": "modelopt", "quant_algo": "FP8"}, fixed=FIXED),
}
"""Name -> a form of FP8."""


class RoundedModel:
    """A model of transformers in float64 whose packed matrices multiply rounded activations."""

    def __init__(self, path: Path, kind: str, form: Form, **changes: Any) -> None:
        self.form = form
        self.model = quantise(path, kind, form.pack, form.config, PLAIN, **changes).double()
        if hasattr(self.model, "set_experts_implementation"):
            self.model.set_experts_implementation("eager")
        self._packed = [
            parameter for name, parameter in self.model.named_parameters()
            if ".layers." in name and parameter.dim() > 1 and not name.endswith(("conv1d.weight", "norm.weight"))
            and not any(part in name for part in ("mlp.gate.", "shared_expert_gate", "in_proj_b", "in_proj_a"))
        ]  # fmt: skip

    def __call__(self, token_ids: list[int], *, rounds: bool = True) -> Tensor:
        """Return the outputs of all layers [L, T, hidden], with or without rounded activations."""
        with torch.inference_mode(), self.rounding() if rounds else nullcontext():
            found = self.model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False)
        return torch.cat(found.hidden_states[1:])

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """Round the activations of packed matrices in the block."""
        linear = functional.linear

        def rounded_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return linear(self._round(hidden) if self._is_packed(weight) else hidden, weight, bias)

        functional.linear = rounded_linear  # type: ignore[assignment]
        try:
            yield
        finally:
            functional.linear = linear

    def _is_packed(self, weight: Tensor) -> bool:
        begin = weight.data_ptr()
        return any(
            item.data_ptr() <= begin < item.data_ptr() + item.numel() * item.element_size() for item in self._packed
        )

    def _round(self, hidden: Tensor) -> Tensor:
        form = self.form
        if not form.rounds:
            return hidden
        rounded = []
        for group in hidden.split(form.length or hidden.shape[-1], dim=-1):
            peak = group.abs().amax(-1, keepdim=True).clamp(min=1e-10)
            scale = torch.full_like(peak, torch.tensor(form.fixed).item()) if form.fixed is not None else peak / 448
            limited = (group / scale).clamp(-448, 448)
            rounded.append(limited.to(torch.float8_e4m3fn).double() * scale)
        return torch.cat(rounded, dim=-1)
