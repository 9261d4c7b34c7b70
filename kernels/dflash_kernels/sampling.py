"""Draw tokens from logits with temperature, top-k and top-p, from random numbers keyed by place.

Each draw uses one uniform that is a hash of (seed, position, purpose), so a request's tokens depend neither on its
batch mates nor on how many tokens a step happens to verify: sampled speculative output equals sampled plain decoding.

Axis letters: T rows, V vocabulary.
"""

import torch
from torch import Tensor

PURPOSE_TARGET = 1
"""Stream of the target's own draws. Other uses of randomness take other numbers; no two streams share draws."""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def sample_ref(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """One token a row: the argmax where the temperature is 0, a draw otherwise.

    logits        [T, V]   any float dtype
    temperatures  [T] float64
    top_ks        [T] int64     0 keeps all
    top_ps        [T] float64   1 keeps all
    seeds         [T] int64
    positions     [T] int64     position of the token being drawn
    Returns [T] int64.
    """
    greedy = logits.argmax(-1)
    is_drawn = temperatures > 0
    if not bool(is_drawn.any()):
        return greedy
    rows = is_drawn.nonzero(as_tuple=True)[0]
    probs = filtered_probs_ref(logits[rows], temperatures[rows], top_ks[rows], top_ps[rows])
    uniform = uniform_ref(seeds[rows], positions[rows], PURPOSE_TARGET)
    return greedy.index_copy(0, rows, draw_ref(probs, uniform))


def filtered_probs_ref(logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """The distribution a row is drawn from: softmax at its temperature, cut to top-k, then to top-p.

    Shapes as in `sample_ref`, every temperature above 0. top-p keeps the smallest set of most likely tokens whose
    probability reaches `top_p`, after top-k and renormalisation. Returns [T, V] float64, rows summing to 1.
    """
    probs = (logits.double() / temperatures[:, None]).softmax(-1)
    vocab_size = probs.shape[-1]
    if not bool(((top_ks > 0) & (top_ks < vocab_size)).any() | (top_ps < 1).any()):
        return probs
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=probs.device)
    limits = torch.where(top_ks > 0, top_ks, vocab_size)
    ranked = ranked.masked_fill(rank >= limits[:, None], 0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    # Without the first test a top_p of 1 would drop tail tokens whenever the sum rounds up to 1 early.
    ranked = ranked.masked_fill((top_ps < 1)[:, None] & (before >= top_ps[:, None]), 0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, ranked)


def draw_ref(probs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: [T, V] probabilities and [T] numbers in [0, 1) -> [T] int64 tokens."""
    cumulative = probs.cumsum(-1)
    total = cumulative[:, -1:]
    level = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, level, right=True)[:, 0]


def uniform_ref(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """[T] float64 in [0, 1) from (seed, position, purpose), by two rounds of splitmix64.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"; constants of its mix13.
    """
    state = _mix(seeds + _wrap(_GOLDEN * (purpose + 1)))
    bits = _mix(state + _GOLDEN * (positions + 1))
    return _shift(bits, 11).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _wrap(value: int) -> int:
    """A Python integer as the signed 64-bit integer with the same low bits."""
    return (value + 2**63) % 2**64 - 2**63


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift; `>>` of a signed integer is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
