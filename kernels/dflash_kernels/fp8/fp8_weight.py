"""A weight in FP8 (e4m3) with scales, and the rounding of activations that multiply it. PyTorch only.

Axis letters: T rows, E experts, N columns of a product (rows of the weight), K inner width, n and k scales along N and
K, G groups of K.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from dflash_kernels.launch import ceil_div, power_of_2, require

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of e4m3."""

LEAST_PEAK = 1e-10
"""The least peak of a group of activations for its scale. Source: vLLM and SGLang, per-token-group quantisation."""

Rounding = Literal["dynamic", "static", "none"]


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix `values * scales` in FP8, or a stack of such matrices.

    values       [N, K] or [E, N, K] e4m3
    scales       [n, k] or [E, n, k] float32. A block of N / n rows and K / k columns has one scale. The last block of
                 an axis may be cut. Whole blocks have a power of two of rows and columns, or all of them
    input_scale  how activations are rounded. None: each row has a scale per block of columns, made from the row's
                 largest number there. [1]: this scale. [0]: activations are not rounded
    """

    values: Tensor
    scales: Tensor
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        require(self.values.dtype == FP8, "values", "float8_e4m3fn")
        require(self.scales.dtype == torch.float32, "scales", "float32")
        require(self.values.dim() == self.scales.dim(), "scales", "one scale per block of `values`")

    @property
    def rounding(self) -> Rounding:
        """How activations are rounded."""
        if self.input_scale is None:
            return "dynamic"
        return "static" if self.input_scale.numel() else "none"

    @property
    def shape(self) -> torch.Size:
        """[N, K] or [E, N, K]."""
        return self.values.shape

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block with one scale."""
        height, width = (_block_length(self.values.shape[axis], self.scales.shape[axis]) for axis in (-2, -1))
        return height, width

    @property
    def has_groups(self) -> bool:
        """Whether a row of activations has several scales."""
        return self.scales.shape[-1] > 1

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, expert: int) -> "Fp8Weight":
        """Return one matrix of a stack."""
        require(self.values.dim() == 3, "values", "a stack of matrices")
        return Fp8Weight(self.values[expert], self.scales[expert], self.input_scale)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `values * scales` in a dtype, computed in float32 or wider."""
        wide = torch.promote_types(dtype, torch.float32)
        factors = self.scales.to(wide)
        for axis, length in zip((-2, -1), self.block, strict=True):
            factors = factors.repeat_interleave(length, dim=axis).narrow(axis, 0, self.values.shape[axis])
        return (self.values.to(wide) * factors).to(dtype)

    def with_row_scales(self) -> "Fp8Weight":
        """Return the same matrix with scales for every row."""
        scales = self.scales.repeat_interleave(self.block[0], dim=-2).narrow(-2, 0, self.values.shape[-2])
        return Fp8Weight(self.values, scales, self.input_scale)

    def rows(self, begin: int, end: int) -> "Fp8Weight":
        """Return rows [begin, end) of the matrix. They keep blocks if they begin and end with one."""
        height = self.block[0]
        if begin % height or (end % height and end != self.values.shape[-2]):
            return Fp8Weight(self.values[begin:end], self.with_row_scales().scales[begin:end], self.input_scale)
        scales = self.scales[begin // height : ceil_div(end, height)]
        return _checked(Fp8Weight(self.values[begin:end], scales, self.input_scale), height, self)

    def take(self, order: Tensor) -> "Fp8Weight":
        """Return the rows `order` [M] int64 of the matrix. They keep blocks if whole blocks stay together."""
        height, order = self.block[0], order.to(self.values.device)
        values, of_rows = self.values[order], order // height
        if len(order) % height == 0:
            blocks = of_rows.view(-1, height)
            if bool((blocks == blocks[:, :1]).all()):
                made = Fp8Weight(values, self.scales[blocks[:, 0]], self.input_scale)
                if made.block[0] == height:
                    return made
        return Fp8Weight(values, self.scales[of_rows], self.input_scale)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of the weight of the module `name`, which `find` reads."""
        found = {f"{name}{WEIGHT}": self.values, f"{name}{SCALES}": self.scales}
        return found if self.input_scale is None else {**found, f"{name}{INPUT_SCALE}": self.input_scale}

    @classmethod
    def find(cls, tensors: Mapping[str, Tensor], name: str) -> "Fp8Weight | None":
        """Return the weight of the module `name` if it is in FP8."""
        scales = tensors.get(f"{name}{SCALES}")
        return None if scales is None else cls(tensors[f"{name}{WEIGHT}"], scales, tensors.get(f"{name}{INPUT_SCALE}"))


WEIGHT, SCALES, INPUT_SCALE = ".weight", ".weight_scale", ".input_scale"
"""Ends of the names of a module's tensors after loading. Checkpoints have several names for scales."""


def to_fp8(matrix: Tensor, block: tuple[int, int]) -> Fp8Weight:
    """Round a matrix [N, K] to FP8 with one scale per block, the largest number / 448. The last blocks may be cut.

    A block as wide as the matrix gives one scale per row, if it has one row. Blocks of zeros have the scale of
    `LEAST_PEAK`.
    """
    height, width = (min(length, size) for length, size in zip(block, matrix.shape, strict=True))
    num_rows, num_columns = ceil_div(matrix.shape[0], height), ceil_div(matrix.shape[1], width)
    missing = (0, num_columns * width - matrix.shape[1], 0, num_rows * height - matrix.shape[0])
    blocks = torch.nn.functional.pad(matrix.float(), missing).view(num_rows, height, num_columns, width)
    scales = blocks.abs().amax((1, 3)).clamp(min=LEAST_PEAK) / FP8_MAX
    values = _to_fp8(blocks / scales[:, None, :, None]).view(num_rows * height, -1)
    return Fp8Weight(values[: matrix.shape[0], : matrix.shape[1]].contiguous(), scales)


