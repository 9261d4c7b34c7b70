"""Weights in MXFP4: numbers of four bits with one power of two for every 32 adjacent numbers, unpacked in products.

A number is `e2m1`: a sign, two bits of exponent, one bit of mantissa. A scale is `e8m0`: the exponent of a power of
two, plus 127. Both convert to bfloat16 without rounding. Source: Open Compute Project, "OCP Microscaling Formats (MX)
Specification", 2023.

Files have adjacent numbers in one byte, low bits first. In memory the low bits of byte i are number i, and its high
bits are number i + K / 2. Therefore both halves of a loaded tile multiply adjacent columns of the other factor. Four
scales of one row and half lie together, so that one load serves four tiles.

Axis letters: N rows of a weight, K inner width, R rows of the other factor, W words of four scales in half a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.launch_config import IS_INTERPRETED, ceil_div, constexpr, jit, tl

BLOCK = 32
"""Numbers with one scale."""

PACKED_DEPTH = 2 * BLOCK
"""The kernel needs an inner width of a multiple of this: both halves of a row begin with a whole block."""

NUM_TOGETHER = 4
"""Scales in a word."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight: `numbers` [..., N, K / 2] uint8 and `scales` [..., 2 * W, N, 4] uint8 (`group_scales`)."""

    numbers: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that it stands for, [..., N, K]."""
        return (*self.numbers.shape[:-1], 2 * self.numbers.shape[-1])

    def __getitem__(self, index: int) -> "Packed":
        """Return one weight of a stack."""
        return Packed(self.numbers[index], self.scales[index])


def halve_blocks(blocks: Tensor) -> Tensor:
    """Bytes of a file [..., N, K / 32, 16] -> the numbers of `Packed`, [..., N, K / 2]."""
    rows = blocks.flatten(-2)
    half = rows.shape[-1] // 2
    first, second = rows[..., :half], rows[..., half:]
    even = (first & 15) | (second << 4)
    odd = (first >> 4) | (second & 240)
    return torch.stack((even, odd), dim=-1).flatten(-2)


def group_scales(scales: Tensor) -> Tensor:
    """Scales of a file [..., N, K / 32] -> the scales of `Packed`, [..., 2 * W, N, 4]."""
    halves = functional.pad(scales, (0, scales.shape[-1] % 2)).unflatten(-1, (2, -1))
    padded: Tensor = functional.pad(halves, (0, -halves.shape[-1] % NUM_TOGETHER)).unflatten(-1, (-1, NUM_TOGETHER))
    return padded.flatten(-3, -2).transpose(-3, -2).contiguous()


def unpack(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Return the weight as plain numbers, [..., N, K]."""
    table = torch.tensor((*MAGNITUDES, *(-value for value in MAGNITUDES)), dtype=dtype, device=weight.numbers.device)
    nibbles = torch.cat((weight.numbers & 15, weight.numbers >> 4), dim=-1)
    halves = weight.scales.transpose(-3, -2).unflatten(-2, (2, -1)).flatten(-2)
    num_blocks = weight.shape[-1] // BLOCK
    scales = halves[..., : ceil_div(num_blocks, 2)].flatten(-2)[..., :num_blocks]
    exponents = (scales.int() - 127).repeat_interleave(BLOCK, dim=-1)
    return torch.ldexp(table[nibbles.int()], exponents)


UNPACK = constexpr("""
{
    .reg .b32 b, t, s, m, f, z;
    mov.b32 f, 0x7E807E80;
    mov.b32 z, 0x80008000;
    prmt.b32 b, $4, 0, 0x1404;
    shl.b32 s, b, 4;  and.b32 s, s, 0x80008000;
    shr.u32 m, b, 2;  and.b32 m, m, 0x01C001C0;
    or.b32 t, s, m;   fma.rn.bf16x2 $0, t, f, z;
    and.b32 s, b, 0x80008000;
    shr.u32 m, b, 6;  and.b32 m, m, 0x01C001C0;
    or.b32 t, s, m;   fma.rn.bf16x2 $2, t, f, z;
    prmt.b32 b, $4, 0, 0x3424;
    shl.b32 s, b, 4;  and.b32 s, s, 0x80008000;
    shr.u32 m, b, 2;  and.b32 m, m, 0x01C001C0;
    or.b32 t, s, m;   fma.rn.bf16x2 $1, t, f, z;
    and.b32 s, b, 0x80008000;
    shr.u32 m, b, 6;  and.b32 m, m, 0x01C001C0;
    or.b32 t, s, m;   fma.rn.bf16x2 $3, t, f, z;
}
""")
"""Four bytes -> their low numbers and their high numbers, as bfloat16.

The bits of a number, moved to the sign, the low exponent bits and the high mantissa bit of a bfloat16, are the number
times 2 ** -126: subnormal numbers included. The product with 2 ** 126 is exact.
"""

