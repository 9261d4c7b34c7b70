"""Smaller chunks in code that reads a block through chunks.

transformers' own code of linear attention and Mamba 2 fills every call up to a whole chunk of 64 to 256 tokens, and
some of it loops over the tokens of a chunk. A block has fewer tokens. The result does not depend on the size of a chunk
except for rounding.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn

CHUNK = 16
"""Tokens of a chunk in forwards of blocks."""

NAME = "chunk_size"
"""The name of the size, in modules and in parameters of functions."""


class Chunked(NamedTuple):
    """An attribute of a module or of transformers' code, and its value with smaller chunks."""

    owner: Any
    name: str
    small: Any


def find_chunks(decoder: nn.Module) -> list[Chunked]:
    """Return the modules of a decoder, and the functions of their code, that have a size of chunks."""
    modules = [item for item in decoder.modules() if _is_large(getattr(item, NAME, None))]
    found = [Chunked(item, NAME, CHUNK) for item in modules]
    for code in {type(item).__module__ for item in decoder.modules()}:
        if not code.startswith("transformers.models."):
            continue
        owner = sys.modules[code]
        for name, function in vars(owner).items():
            if inspect.isfunction(function) and function.__module__ == code and _has_size(function):
                found.append(Chunked(owner, name, partial(function, **{NAME: CHUNK})))
    return found


def _has_size(function: Any) -> bool:
    size = inspect.signature(function).parameters.get(NAME)
    return size is not None and _is_large(size.default)


def _is_large(size: object) -> bool:
    return type(size) is int and size > CHUNK


@contextmanager
def small_chunks(chunks: Sequence[Chunked]) -> Iterator[None]:
    """Use smaller chunks inside the block."""
    usual = [getattr(item.owner, item.name) for item in chunks]
    try:
        for item in chunks:
            setattr(item.owner, item.name, item.small)
        yield
    finally:
        for item, value in zip(chunks, usual, strict=True):
            setattr(item.owner, item.name, value)
