"""Device functions between numbers and FP8 (e4m3).

GPUs without conversions of FP8, and the interpreter, read and write bytes, and convert in integers.
"""

from dflash_kernels.launch import constexpr, jit, tl

LARGEST = constexpr(448.0)
"""`FP8_MAX` for kernels."""


@jit
def from_bytes(loaded):
    """Return the numbers of e4m3 bytes in float32. NaN becomes 480."""
    wide = loaded.to(tl.int32)
    bits = ((wide & 0x7F) << 20) | ((wide & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120, the difference of the exponents' biases


@jit
def nearest_fp8(numbers):
    """Round float32 numbers of at most 448 to the nearest number of e4m3, in float32. Ties go to even."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    large = (size + 0x7FFFF + ((size >> 20) & 1)) & 0x7FF00000
    # Numbers below 2**-6 are multiples of 2**-9, which is the distance of numbers near 24,576 in float32.
    small = ((size.to(tl.float32, bitcast=True) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)
    found = tl.where(size < 0x3C800000, small, large)
    return (found | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@jit
def as_fp8(numbers, dtype: tl.constexpr):
    """Round float32 numbers to e4m3, in e4m3 or a wider dtype. Numbers above 448 become 448."""
    limited = tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST)
    return limited.to(tl.float8e4nv) if dtype == tl.float8e4nv else nearest_fp8(limited).to(dtype)


@jit
def as_bytes(numbers):
    """Round float32 numbers to e4m3, and return their bytes. Numbers above 448 become 448."""
    bits = as_fp8(numbers, tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # The byte of a number below 2**-6 counts steps of 2**-9.
    small = (size.to(tl.float32, bitcast=True) * 512.0).to(tl.int32)
    found = tl.where(size < 0x3C800000, small, (size >> 20) - 960)  # 960: the difference of the exponents' biases
    return (found | ((bits >> 24) & 0x80)).to(tl.uint8)
