"""Weights in MXFP4: numbers of four bits with one power of two for every 32 adjacent numbers, unpacked in products.

A number is `e2m1`: a sign, two bits of exponent, one bit of mantissa. A scale is `e8m0`: the exponent of a power of
two, plus 127. Both convert to bfloat16 without rounding. Source: Open Compute Project, "OCP Microscaling Formats (MX)
Specification", 2023.

Files have adjacent numbers in one byte. In memory, a tile of 32 rows and 128 columns is 32 x 16 words, and lies
together. Word kw of a row stands for the columns kw, kw + 16, ..., kw + 112. Tensor cores want adjacent columns in one
register. Therefore words 2u and 2u + 1 exchange halves: the first holds the first four numbers of both, the second the
last four.

A word has four views: itself, shifted to the left, rotated, and the exclusive or of two shifts (`views`). The sign of a
number is bit 15 of its view, and its magnitude is bits 6 to 8, as in a bfloat16. The number of the next column is 16
bits higher. No four shifts would have all bits of a word at these places. The exclusive or has, and the word with given
numbers is the solution of linear equations of bits (`_words_of_bits`).

Axis letters: N rows of a weight, K inner width, R rows of the other factor, G groups of 32 rows, T tiles of 128
columns.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from dflash_kernels.launch import IS_INTERPRETED, constexpr, jit, tl
from dflash_kernels.mixtures.mxfp4_block import BLOCK

GROUP = 32
"""Rows of a tile in memory."""

TILE = 128
"""Columns of a tile in memory."""

WORDS = TILE // 8
"""Words of a row in a tile."""

FACTOR_EXPONENT = 126
"""A factor of `UNPACK` is 2 to this power times the scale: what the moved bits of a number lack."""

LARGEST_SCALE = 128
"""The largest scale with which the fast way of unpacking is exact: a factor of 2."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

MAGNITUDE_AT, SIGN_AT = 6, 15
"""Lowest bit of the magnitude, and bit of the sign, of the first number in a view of a word."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight: `numbers` [..., G, T, 32, 16] int32 and `scales` [..., G, T, 32] int32, of `width` columns.

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

    def __getitem__(self, index: int) -> "Packed":
        """Return one weight of a stack."""
        return replace(self, numbers=self.numbers[index], scales=self.scales[index])


def pack(numbers: Tensor, scales: Tensor, width: int) -> Packed:
    """Return arranged numbers and scales as a weight of `width` columns. The host reads the largest scale."""
    counts = torch.zeros(len(numbers) + 1, dtype=torch.int32, device=numbers.device)
    return Packed(numbers, scales, width, bool(_bytes_of_scales(scales).max() <= LARGEST_SCALE), counts)


def arrange_numbers(blocks: Tensor) -> Tensor:
    """Bytes of a file [..., N, K / 32, 16] -> the numbers of `Packed`. N is a multiple of 32."""
    rows = blocks.flatten(-2)
    padded: Tensor = functional.pad(rows, (0, -rows.shape[-1] % (TILE // 2)))
    tiles = padded.unflatten(-2, (-1, GROUP)).unflatten(-1, (-1, 2, 4, WORDS // 2))  # [..., G, 32, T, word, place, u]
    table = _words_of_bytes(blocks.device)
    words = torch.zeros(*tiles.shape[:-2], tiles.shape[-1], dtype=torch.int32, device=blocks.device)
    for place in range(4):
        words ^= table[place][tiles[..., place, :].int()]
    return words.transpose(-1, -2).flatten(-2).transpose(-2, -3).contiguous()


def views(words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four views of words, int32. A view has two of the eight numbers of a word."""
    rotated = (words << 10) | ((words >> 22) & 0x3FF)
    return words, words << 4, rotated, (words << 6) ^ ((words >> 2) & 0x3FFFFFFF)


