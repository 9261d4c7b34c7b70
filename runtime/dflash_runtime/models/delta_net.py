"""A recurrent layer by the gated delta rule: projections, a short convolution, the rule, and a gated norm.

Axis letters: T flat rows, C channels, H value heads, V size of a value.
Source: huggingface/transformers models/qwen3_5/modeling_qwen3_5.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.delta_rule import Gates
from dflash_kernels.suite import Kernels
from dflash_runtime.config import RecurrenceConfig
from dflash_runtime.models.layers import Attend, Linear
from dflash_runtime.models.weights import Weights

INPUTS = ("qkv", "b", "a", "z")
"""The projections of a layer's input: channels, beta, decay, gate of the norm."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A recurrent `Mixer`. One product makes its channels, the gate of its norm, and the inputs of beta and decay."""

    inputs: Linear  # [C + 2 * H + H * V, hidden]
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
        parts = [weights[f"{name}.in_proj_{part}.weight"] for part in INPUTS]
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        taps = weights[f"{name}.conv1d.weight"][:, 0].T.contiguous()
        log_rate, bias = (weights[f"{name}.{part}"].to(wide) for part in ("A_log", "dt_bias"))
        inputs, output = Linear(torch.cat(parts), kernels=kernels), Linear.read(weights, f"{name}.out_proj", kernels)
        return cls(inputs, taps, log_rate, bias, weights[f"{name}.norm.weight"], output, eps, config, kernels)

    def __call__(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """See `Mixer`: rows [T, H * V]. The layer has no rope."""
        heads = self.config.num_value_heads
        widths = (self.config.num_channels, heads, heads, self.config.values_width)
        rows, beta, decay, gate = self.inputs(hidden).split(widths, dim=-1)
        mixed = attend.recall(layer, rows, self.taps, Gates(decay, beta, self.log_rate, self.bias))
        return self.kernels.gated_norm(mixed, gate, self.norm, self.eps)


def delta_shapes(config: RecurrenceConfig, hidden_size: int) -> dict[str, Shape]:
    """Return the tensors of a recurrent layer, by their names in the layer."""
    heads, channels, values = config.num_value_heads, config.num_channels, config.values_width
    heights = dict(zip(INPUTS, (channels, heads, heads, values), strict=True))
    return {
        **{f"in_proj_{part}.weight": (height, hidden_size) for part, height in heights.items()},
        "conv1d.weight": (channels, 1, config.num_taps),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config.value_size,),
        "out_proj.weight": (hidden_size, values),
    }
