"""Rows of transformers' caches: the texts of several caches as rows of one cache, and back.

This works for any class of cache. A layout says which parts have one slice per token, and along which axis. Other
tensors are states, with a row for each text. Rows of different lengths are padded on the left, as transformers'
`generate` pads them.

Axis letters: B rows, T tokens, W rows of a block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dflash_runtime.models.hosting.cache_state import Path, leaves, name_of, parts

Change = Callable[[Path, Any, Any], Any]
"""The path of a part, its value and its owner -> its new value."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """How the tokens of a text lie in a cache.

    grown     the tensors that have one slice per token, with the axis of tokens
    counts    the numbers of tokens
    problem   the first part that rows cannot share, or None
    """

    grown: Mapping[Path, int] = field(default_factory=dict)
    counts: frozenset[Path] = frozenset()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One row of a cache, of `num_rows` rows in all. It holds `length` tokens, and after them `num_rejected` others."""

    cache: Any
    row: int
    num_rows: int
    length: int
    num_rejected: int = 0


def find_layout(few: Any, many: Any, lens: tuple[int, int]) -> CacheLayout:
    """Compare the caches of two texts of these lengths, each of one row -> the layout of both."""
    grown, counts, others = {}, set(), dict(leaves(few))
    for path, value in leaves(many):
        other = others.get(path)
        if isinstance(value, Tensor) and isinstance(other, Tensor) and value.dim() == other.dim():
            axes = [axis for axis, sizes in enumerate(zip(value.shape, other.shape, strict=True)) if len({*sizes}) > 1]
            if value.dim() and (len(value) != 1 or len(axes) > 1):
                return CacheLayout(problem=name_of(path))
            if axes:
                grown[path] = axes[0]
        elif type(value) is int and value != other and (other, value) == lens:
            counts.add(path)
        elif isinstance(value, Tensor) or value != other:
            return CacheLayout(problem=name_of(path))
    return CacheLayout(grown, frozenset(counts))


def copy_cache(cache: Any, layout: CacheLayout) -> Any:
    """Return a copy of a cache, so that running on the copy does not change the original.

    Both share the tensors that a layer of transformers replaces whenever it adds tokens.
    """
    from transformers.cache_utils import DynamicLayer

    def change(path: Path, value: Any, owner: Any) -> Any:
        is_shared = isinstance(owner, DynamicLayer) and (path in layout.grown or path[-1] in ("keys", "values"))
        return value.clone() if isinstance(value, Tensor) and not is_shared else value

    return rebuild_cache(cache, change)


def gather_rows(rows: Sequence[CacheRow], layout: CacheLayout) -> Any:
    """Return a cache that consists of these rows [B].

    The result is the rows' own cache if that has the same rows. Otherwise it shares no state with their caches.
    """
    first, length = rows[0], max(row.length for row in rows)
    is_whole = [row.row for row in rows] == list(range(first.num_rows))
    if is_whole and all(row.cache is first.cache and not row.num_rejected for row in rows):
        return first.cache
    found = {id(row.cache): row.cache for row in rows}
    by_path = {key: dict(leaves(cache)) for key, cache in found.items()}

    def change(path: Path, value: Any, owner: Any) -> Any:
        if path in layout.counts:
            return length
        if not isinstance(value, Tensor) or not value.dim():
            return value
        given = [by_path[id(row.cache)][path][row.row : row.row + 1] for row in rows]
        axis = layout.grown.get(path)
        if axis is None:
            return torch.cat(given)
        given = [_latest(part, axis, row) for part, row in zip(given, rows, strict=True)]
        size = max(part.shape[axis] for part in given)
        padded = [_padded(part, axis, size) for part in given]
        return padded[0] if len(padded) == 1 else torch.cat(padded)

    return rebuild_cache(first.cache, change)


def _latest(part: Tensor, axis: int, row: CacheRow) -> Tensor:
    """The slices of a row's own tokens, without padding and rejected tokens."""
    size = part.shape[axis] - row.num_rejected
    num_kept = min(size, row.length)
    return part.narrow(axis, size - num_kept, num_kept)


def _padded(part: Tensor, axis: int, size: int) -> Tensor:
    missing = size - part.shape[axis]
    return pad(part, (0, 0) * (part.dim() - 1 - axis) + (missing, 0)) if missing else part


def append_blocks(tokens: Tensor, pending: Sequence[int], blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Put blocks [B, W] behind the first pending tokens of each row -> tokens [B, T], and the columns of blocks [B, W].

    The last token of a block fills its row up.
    """
    first, width = tokens.shape[1], blocks.shape[1]
    starts = torch.tensor(pending).to(tokens.device)[:, None]
    columns = torch.arange(max(pending) + width, device=tokens.device)
    behind = (first + columns - starts).clamp(max=first + width - 1)
    places = torch.where(columns < starts, columns, behind)
    return torch.cat((tokens, blocks), dim=1).gather(1, places), starts + columns[:width]


def take_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Rows [B, T, N] and columns [B, W] -> [B, W, N]."""
    return rows.gather(1, columns[..., None].expand(-1, -1, rows.shape[2]))


def rebuild_cache(
    item: Any, change: Change, path: Path = (), owner: Any = None, seen: dict[int, Any] | None = None
) -> Any:
    """Return a copy of a cache with every tensor and number changed. A part that occurs twice stays one part."""
    seen = {} if seen is None else seen
    if isinstance(item, Tensor) or type(item) is int:
        return _once(seen, item, lambda: change(path, item, owner))
    if isinstance(item, dict):
        return _once(
            seen,
            item,
            lambda: {key: rebuild_cache(value, change, (*path, key), owner, seen) for key, value in item.items()},
        )
    if isinstance(item, list | tuple):
        return _once(
            seen, item,
            lambda: type(item)(
                rebuild_cache(value, change, (*path, key), owner, seen) for key, value in enumerate(item)
            ),
        )  # fmt: skip
    held = dict(parts(item))
    if not held:
        return item
    if id(item) not in seen:
        seen[id(item)] = new = object.__new__(type(item))
        vars(new).update({key: rebuild_cache(value, change, (*path, key), item, seen) for key, value in held.items()})
    return seen[id(item)]


def _once(seen: dict[int, Any], item: Any, make: Callable[[], Any]) -> Any:
    if isinstance(item, int):
        return make()
    if id(item) not in seen:
        seen[id(item)] = make()
    return seen[id(item)]
