"""The hyperbolic tangent of the kernels, for capped scores and capped logits."""

import math

from dflash_kernels.launch import constexpr, jit, tl

_TL_LOG2E = constexpr(math.log2(math.e))


@jit
def tanh(values):
    """Return the tangents of float32 values. Near zero it uses the series: exponentials would lose most digits."""
    square = values * values
    series = values * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    power = tl.exp2(tl.abs(values) * (-2.0 * _TL_LOG2E))
    quotient = (1.0 - power) / (1.0 + power)
    return tl.where(square < 1 / 16, series, tl.where(values < 0, -quotient, quotient))


@jit
def tanh_for_16_bits(values):
    """Return the tangents of float32 values with an error of at most 1e-5 of them, in half of the instructions."""
    size = tl.abs(values)
    quotient = 2.0 / (1.0 + tl.exp2(size * (-2.0 * _TL_LOG2E))) - 1.0
    series = values - values * values * values * (1 / 3)
    return tl.where(size < 1 / 64, series, tl.where(values < 0, -quotient, quotient))
