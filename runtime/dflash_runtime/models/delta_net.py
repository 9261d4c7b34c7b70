"""A recurrent layer by the gated delta rule: projections, a short convolution, the rule, and a gated norm.

Axis letters: T flat rows, C channels, H value heads, V size of a value.
Source: huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rows
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_kernels.suite import Kernels
from dflash_runtime.models.delta_shapes import INPUTS
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.weights import Matrix, Weights, find_matrix, join_matrices
from dflash_runtime.target_config import RecurrenceConfig


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A recurrent `Mixer`.

    One product makes its channels, the gate of its norm, and the inputs of beta and decay. Projections in FP8 have a
    product of their own, beside the projections in the dtype of the run.
    """

    inputs: tuple["JoinedInputs", ...]
    taps: Tensor  # [S, C]
    log_rate: Tensor  # [H] float32
    bias: Tensor  # [H] float32
    norm: Tensor  # [V]
    output: Linear
    eps: float
    config: RecurrenceConfig
    kernels: Kernels

    @classmethod
    def read(cls, weights: Weights, name: str, config: RecurrenceConfig, eps: float, kernels: Kernels) -> "DeltaNet":
        """Read the layer's tensors, and join its projections."""
        inputs = JoinedInputs.read(weights, name, kernels)
        wide = torch.promote_types(weights[f"{name}.conv1d.weight"].dtype, torch.float32)
        taps = weights[f"{name}.conv1d.weight"][:, 0].T.contiguous()
        log_rate, bias = (weights[f"{name}.{part}"].to(wide) for part in ("A_log", "dt_bias"))
        output = Linear.read(weights, f"{name}.out_proj", kernels)
        return cls(inputs, taps, log_rate, bias, weights[f"{name}.norm.weight"], output, eps, config, kernels)

    @property
    def rounded_for(self) -> Fp8Weight | None:
        """See `Mixer`."""
        return next((found for joined in self.inputs if (found := joined.linear.rounded_for) is not None), None)

    def __call__(self, layer: int, hidden: Rows, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """See `Mixer`: rows [T, H * V]. The layer has no rope."""
        found: dict[str, Tensor] = {}
        for joined in self.inputs:
            found |= joined(hidden)
        gates = Gates(found["a"], found["b"], self.log_rate, self.bias)
        mixed = attend.recall(layer, found["qkv"], self.taps, gates)
        return self.kernels.gated_norm(mixed, found["z"], self.norm, self.eps)


@dataclass(frozen=True, slots=True)
class JoinedInputs:
    """Projections of a layer's input in one product, [sum of widths, hidden]."""

    linear: Linear
    names: tuple[str, ...]
    widths: tuple[int, ...]

    @classmethod
    def read(cls, weights: Weights, name: str, kernels: Kernels) -> tuple["JoinedInputs", ...]:
        """Read all projections of a layer: joined, or those in FP8 and the others apart."""
        parts = {part: find_matrix(weights, f"{name}.in_proj_{part}") for part in INPUTS}
        groups: dict[bool, dict[str, Matrix]] = {}
        for part, matrix in parts.items():
            groups.setdefault(isinstance(matrix, Fp8Weight), {})[part] = matrix
        return tuple(
            cls(
                Linear(join_matrices([*group.values()]), kernels=kernels), tuple(group), tuple(map(len, group.values()))
            )
            for group in groups.values()
        )

    def __call__(self, hidden: Rows) -> dict[str, Tensor]:
        """Normalised rows [T, hidden] -> name of each projection -> rows [T, width]."""
        return dict(zip(self.names, self.linear(hidden).split(self.widths, dim=-1), strict=True))
