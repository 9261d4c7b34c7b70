"""Rotary embeddings: the frequencies of each kind, and tables of cosines and sines."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.errors import InvalidConfig, UnsupportedError
from dflash_runtime.json_values import is_number
from dflash_runtime.models.placement import Placement


class RopeTable:
    """Cosines and sines for positions `[0, num_positions)`, computed in float32 and rounded once.

    With `rotary_dim` only as many dimensions of a head are rotated, in pairs of the first dimensions of both halves.
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_position_embeddings: int,
        placement: Placement,
        rotary_dim: int | None = None,
    ) -> None:
        frequencies, scale = rope_frequencies(rope, rotary_dim or head_dim, max_position_embeddings)
        angles = torch.arange(placement.num_positions, dtype=torch.float32)[:, None] * frequencies
        table = torch.stack((angles.cos(), angles.sin()), dim=1) * scale  # [positions, 2, rotated / 2]
        rest = torch.tensor([1.0, 0.0])[:, None].expand(len(table), 2, head_dim // 2 - table.shape[2])
        table = torch.cat((table, rest, table, rest), dim=-1)
        self.table = table.to(placement.device, placement.dtype)  # [positions, 2, D]: one lookup gives cos and sin

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [...] -> cos and sin, each [..., D]."""
        cos, sin = self.table[positions].unbind(-2)
        return cos, sin


def rope_frequencies(rope: RopeConfig, head_dim: int, max_position_embeddings: int) -> tuple[Tensor, float]:
    """Return inverse frequencies [D / 2] and the factor on cos and sin.

    Every operation has the order and the dtype that transformers' has, so both give the same bits.

    Raises:
        UnsupportedError: a rope type that this runtime does not compute.
        InvalidConfig: a parameter of the type is missing or no number.
    """
    if rope.kind not in KINDS:
        raise UnsupportedError(id="rope-not-run", field="rope_type", found=rope.kind, expected=", ".join(KINDS))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return KINDS[rope.kind](rope.theta**exponents, _Parameters(rope, head_dim, max_position_embeddings))


@dataclass(frozen=True, slots=True)
class _Parameters:
    """The parameters of a scaled rope, each checked when it is read."""

    rope: RopeConfig
    head_dim: int
    max_position_embeddings: int

    def number(self, name: str, default: float | None = None) -> float:
        """The positive number of a parameter, or `default` if the parameter is absent or null."""
        found = self.rope.params.get(name)
        found = default if found is None else found
        if not is_number(found) or not 0 < found < math.inf:
            raise InvalidConfig(f"rope_parameters.{name}", found, f"a positive number, which {self.rope.kind} needs")
        return found

    def optional(self, name: str) -> float | None:
        """The number of a parameter, or None if the parameter is absent, null or 0."""
        return self.number(name) if self.rope.params.get(name) else None

    @property
    def trained_len(self) -> float:
        """Positions that the model was trained with before its rope was scaled."""
        return self.number("original_max_position_embeddings", self.max_position_embeddings)


def _default(periods: Tensor, _: _Parameters) -> tuple[Tensor, float]:
    return 1.0 / periods, 1.0


def _linear(periods: Tensor, parameters: _Parameters) -> tuple[Tensor, float]:
    return 1.0 / periods / parameters.number("factor"), 1.0


def _proportional(periods: Tensor, parameters: _Parameters) -> tuple[Tensor, float]:
    """Turn the share `partial_rotary_factor` of the pairs, with the periods of whole heads. Other pairs do not turn."""
    share, factor = parameters.number("partial_rotary_factor", 1.0), parameters.number("factor", 1.0)
    num_turned = int(share * parameters.head_dim // 2)
    frequencies = 1.0 / periods
    frequencies[num_turned:] = 0
    return frequencies / factor, 1.0


def _llama3(periods: Tensor, parameters: _Parameters) -> tuple[Tensor, float]:
    """Divide frequencies with long waves by `factor`, keep the short waves, and blend between both."""
    plain = 1.0 / periods
    factor, trained = parameters.number("factor"), parameters.trained_len
    low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
    waves = 2 * math.pi / plain
    is_long, is_short = waves > trained / low, waves < trained / high
    share = (trained / waves - low) / (high - low)
    blended = (1 - share) * plain / factor + share * plain
    return torch.where(is_long, plain / factor, torch.where(is_short, plain, blended)), 1.0


def _yarn(periods: Tensor, parameters: _Parameters) -> tuple[Tensor, float]:
    """Divide low frequencies by `factor` and keep high frequencies, with a ramp between both."""
    trained, theta, dim = parameters.trained_len, parameters.rope.theta, parameters.head_dim
    if theta <= 1:
        raise InvalidConfig("rope_theta", theta, "a number above 1, which yarn needs")
    is_null = parameters.rope.params.get("factor", 0) is None
    factor = parameters.max_position_embeddings / trained if is_null else parameters.number("factor")

    def dimension(num_turns: float) -> float:
        """The dimension that turns `num_turns` times within the trained length."""
        return (dim * math.log(trained / (num_turns * 2 * math.pi))) / (2 * math.log(theta))

    first, last = dimension(parameters.optional("beta_fast") or 32), dimension(parameters.optional("beta_slow") or 1)
    if parameters.rope.params.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - first) / width, 0, 1)
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return frequencies, _yarn_scale(factor, parameters)


def _yarn_scale(factor: float, parameters: _Parameters) -> float:
    """The factor on cos and sin: as stated, or from `mscale` and `mscale_all_dim`, or from the length's factor."""
    stated = parameters.optional("attention_factor")
    if stated is not None:
        return float(stated)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = parameters.optional("mscale"), parameters.optional("mscale_all_dim")
    return float(scale(numerator) / scale(denominator)) if numerator and denominator else scale(1)


KINDS: dict[str, Callable[[Tensor, _Parameters], tuple[Tensor, float]]] = {
    "default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "proportional": _proportional,
}  # fmt: skip
"""Rope type -> its frequencies. `dynamic` and `longrope` are left out: they depend on the length of the text."""
