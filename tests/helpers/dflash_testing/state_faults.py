"""Faults in the recurrent states of a target with its own cache, planted between the steps of a request.

A pair whose text does not change under these faults cannot show that an engine forgets a state, or keeps the state of
rejected tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.models.cache_state import TextState, put_state, take_state
from dflash_runtime.models.own_cache import OwnCacheTarget, TextCache, copy_cache

RECURRENT, CONVOLUTION = "recurrent_states", "conv_states"

Settle = Callable[[OwnCacheTarget, TextCache, int], None]


def is_state(name: str) -> bool:
    """Whether a part of a cache, named by `take_state`, belongs to a recurrent layer."""
    return RECURRENT in name or CONVOLUTION in name


def change(cache: Any, new: Callable[[str, Tensor], Tensor]) -> None:
    """Replace each state tensor of a recurrent layer by `new(name, tensor)`."""
    state = take_state(cache)
    assert any(RECURRENT in name for name in state.tensors), "the cache has no recurrent state"
    tensors = {name: new(name, item) if is_state(name) else item for name, item in state.tensors.items()}
    assert put_state(cache, TextState(tensors, state.values)) is None


def _kept(target: OwnCacheTarget, text: TextCache, start: int) -> int:
    """The number of tokens after the cache that the engine keeps. They run again, into the cache."""
    return start - text.cached_len


def zeroed(target: OwnCacheTarget, text: TextCache, start: int) -> None:
    """Forget the recurrent states before each step. Keys, values and the inputs of convolutions stay."""
    _hold(target, text, start)
    change(text.cache, lambda name, item: torch.zeros_like(item) if RECURRENT in name else item)


def not_rolled_back(target: OwnCacheTarget, text: TextCache, start: int) -> None:
    """Keep the states of rejected tokens."""
    block = text.tokens
    kept = _kept(target, text, start)
    polluted = None
    if kept < len(block):
        polluted = target._run(copy_cache(text.cache), block, text.cached_len, ())[2]
    _hold(target, text, start)
    if polluted is not None:
        states = take_state(polluted).tensors
        change(text.cache, lambda name, _: states[name])


def one_row_too_far(target: OwnCacheTarget, text: TextCache, start: int) -> None:
    """Roll the states back by one accepted token more than the target rejected."""
    kept = _kept(target, text, start)
    states = None
    if 1 < kept < len(text.tokens):
        short = target._run(copy_cache(text.cache), text.tokens[: kept - 1], text.cached_len, ())[2]
        states = take_state(short).tensors
    _hold(target, text, start)
    if states is not None:
        found = states
        change(text.cache, lambda name, _: found[name])


def _hold(target: OwnCacheTarget, text: TextCache, start: int) -> None:
    """Settle a step rightly, with all accepted tokens in the cache."""
    kept = _kept(target, text, start)
    if text.ahead is not None and kept == len(text.tokens):
        text.hold(text.ahead, start)
    elif kept:
        text.hold(target._run(text.cache, text.tokens[:kept], text.cached_len, ())[2], start)
    else:
        text.tokens, text.ahead = text.tokens[:0], None


FAULTS: dict[str, Settle] = {
    "zeroed": zeroed,
    "not rolled back": not_rolled_back,
    "one row too far": one_row_too_far,
}


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Settle every step of targets with their own cache with a fault inside the block."""
    right = OwnCacheTarget._settle

    def settle(self: OwnCacheTarget, text: TextCache, start: int) -> None:
        if fault is None or text.cache is None:
            right(self, text, start)
        else:
            FAULTS[fault](self, text, start)

    OwnCacheTarget._settle = settle  # type: ignore[method-assign]
    try:
        yield
    finally:
        OwnCacheTarget._settle = right  # type: ignore[method-assign]
