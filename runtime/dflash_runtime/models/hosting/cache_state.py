"""Turn the state of one text in a cache of transformers into named tensors and plain values, and back.

This works for any class of cache: a state is every tensor, number, string and boolean that can be reached from the
cache object. To restore a state, the model makes a cache of a single token, and each part of it is replaced. A part may
be None in a short text and a tensor in a longer one. A part that only one side has is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.kv_transfer.handoff import STATE

PLAIN = (bool, int, float, str, type(None))

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class TextState:
    """The tensors and plain values of a cache by name. Names of tensors begin with STATE."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def take_state(cache: Any) -> TextState:
    """Return a copy of every tensor of a cache, and every plain value."""
    tensors, values = {}, {}
    for path, value in leaves(cache):
        if isinstance(value, Tensor):
            tensors[STATE + name_of(path)] = value.clone(memory_format=torch.contiguous_format)
        else:
            values[name_of(path)] = value
    return TextState(tensors, values)


def put_state(cache: Any, state: TextState) -> str | None:
    """Replace every part of a cache, and return None.

    If a part does not fit, return the reason. The cache is then unusable.
    """
    tensors = {name.removeprefix(STATE): item for name, item in state.tensors.items() if name.startswith(STATE)}
    found = list(leaves(cache))
    device = next((value.device for _, value in found if isinstance(value, Tensor)), None)
    for path, value in found:
        name = name_of(path)
        is_tensor = isinstance(value, Tensor) or (value is None and name in tensors)
        given = tensors.pop(name, None) if is_tensor else state.values.get(name, ...)
        if given is ... or (given is None and is_tensor and state.values.get(name, ...) is not None):
            return f"{name} is missing"
        if isinstance(given, Tensor):
            if isinstance(value, Tensor) and (given.dtype != value.dtype or given.ndim != value.ndim):
                return f"{name} is {given.dtype} of {given.ndim} axes, expected {value.dtype} of {value.ndim}"
            given = given.to(device)
        _replace(cache, path, given)
    return f"{next(iter(tensors))} is unknown to this target" if tensors else None


def leaves(item: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every tensor and plain value of a cache, with its path."""
    if isinstance(item, Tensor | bool | int | float | str | None):
        yield path, item
        return
    for key, value in parts(item):
        yield from leaves(value, (*path, key))


def parts(item: Any) -> Iterator[tuple[str | int, Any]]:
    """Yield the parts of a container, cache or cache layer, by attribute, key or index. Other objects have none."""
    if isinstance(item, dict):
        yield from ((key, value) for key, value in item.items() if isinstance(key, str | int))
    elif isinstance(item, list | tuple):
        yield from enumerate(item)
    elif "cache" in type(item).__name__.lower() or "layer" in type(item).__name__.lower():
        yield from vars(item).items()


def _replace(cache: Any, path: Path, value: Any) -> None:
    owner = cache
    for key in path[:-1]:
        owner = _part(owner, key)
    key = path[-1]
    if isinstance(owner, dict | list):
        owner[key] = value  # type: ignore[index]
    else:
        setattr(owner, str(key), value)


def _part(owner: Any, key: str | int) -> Any:
    return owner[key] if isinstance(owner, dict | list | tuple) else getattr(owner, str(key))  # type: ignore[index]


def name_of(path: Path) -> str:
    """Return a path as one word."""
    return ".".join(map(str, path))