def join_rows(parts: Sequence[Fp8Weight]) -> Fp8Weight:
    """Return one matrix with the rows of all parts. It keeps blocks if every part but the last has whole blocks.

    Parts with fixed scales for activations share the largest, as in vLLM 0.33.0 (`process_weights_after_loading`).
    """
    require(len({part.rounding for part in parts}) == 1, "parts", "one way to round activations")
    require(len({part.scales.shape[-1] for part in parts}) == 1, "parts", "blocks with the same number of columns")
    height = max(part.block[0] for part in parts)
    has_blocks = all(len(part.scales) == ceil_div(len(part), height) for part in parts)
    has_blocks = has_blocks and all(len(part) % height == 0 for part in parts[:-1])
    scales = [part.scales if has_blocks else part.with_row_scales().scales for part in parts]
    fixed = [part.input_scale for part in parts if part.input_scale is not None]
    input_scale = torch.stack(fixed).amax(0) if fixed and fixed[0].numel() else next(iter(fixed), None)
    # torch concatenates no e4m3 on some devices, but bytes on all.
    values = torch.cat([part.values.view(torch.uint8) for part in parts]).view(FP8)
    joined = Fp8Weight(values, torch.cat(scales), input_scale)
    return _checked(joined, height, joined) if has_blocks else joined


def _checked(made: Fp8Weight, height: int, whole: Fp8Weight) -> Fp8Weight:
    """Return `made`, or the same matrix with row scales if its shape says another height of blocks."""
    if len(made.scales) == 1 or made.block[0] == height:
        return made
    scales = made.scales.repeat_interleave(height, dim=0)[: len(made.values)]
    return Fp8Weight(made.values, scales, whole.input_scale)


def _block_length(size: int, count: int) -> int:
    """Return the length of `count` blocks that cover `size`: one, all, or a power of two."""
    if count == size:
        return 1
    return size if count == 1 else power_of_2(ceil_div(size, count))


class Rounded(NamedTuple):
    """Rows of activations in FP8, and the rows before they were rounded.

    rows    [T, K] numbers of e4m3, stored in a wider dtype on devices without products in FP8
    scales  [G, T] float32, or [1, 1] for a fixed scale
    plain   [T, K] in the model's dtype
    """

    rows: Tensor
    scales: Tensor
    plain: Tensor


Rows = Tensor | Rounded
"""Rows that a product reads, rounded for it or not."""


def plain_rows(rows: Rows) -> Tensor:
    """Return the rows in the model's dtype."""
    return rows.plain if isinstance(rows, Rounded) else rows


def round_rows_ref(hidden: Tensor, weight: Fp8Weight) -> Rounded:
    """Round activations [T, K] to e4m3 as the format of a weight says. The weight must round activations.

    A group's scale is its peak / 448, and its numbers are multiplied by 448 / peak before they are rounded. Engines
    multiply like this or divide by the scale; the two differ by one rounding in float32.
    Source: vLLM 0.33.0 csrc/quantization (`per_token_group_quant_fp8`, `dynamic_per_token_scaled_fp8_quant`).
    """
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    num_rows, depth = hidden.shape
    if weight.input_scale is not None:
        require(weight.rounding == "static", "weight", "rounded activations")
        scale = weight.input_scale.view(1, 1)
        return Rounded(_to_fp8(wide * (1 / scale).to(wide.dtype)), scale.float(), hidden)
    length = weight.block[1] if weight.has_groups else depth
    count = ceil_div(depth, length)
    padded = torch.nn.functional.pad(wide, (0, count * length - depth)).view(num_rows, count, length)
    peaks = padded.abs().amax(-1).clamp(min=LEAST_PEAK)
    factors = torch.full_like(peaks, FP8_MAX) / peaks  # torch divides a number by a tensor with two roundings
    rows = _to_fp8(padded * factors[..., None]).view(num_rows, -1)[:, :depth]
    scales = (peaks / torch.full_like(peaks, FP8_MAX)).T.contiguous()  # a GPU multiplies by the inverse of a number
    return Rounded(rows, scales, hidden)


def _to_fp8(numbers: Tensor) -> Tensor:
    return numbers.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def rounded_ref(hidden: Rows, weight: Fp8Weight) -> Tensor:
    """Return the activations [T, K] that a product with the weight uses, in float32 or float64."""
    plain = plain_rows(hidden)
    wide = torch.promote_types(plain.dtype, torch.float32)
    if weight.rounding == "none":
        return plain.to(wide)
    rounded, depth = hidden if isinstance(hidden, Rounded) else round_rows_ref(hidden, weight), plain.shape[1]
    scales = rounded.scales.to(wide).T
    if scales.numel() == 1:
        return rounded.rows.to(wide) * scales
    length = weight.block[1] if weight.has_groups else depth
    return rounded.rows.to(wide) * scales.repeat_interleave(length, dim=1)[:, :depth]
