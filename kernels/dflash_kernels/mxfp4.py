"""Weights in MXFP4: numbers of four bits with one power of two for every 32 adjacent numbers, unpacked in products.

A number is `e2m1`: a sign, two bits of exponent, one bit of mantissa. A scale is `e8m0`: the exponent of a power of
two, plus 127. Both convert to bfloat16 without rounding. Source: Open Compute Project, "OCP Microscaling Formats (MX)
Specification", 2023.

Files have adjacent numbers in one byte. In memory, a tile of 32 rows and 128 columns is 32 x 16 words, and lies
together. Word kw of a row stands for the columns kw, kw + 16, ..., kw + 112. Tensor cores want adjacent columns in one
register. Therefore words 2u and 2u + 1 exchange halves: the first holds the first four numbers of both, the second the
last four. The bits of a number lie where few instructions move them to the bits of a bfloat16 (`MAGNITUDE_AT`,
`SIGN_AT`). Most are shifts to the left, which a GPU also does where it multiplies.

Axis letters: N rows of a weight, K inner width, R rows of the other factor, G groups of 32 rows, T tiles of 128
columns.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.launch_config import IS_INTERPRETED, constexpr, jit, tl
from dflash_kernels.mxfp4_block import BLOCK

GROUP = 32
"""Rows of a tile in memory."""

TILE = 128
"""Columns of a tile in memory."""

WORDS = TILE // 8
"""Words of a row in a tile."""

LARGEST_SCALE = 128
"""The largest scale with which the fast way of unpacking is exact: a factor of 2."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

MAGNITUDE_AT, SIGN_AT = (6, 3, 0, 9), (15, 12, 13, 14)
"""Lowest bit of the magnitude, and bit of the sign, of the four numbers in the lower half of a pair of columns.

The numbers of the upper half are 16 bits higher.
"""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight: `numbers` [..., G, T, 32, 16] int32 and `scales` [..., G, T, 32, 4] uint8, of `width` columns.

    `has_small_scales` says that no scale exceeds `LARGEST_SCALE`. A launch on a stack [E, ...] counts its programs in
    `program_counts` [E + 1] int32, which are zeros between launches. Therefore two launches on the same weight may not
    run at the same time.
    """

    numbers: Tensor
    scales: Tensor
    width: int
    has_small_scales: bool
    program_counts: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight that it stands for, [..., N, K]."""
        return (*self.numbers.shape[:-4], self.numbers.shape[-4] * GROUP, self.width)

    @property
    def scale_words(self) -> Tensor:
        """The four scales of a row of a tile as one integer, [..., G, T, 32, 1] int32."""
        return self.scales.view(torch.int32)

    def __getitem__(self, index: int) -> "Packed":
        """Return one weight of a stack."""
        return replace(self, numbers=self.numbers[index], scales=self.scales[index])


def pack(numbers: Tensor, scales: Tensor, width: int) -> Packed:
    """Return arranged numbers and scales as a weight of `width` columns. The host reads the largest scale."""
    counts = torch.zeros(len(numbers) + 1, dtype=torch.int32, device=numbers.device)
    return Packed(numbers, scales, width, bool(scales.max() <= LARGEST_SCALE), counts)