def _words_of_bytes(device: torch.device) -> Tensor:
    """Return the words with a byte's two numbers in one of their views, [4, 256] int32: all else is zero."""
    byte = torch.arange(256, dtype=torch.int64)
    words = torch.zeros(4, 256, dtype=torch.int64)
    for index, word in enumerate(_words_of_bits()):
        words[index // 8] ^= (byte >> index % 8 & 1) * word
    return words.to(torch.uint32).view(torch.int32).to(device)


@cache
def _words_of_bits() -> tuple[int, ...]:
    """Return the 32 words with only one bit in all their numbers, in the order of views and of bytes of files."""
    units = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int32)
    numbers = torch.stack([_number_in(view, half) for view in views(units) for half in range(2)])
    shifts = torch.arange(0, 32, 4)[:, None]
    rows = [(int(found), 1 << bit) for bit, found in enumerate((numbers.long() << shifts).sum(0).tolist())]
    for bit in range(32):  # elimination: in the end, a row's first word has only the row's bit
        pivot = next(index for index in range(bit, 32) if rows[index][0] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        for index, (found, word) in enumerate(rows):
            if index != bit and found >> bit & 1:
                rows[index] = (found ^ rows[bit][0], word ^ rows[bit][1])
    return tuple(word for _, word in rows)


def arrange_scales(scales: Tensor) -> Tensor:
    """Scales of a file [..., N, K / 32] -> the scales of `Packed`. N is a multiple of 32.

    A word has the scales of four blocks as exponents of their factors (`FACTORS`), where a bfloat16 has its exponent:
    the first two in the word's halves, the others in the halves of the word rotated to the left by 8 bits.
    """
    padded: Tensor = functional.pad(scales, (0, -scales.shape[-1] % (TILE // BLOCK)))
    tiles: Tensor = padded.unflatten(-2, (-1, GROUP)).unflatten(-1, (-1, TILE // BLOCK))
    first, second, third, fourth = ((tiles.transpose(-2, -3).long() + FACTOR_EXPONENT) & 255).unbind(-1)
    last = (third << 7) | (fourth << 23)
    words = (first << 7) | (second << 23) | (last >> 8) | ((last & 255) << 24)
    return words.to(torch.uint32).view(torch.int32).contiguous()


def _bytes_of_scales(scales: Tensor) -> Tensor:
    """The scales of `Packed` -> [..., G, T, 32, 4] int32, as in a file."""
    rotated = (scales << 8) | ((scales >> 24) & 255)
    exponents = torch.stack([word >> at for word in (scales, rotated) for at in (7, 23)], dim=-1)
    return (exponents - FACTOR_EXPONENT) & 255


def unpack(weight: Packed, dtype: torch.dtype) -> Tensor:
    """Return the weight as plain numbers, [..., N, K]."""
    table = torch.tensor((*MAGNITUDES, *(-value for value in MAGNITUDES)), dtype=dtype, device=weight.numbers.device)
    seen = views(weight.numbers.unflatten(-1, (-1, 2)))  # [..., G, T, 32, u, word]
    halves = [torch.stack([_number_in(view, half) for view in seen], dim=-1).flatten(-2) for half in range(2)]
    columns = torch.stack(halves, dim=-2).flatten(-3, -2)  # [..., G, T, 32, kw, j]
    numbers = columns.transpose(-1, -2).flatten(-2).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    scales = _bytes_of_scales(weight.scales).transpose(-2, -3).flatten(-2).flatten(-3, -2)
    exponents = (scales - 127).repeat_interleave(BLOCK, dim=-1)
    return torch.ldexp(table[numbers], exponents)[..., : weight.width]


def _number_in(view: Tensor, half: int) -> Tensor:
    """Return the numbers of four bits in one half of views, int32."""
    return ((view >> (MAGNITUDE_AT + 16 * half)) & 7) | (((view >> (SIGN_AT + 16 * half)) & 1) << 3)


MASK = "0x81C081C0"
"""The bits of two numbers in a view of a word."""

MASKED_VIEWS = (
    "and.b32 {to}, {word}, {mask};",
    "shl.b32 {to}, {word}, 4;  and.b32 {to}, {to}, {mask};",
    "shf.l.wrap.b32 {to}, {word}, {word}, 10;  and.b32 {to}, {to}, {mask};",
    "shl.b32 {to}, {word}, 6;  shr.u32 {other}, {word}, 2;  lop3.b32 {to}, {to}, {other}, {mask}, 0x28;",
)
"""The instructions for the numbers in each of the four views of a word."""


def _unpack_word(first: int, word: int, factors: int) -> str:
    """Return the instructions that unpack one word into four registers, by the numbers of their operands."""
    lines = [f"mov.b32 {{l, h}}, ${factors};"]
    for view, masked in enumerate(MASKED_VIEWS):
        if view % 2 == 0:
            lines.append(f"mov.b32 f, {{{'h, h' if view else 'l, l'}}};")
        lines.append(masked.format(to="t", word=f"${word}", other="s", mask=MASK))
        lines.append(f"fma.rn.bf16x2 ${first + view}, t, f, z;")
    return "\n".join(lines)


def _unpacking(words: str) -> str:
    """Return the assembly of some words."""
    return f"""
{{
    .reg .b32 t, s, z, f;  .reg .b16 l, h;
    mov.b32 z, 0x80008000;
{words}
}}
"""


UNPACK_FIRST, UNPACK_LAST = constexpr(_unpacking(_unpack_word(0, 4, 6))), constexpr(_unpacking(_unpack_word(0, 5, 6)))
"""As `UNPACK`, for the first or the last word of a pair and the factors of its two blocks -> 4 pairs of columns."""

UNPACK = constexpr(_unpacking(_unpack_word(0, 8, 10) + "\n" + _unpack_word(4, 9, 12)))
"""Two words of a pair and the factors of their four blocks -> 8 pairs of adjacent columns, as bfloat16.

The bits of a number, moved to the sign, the low exponent bits and the high mantissa bit of a bfloat16, are the number
times 2 ** -126: subnormal numbers included. A factor is 2 ** 126 times the scale, so the product is exact.
"""

FACTOR_MASK = "0x7F807F80"
"""The bits of two factors in a word of scales."""

FACTORS = constexpr(f"""
{{
    .reg .b32 t;
    and.b32 $0, $2, {FACTOR_MASK};
    shf.l.wrap.b32 t, $2, $2, 8;  and.b32 $1, t, {FACTOR_MASK};
}}
""")
"""A word of four scales of at most `LARGEST_SCALE` -> their factors for `UNPACK`, two in each register."""

HAS_ASSEMBLY = constexpr(not IS_INTERPRETED)
_TL_MAGNITUDE_AT, _TL_SIGN_AT = constexpr(MAGNITUDE_AT), constexpr(SIGN_AT)
_TL_FACTOR_EXPONENT = constexpr(FACTOR_EXPONENT)


@jit
def _view_of(words, PLACE: tl.constexpr):
    """Return one of the four `views` of words."""
    if PLACE == 0:
        view = words
    elif PLACE == 1:
        view = words << 4
    elif PLACE == 2:
        view = (words << 10) | ((words >> 22) & 0x3FF)
    else:
        view = (words << 6) ^ ((words >> 2) & 0x3FFFFFFF)
    return view


@jit
def _value_of(view, half):
    """Return the numbers in the given halves of views, as float32."""
    magnitude = (view >> (16 * half + _TL_MAGNITUDE_AT)) & 7
    mantissa = tl.where(magnitude < 2, magnitude & 1, 2 + (magnitude & 1)).to(tl.float32)
    value = mantissa * tl.exp2((tl.maximum(magnitude >> 1, 1) - 2).to(tl.float32))
    return tl.where(((view >> (16 * half + _TL_SIGN_AT)) & 1) != 0, -value, value)


@jit
def _scale_of(word, BLOCK_INDEX: tl.constexpr):
    """Return one of four scales in words, as float32. The least scale, 2 ** -127, is subnormal."""
    halves = word if BLOCK_INDEX < 2 else (word << 8) | ((word >> 24) & 255)
    bits = ((halves >> (7 + 16 * (BLOCK_INDEX % 2))) - _TL_FACTOR_EXPONENT) & 255
    return tl.where(bits > 0, bits << 23, 1 << 22).to(tl.float32, bitcast=True)


@jit
def _unpack_tile(packed, first, last, TILE_C: tl.constexpr):
    """Return the columns of a tile of words [TILE_C, 16], times `FACTORS` of scales, as bfloat16 [TILE_C, 128]."""
    c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
        UNPACK, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r", [packed, first[:, None], last[:, None]],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip
    even, odd = tl.join(tl.join(c0, c4), tl.join(c2, c6)), tl.join(tl.join(c1, c5), tl.join(c3, c7))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), (TILE_C, 128))


@jit
def _unpack_half(packed, factors, HALF: tl.constexpr, TILE_C: tl.constexpr):
    """Return one half of the columns of `_unpack_tile`, [TILE_C, 64]."""
    c0, c1, c2, c3 = tl.inline_asm_elementwise(
        UNPACK_LAST if HALF else UNPACK_FIRST, "=r,=r,=r,=r,r,r,r,r", [packed, factors[:, None]],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    return tl.reshape(tl.permute(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (0, 2, 3, 1)), (TILE_C, 64))


@jit
def packed_product_tile(
    numbers, scales, weight, column, hidden_rows, is_column, is_row,
    NUM_COLUMNS: tl.constexpr, DEPTH: tl.constexpr, IS_FAST: tl.constexpr, TILE_C: tl.constexpr, TILE_R: tl.constexpr,
):  # fmt: skip
    """Multiply packed rows `column` of a weight in a stack with rows of hidden states: float32 [TILE_C, TILE_R].

    Both ways give the same products: numbers of 16 bits times powers of two are exact. If `IS_FAST` is false or hidden
    states are not bfloat16, the scales multiply the products. Tiles of 16 rows and more are multiplied in two halves:
    half the unpacked numbers need half the registers, and one more program fits on a multiprocessor.
    """
    NUM_TILES: tl.constexpr = (DEPTH + 127) // 128
    dtype: tl.constexpr = hidden_rows.dtype.element_ty
    NUM_CUTS: tl.constexpr = 2 if TILE_R >= 16 else 1
    CUT: tl.constexpr = 128 // NUM_CUTS
    inner, within = tl.arange(0, 16), tl.arange(0, CUT)
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
            first, last = tl.inline_asm_elementwise(
                FACTORS, "=r,=r,r", [scale_word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
            )
            for cut in tl.static_range(NUM_CUTS):
                column_in = begin + cut * CUT + within
                is_element = is_hidden if DEPTH % 128 == 0 else is_hidden & (column_in < DEPTH)[None, :]
                rows = tl.load(hidden_rows[:, None] + column_in[None, :], mask=is_element, other=0.0)
                if NUM_CUTS == 1:
                    unpacked = _unpack_tile(packed, first, last, TILE_C)
                else:
                    unpacked = _unpack_half(packed, last if cut else first, cut, TILE_C)
                acc = tl.dot(unpacked, tl.trans(rows), acc)
        else:
            for j in tl.static_range(8):
                is_element = is_hidden if DEPTH % 128 == 0 else is_hidden & (begin + j * 16 < DEPTH)
                rows = tl.load(hidden_rows[:, None] + inner[None, :] + begin + j * 16, mask=is_element, other=0.0)
                pair = words + tile * 512 + (inner // 2 * 2 + j // 4)[None, :]
                value = _value_of(_view_of(tl.load(pair, mask=is_weight, other=0), j % 4), (inner % 2)[None, :])
                product = tl.dot(value.to(dtype), tl.trans(rows), input_precision="ieee")
                acc += product * _scale_of(scale_word, j // 2)[:, None]
    return acc
