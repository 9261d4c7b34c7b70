"""Faults in the recurrent states of a target with its own cache, planted between the steps of a request.

A pair whose text does not change under these faults cannot show that an engine forgets a state, or keeps the state of
rejected tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.models.hosting.cache_rows import copy_cache
from dflash_runtime.models.hosting.cache_state import TextState, put_state, take_state
from dflash_runtime.models.hosting.own_cache import Member, OwnCacheTarget, TextCache

RECURRENT, CONVOLUTION = "recurrent_states", "conv_states"

JOIN = OwnCacheTarget.join


def is_state(name: str) -> bool:
    """Whether a part of a cache, named by `take_state`, belongs to a recurrent layer."""
    return RECURRENT in name or CONVOLUTION in name


def change(cache: Any, new: Callable[[str, Tensor], Tensor]) -> None:
    """Replace each state tensor of a recurrent layer by `new(name, tensor)`."""
    state = take_state(cache)
    assert any(RECURRENT in name for name in state.tensors), "the cache has no recurrent state"
    tensors = {name: new(name, item) if is_state(name) else item for name, item in state.tensors.items()}
    assert put_state(cache, TextState(tensors, state.values)) is None


def zeroed(target: OwnCacheTarget, member: Member) -> TextCache:
    """Forget the recurrent states before each step. Keys, values and the inputs of convolutions stay."""
    text = _held(target, member)
    change(text.cache, lambda name, item: torch.zeros_like(item) if RECURRENT in name else item)
    return text


def not_rolled_back(target: OwnCacheTarget, member: Member) -> TextCache:
    """Keep the states of rejected tokens."""
    return _with_states_after(target, member, member.cache.tokens.shape[1])


def one_row_too_far(target: OwnCacheTarget, member: Member) -> TextCache:
    """Roll the states back by one accepted token more than the target rejected."""
    return _with_states_after(target, member, _num_kept(member) - 1)


def _with_states_after(target: OwnCacheTarget, member: Member, num_tokens: int) -> TextCache:
    """Give a text the states after the first `num_tokens` tokens that ran after its cache."""
    states = None
    if num_tokens > 0 and 0 < _num_kept(member) != num_tokens:
        before = JOIN(target, [member._replace(length=member.cache.lens[member.row])])
        tokens = member.cache.tokens[member.row : member.row + 1, :num_tokens]
        run = target._run(copy_cache(before.cache, target.layout), tokens, before.lens, ())
        states = take_state(run[2][-1][1]).tensors
    text = _held(target, member)
    if states is not None:
        found = states
        change(text.cache, lambda name, _: found[name])
    return text


def _num_kept(member: Member) -> int:
    """The number of tokens after the cache that the engine keeps. They run again, into the cache."""
    return member.length - member.cache.lens[member.row]


def _held(target: OwnCacheTarget, member: Member) -> TextCache:
    """Settle a step rightly, with all accepted tokens in a cache of the text alone."""
    text = JOIN(target, [member])
    text.cache = copy_cache(text.cache, target.layout)
    if text.pending[0]:
        target._hold(text, text.pending[0])
    return text


FAULTS: dict[str, Callable[[OwnCacheTarget, Member], TextCache]] = {
    "zeroed": zeroed,
    "not rolled back": not_rolled_back,
    "one row too far": one_row_too_far,
}


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    """Settle every step of targets with their own cache with a fault inside the block."""

    def join(self: OwnCacheTarget, members: Sequence[Member]) -> TextCache:
        if fault is not None:
            members = [Member(FAULTS[fault](self, member), 0, member.length) for member in members]
        return JOIN(self, members)

    OwnCacheTarget.join = join  # type: ignore[method-assign]
    try:
        yield
    finally:
        OwnCacheTarget.join = JOIN  # type: ignore[method-assign]