HAS_ASSEMBLY = constexpr(not IS_INTERPRETED)


@jit
def _value_of(nibble):
    """Return numbers of four bits as float32."""
    magnitude = (nibble & 7).to(tl.int32)
    mantissa = tl.where(magnitude < 2, magnitude & 1, 2 + (magnitude & 1)).to(tl.float32)
    exponent = tl.maximum(magnitude >> 1, 1) - 2
    value = mantissa * tl.exp2(exponent.to(tl.float32))
    return tl.where((nibble & 8) != 0, -value, value)


@jit
def unpack_tile(numbers, dtype: tl.constexpr):
    """Return the low and the high numbers of a tile of bytes, without their scales."""
    if HAS_ASSEMBLY and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            UNPACK, "=r,=r,=r,=r,r", [numbers], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        return _value_of(numbers & 15).to(dtype), _value_of(numbers >> 4).to(dtype)


@jit
def _scale_of(exponent):
    """Return `e8m0` scales as float32. The least scale, 2 ** -127, is subnormal."""
    bits = exponent & 255
    return tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)


@jit
def packed_product_tile(
    numbers, scales, weight, column, hidden_rows, is_column, is_row,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TILE_C: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Multiply packed rows `column` of a weight in a stack with rows of hidden states: float32 [TILE_C, TILE_R].

    A tile of numbers has one scale in each row and half, so the scales multiply the products and not the numbers.
    """
    HALF: tl.constexpr = DEPTH // 2
    NUM_TILES: tl.constexpr = HALF // 32
    dtype: tl.constexpr = hidden_rows.dtype.element_ty
    inner = tl.arange(0, 32)
    numbers_tile = numbers + ((weight.to(tl.int64) * NUM_COLUMNS + column) * HALF)[:, None] + inner[None, :]
    NUM_WORDS: tl.constexpr = (NUM_TILES + 3) // 4  # words of `NUM_TOGETHER` scales
    low_words = scales + weight.to(tl.int64) * (2 * NUM_WORDS * NUM_COLUMNS) + column
    hidden_tile = hidden_rows[:, None] + inner[None, :]
    acc = tl.zeros((TILE_C, TILE_R), tl.float32)
    next_low = tl.load(low_words, mask=is_column, other=0)
    next_high = tl.load(low_words + NUM_WORDS * NUM_COLUMNS, mask=is_column, other=0)
    for word in range(NUM_WORDS):
        low_word, high_word = next_low, next_high
        # The scales of the next tiles are loaded while these are multiplied.
        ahead, is_ahead = low_words + (word + 1) * NUM_COLUMNS, is_column & (word + 1 < NUM_WORDS)
        next_low = tl.load(ahead, mask=is_ahead, other=0)
        next_high = tl.load(ahead + NUM_WORDS * NUM_COLUMNS, mask=is_ahead, other=0)
        for place in tl.static_range(4):
            tile = word * 4 + place
            is_weight, is_hidden = is_column[:, None], is_row[:, None]
            if NUM_TILES % 4 != 0:
                is_weight, is_hidden = is_weight & (tile < NUM_TILES), is_hidden & (tile < NUM_TILES)
            # Each weight is read once per step, so it should not displace other data in the cache.
            packed = tl.load(numbers_tile + tile * 32, mask=is_weight, other=0, eviction_policy="evict_first")
            first = tl.load(hidden_tile + tile * 32, mask=is_hidden, other=0.0)
            second = tl.load(hidden_tile + (HALF + tile * 32), mask=is_hidden, other=0.0)
            low, high = unpack_tile(packed, dtype)
            low_scale, high_scale = _scale_of(low_word >> (8 * place)), _scale_of(high_word >> (8 * place))
            acc += tl.dot(low, tl.trans(first), input_precision="ieee") * low_scale[:, None]
            acc += tl.dot(high, tl.trans(second), input_precision="ieee") * high_scale[:, None]
    return acc