def arrange_numbers(blocks: Tensor) -> Tensor:
    """Bytes of a file [..., N, K / 32, 16] -> the numbers of `Packed`. N is a multiple of 32."""
    rows = blocks.flatten(-2)
    padded: Tensor = functional.pad(rows, (0, -rows.shape[-1] % (TILE // 2)))
    tiles = padded.unflatten(-2, (-1, GROUP)).unflatten(-1, (-1, 2, 4, WORDS // 2))  # [..., G, 32, T, word, place, u]
    table = _bits_of_bytes(blocks.device)
    words = torch.zeros(*tiles.shape[:-2], tiles.shape[-1], dtype=torch.int32, device=blocks.device)
    for place in range(4):
        words |= table[place][tiles[..., place, :].int()]
    return words.transpose(-1, -2).flatten(-2).transpose(-2, -3).contiguous()


def _bits_of_bytes(device: torch.device) -> Tensor:
    """Return the bits in a word of a byte's two numbers, [4, 256] int32, for the four places of a number."""
    byte = torch.arange(256, dtype=torch.int64)
    places = torch.zeros(4, 256, dtype=torch.int64)
    for place, (magnitude_at, sign_at) in enumerate(zip(MAGNITUDE_AT, SIGN_AT, strict=True)):
        for half, number in enumerate((byte & 15, byte >> 4)):
            places[place] |= (number & 7) << (magnitude_at + 16 * half) % 32
            places[place] |= (number >> 3) << (sign_at + 16 * half) % 32
    return places.to(torch.uint32).view(torch.int32).to(device)


def arrange_scales(scales: Tensor) -> Tensor:
    """Scales of a file [..., N, K / 32] -> the scales of `Packed`. N is a multiple of 32."""
    padded: Tensor = functional.pad(scales, (0, -scales.shape[-1] % (TILE // BLOCK)))
    tiles: Tensor = padded.unflatten(-2, (-1, GROUP)).unflatten(-1, (-1, TILE // BLOCK))
    return tiles.transpose(-2, -3).contiguous()


def unpack(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Return the weight as plain numbers, [..., N, K]."""
    table = torch.tensor((*MAGNITUDES, *(-value for value in MAGNITUDES)), dtype=dtype, device=weight.numbers.device)
    pairs = weight.numbers.unflatten(-1, (-1, 2))  # [..., G, T, 32, u, word]
    halves = [
        torch.stack([_number_at(pairs, place, half) for place in range(4)], dim=-1).flatten(-2) for half in range(2)
    ]
    columns = torch.stack(halves, dim=-2).flatten(-3, -2)  # [..., G, T, 32, kw, j]
    numbers = columns.transpose(-1, -2).flatten(-2).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    scales = weight.scales.transpose(-2, -3).flatten(-2).flatten(-3, -2)
    exponents = (scales.int() - 127).repeat_interleave(BLOCK, dim=-1)
    return torch.ldexp(table[numbers], exponents)[..., : weight.width]


def _number_at(words: Tensor, place: int, half: int) -> Tensor:
    """Return the numbers of four bits at a place and half of words, int32."""
    magnitude_at, sign_at = ((at[place] + 16 * half) % 32 for at in (MAGNITUDE_AT, SIGN_AT))
    return ((words >> magnitude_at) & 7) | (((words >> sign_at) & 1) << 3)


UNPACK = constexpr("""
{
    .reg .b32 t, s, z;
    mov.b32 z, 0x80008000;
    and.b32 t, $8, 0x81C081C0;  fma.rn.bf16x2 $0, t, $10, z;
    shl.b32 t, $8, 3;  and.b32 t, t, 0x81C081C0;  fma.rn.bf16x2 $1, t, $10, z;
    shl.b32 t, $8, 6;  and.b32 t, t, 0x01C001C0;
    shl.b32 s, $8, 2;  lop3.b32 t, s, z, t, 0xEA;  fma.rn.bf16x2 $2, t, $12, z;
    shr.u32 t, $8, 3;  and.b32 t, t, 0x01C001C0;
    shl.b32 s, $8, 1;  lop3.b32 t, s, z, t, 0xEA;  fma.rn.bf16x2 $3, t, $12, z;
    and.b32 t, $9, 0x81C081C0;  fma.rn.bf16x2 $4, t, $14, z;
    shl.b32 t, $9, 3;  and.b32 t, t, 0x81C081C0;  fma.rn.bf16x2 $5, t, $14, z;
    shl.b32 t, $9, 6;  and.b32 t, t, 0x01C001C0;
    shl.b32 s, $9, 2;  lop3.b32 t, s, z, t, 0xEA;  fma.rn.bf16x2 $6, t, $16, z;
    shr.u32 t, $9, 3;  and.b32 t, t, 0x01C001C0;
    shl.b32 s, $9, 1;  lop3.b32 t, s, z, t, 0xEA;  fma.rn.bf16x2 $7, t, $16, z;
}
""")
"""Two words of a pair and the factors of their four blocks -> 8 pairs of adjacent columns, as bfloat16.

The bits of a number, moved to the sign, the low exponent bits and the high mantissa bit of a bfloat16, are the number
times 2 ** -126: subnormal numbers included. A factor is 2 ** 126 times the scale, so the product is exact.
"""

FACTORS = constexpr("""
{
    .reg .b32 w;
    add.u32 w, $4, 0x7E7E7E7E;
    prmt.b32 $0, w, 0, 0x4040;  shl.b32 $0, $0, 7;
    prmt.b32 $1, w, 0, 0x4141;  shl.b32 $1, $1, 7;
    prmt.b32 $2, w, 0, 0x4242;  shl.b32 $2, $2, 7;
    prmt.b32 $3, w, 0, 0x4343;  shl.b32 $3, $3, 7;
}
""")
"""A word of four scales of at most `LARGEST_SCALE` -> their factors for `UNPACK`, twice in each register."""

HAS_ASSEMBLY = constexpr(not IS_INTERPRETED)


MAGNITUDES_AT, SIGNS_AT = constexpr(MAGNITUDE_AT), constexpr(SIGN_AT)


@jit
def _value_of(words, half, MAGNITUDE: tl.constexpr, SIGN: tl.constexpr):
    """Return the numbers of words at one place, in the given halves, as float32."""
    magnitude = (words >> ((MAGNITUDE + 16 * half) % 32)) & 7
    mantissa = tl.where(magnitude < 2, magnitude & 1, 2 + (magnitude & 1)).to(tl.float32)
    value = mantissa * tl.exp2((tl.maximum(magnitude >> 1, 1) - 2).to(tl.float32))
    return tl.where(((words >> ((SIGN + 16 * half) % 32)) & 1) != 0, -value, value)


@jit
def _scale_of(word, BLOCK_INDEX: tl.constexpr):
    """Return one of four `e8m0` scales in words, as float32. The least scale, 2 ** -127, is subnormal."""
    bits = (word >> (8 * BLOCK_INDEX)) & 255
    return tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)


@jit
def _unpack_tile(packed, scale_word, TILE_C: tl.constexpr):
    """Return the columns of a tile of words [TILE_C, 16], scales included, as bfloat16 [TILE_C, 128]."""
    factors = tl.inline_asm_elementwise(
        FACTORS, "=r,=r,=r,=r,r", [scale_word], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    first, second, third, fourth = factors
    c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
        UNPACK, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [packed, first[:, None], second[:, None], third[:, None], fourth[:, None]],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip
    even, odd = tl.join(tl.join(c0, c4), tl.join(c2, c6)), tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), (TILE_C, 128))


@jit
def packed_product_tile(
    numbers, scales, weight, column, hidden_rows, is_column, is_row,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_FAST: tl.constexpr, TILE_C: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Multiply packed rows `column` of a weight in a stack with rows of hidden states: float32 [TILE_C, TILE_R].

    Both ways give the same products: numbers of 16 bits times powers of two are exact. If `IS_FAST` is false or hidden
    states are not bfloat16, the scales multiply the products.
    """
    NUM_TILES: tl.constexpr = (DEPTH + 127) // 128
    dtype: tl.constexpr = hidden_rows.dtype.element_ty
    inner, within = tl.arange(0, 16), tl.arange(0, 128)
    group = (weight.to(tl.int64) * (NUM_COLUMNS // 32) + column // 32) * NUM_TILES
    words = numbers + (group * 512 + column % 32 * 16)[:, None]
    scale_words = scales + (group * 32 + column % 32)
    is_weight, is_hidden = is_column[:, None], is_row[:, None]
    acc = tl.zeros((TILE_C, TILE_R), tl.float32)
    is_fast: tl.constexpr = HAS_ASSEMBLY and IS_FAST and dtype == tl.bfloat16
    for tile in range(NUM_TILES):
        begin = tile * 128
        scale_word = tl.load(scale_words + tile * 32, mask=is_column, other=0)
        if is_fast:
            # Each weight is read once per step, so it should not displace other data in the cache.
            packed = tl.load(
                words + tile * 512 + inner[None, :], mask=is_weight, other=0, eviction_policy="evict_first"
            )
            is_element = is_hidden if DEPTH % 128 == 0 else is_hidden & (within < DEPTH - begin)[None, :]
            rows = tl.load(hidden_rows[:, None] + within[None, :] + begin, mask=is_element, other=0.0)
            acc = tl.dot(_unpack_tile(packed, scale_word, TILE_C), tl.trans(rows), acc)
        else:
            for j in tl.static_range(8):
                is_element = is_hidden if DEPTH % 128 == 0 else is_hidden & (begin + j * 16 < DEPTH)
                rows = tl.load(hidden_rows[:, None] + inner[None, :] + begin + j * 16, mask=is_element, other=0.0)
                pair = words + tile * 512 + (inner // 2 * 2 + j // 4)[None, :]
                value = _value_of(
                    tl.load(pair, mask=is_weight, other=0), (inner % 2)[None, :], MAGNITUDES_AT[j % 4], SIGNS_AT[j % 4]
                )
                product = tl.dot(value.to(dtype), tl.trans(rows), input_precision="ieee")
                acc += product * _scale_of(scale_word, j // 2)[:, None]
    return acc
