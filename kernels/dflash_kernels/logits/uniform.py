"""Random numbers keyed by position: a hash of (seed, position, purpose) instead of a generator with a state.

A request's samples therefore do not depend on the other requests of its batch or on the number of verified tokens per
step. A replayed CUDA graph draws new numbers because the positions have advanced.

Axis letters: T rows.
"""

from torch import Tensor

from dflash_kernels.launch import constexpr, jit, tl

TARGET, DRAFT, ACCEPT, RESIDUAL = 1, 2, 3, 4
"""Purposes of random numbers: samples of the target, samples of the draft, accept decisions, samples after a rejection.

Each purpose has its own numbers. Shared numbers would bias the samples (vllm-project/vllm#47386).
"""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_TL_GOLDEN, _TL_MIX_1, _TL_MIX_2 = constexpr(_GOLDEN), constexpr(_MIX_1), constexpr(_MIX_2)


def uniform_ref(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Return float64 numbers [T] in [0, 1) from int64 seeds [T] and positions [T], by two rounds of splitmix64.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"; constants of its mix13.
    """
    state = _mix(seeds + stream(purpose))
    bits = _mix(state + _GOLDEN * (positions + 1))
    return _shift(bits, 11).double() * 2.0**-53


def stream(purpose: int) -> int:
    """Return the number that a purpose adds to the seed, as a signed 64-bit integer."""
    return (_GOLDEN * (purpose + 1) + 2**63) % 2**64 - 2**63


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    """Shift right logically. `>>` of a signed integer is an arithmetic shift."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@jit
def _mix_tile(state):
    state = (state ^ ((state >> 30) & 0x3FFFFFFFF)) * _TL_MIX_1
    state = (state ^ ((state >> 27) & 0x1FFFFFFFFF)) * _TL_MIX_2
    return state ^ ((state >> 31) & 0x1FFFFFFFF)


@jit
def uniform_tile(seeds, positions, salt):
    """Compute `uniform_ref` for int64 tiles or scalars. `salt` is `stream(purpose)`."""
    state = _mix_tile(seeds + salt)
    bits = _mix_tile(state + (positions + 1) * _TL_GOLDEN)
    return ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
