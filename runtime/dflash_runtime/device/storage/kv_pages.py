"""Copy the KV of one request from its pages to a payload, and from a payload to pages; see `kv_transfer.handoff`.

Copies keep stream order: a payload has the rows of every step queued before, and every step queued later reads the
copied rows. Copies between device and host run on a separate stream, piece by piece, so that the device needs memory
for a few pieces instead of a whole payload. Nothing waits: `PagePorter.advance` starts and finishes as many pieces as
it can without waiting.

Axis letters: P pages, L layers, W numbers in a row's keys in the widest layer.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_runtime.device.storage.kv import KVCache
from dflash_runtime.device.storage.state import Uploader
from dflash_runtime.kv_transfer.handoff import TensorSpec
from dflash_runtime.models.placement import as_current

PIECE_BYTES = 64 * 2**20
"""Bytes per copy, rounded to whole pages: enough to use the link well, and copied in less time than a step takes."""

MAX_PIECES = 4
"""The most pieces of one request that are copied at the same time."""


@dataclass(slots=True)
class MovingPiece:
    """Pages `[begin, end)` of a request that are being copied, with their tensors on the device."""

    begin: int
    end: int
    tensors: Mapping[str, Tensor]
    event: torch.cuda.Event | None

    @property
    def is_ready(self) -> bool:
        """Whether the copy has finished. Does not wait."""
        return self.event is None or self.event.query()


@dataclass(slots=True)
class MovingPages:
    """A copy of a request's pages to `tensors`, or from `tensors` to its pages, in order.

    Pages `[first, num_done)` have been copied. `num_tokens` is set if pages are copied to `tensors`: rows after these
    tokens become zeros.
    """

    tensors: Mapping[str, Tensor]
    pages: Sequence[int]
    first: int = 0
    num_tokens: int | None = None
    num_begun: int = 0
    num_done: int = 0
    flying: deque[MovingPiece] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.num_begun = self.num_done = self.first

    @property
    def is_out(self) -> bool:
        """Whether pages are copied to `tensors`."""
        return self.num_tokens is not None


class PagePorter:
    """Copies pages of a runner's caches. `caches` maps the tensor names of payloads to caches."""

    def __init__(self, caches: Mapping[str, KVCache], device: torch.device, upload: Uploader) -> None:
        self._caches = caches
        self._device = device
        self._upload = upload
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        page_bytes = sum(cache.page_bytes for cache in caches.values())
        self._pages_at_a_time = max(1, PIECE_BYTES // max(1, page_bytes))

    def shapes(self, num_tokens: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors in a payload of `num_tokens` tokens."""
        return {name: _shape(cache, -(-num_tokens // cache.page_size)) for name, cache in self._caches.items()}

    def page_specs(self) -> dict[str, TensorSpec]:
        """The dtype and the shape of each tensor of one page, without the axis of pages."""
        return {name: TensorSpec.of(cache.pages[0]) for name, cache in self._caches.items()}

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of the pages in a payload of `num_tokens` tokens."""
        return sum(-(-num_tokens // cache.page_size) * cache.page_bytes for cache in self._caches.values())

    def begin_out(self, pages: Sequence[int], num_tokens: int, *, stays: bool = False) -> MovingPages:
        """Begin to copy the first `num_tokens` rows of these pages to the host, or with `stays` to the device.

        The pages must keep their content until `advance` returns True.
        """
        pages = pages[: max((shape[0] for shape in self.shapes(num_tokens).values()), default=0)]
        on_device = {"device": self._device} if stays else {"pin_memory": self._stream is not None}
        tensors = {
            name: torch.empty(_shape(cache, len(pages)), dtype=cache.pages.dtype, **on_device)
            for name, cache in self._caches.items()
        }
        return MovingPages(tensors, pages, num_tokens=num_tokens)

    def begin_in(self, tensors: Mapping[str, Tensor], pages: Sequence[int], first: int) -> MovingPages:
        """Begin to copy a payload's pages, from number `first` on, to the pages of a request.

        The request shares earlier pages with other requests. Zeros are stored for missing layers, for a missing tensor,
        and for one in FP8 if the pages are not, because the pages may hold rows of an earlier request.
        """
        fitting = {
            name: tensors[name]
            for name, cache in self._caches.items()
            if name in tensors
            and _but_layers(tensors[name].shape) == _but_layers(_shape(cache, len(pages)))
            and not _mixes(tensors[name].dtype, cache.pages.dtype)
        }
        return MovingPages(fitting, pages, first)

    @torch.inference_mode()
    def advance(self, moving: MovingPages, *, begins: bool = True) -> bool:
        """Continue a copy without waiting -> whether it is finished. Without `begins`, start no more pieces."""
        num_pages = len(moving.pages) if begins else moving.num_begun
        with as_current(self._device):
            self._land(moving)
            while len(moving.flying) < MAX_PIECES and moving.num_begun < num_pages:
                begin, end = moving.num_begun, min(moving.num_begun + self._pages_at_a_time, num_pages)
                move = self._take if moving.is_out else self._fetch
                moving.flying.append(move(moving, begin, end))
                moving.num_begun = end
                if self._stream is None:
                    self._land(moving)
        return moving.num_done == num_pages

    def pin(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors in pinned memory. Takes as long as a copy, and may run in any thread."""
        if self._stream is None:
            return tensors
        with as_current(self._device):  # a thread of a connector begins with the first GPU as its current device
            return {name: _pinned(tensor) for name, tensor in tensors.items()}

    def _land(self, moving: MovingPages) -> None:
        """Count the copied pieces, oldest first. Pieces from a payload are now stored in their pages."""
        while moving.flying and moving.flying[0].is_ready:
            piece = moving.flying.popleft()
            if not moving.is_out:
                self._put(piece, moving.pages)
            moving.num_done = piece.end

    def _take(self, moving: MovingPages, begin: int, end: int) -> MovingPiece:
        """Read pages after all queued steps, and start to copy them to their destination."""
        taken = {}
        columns = self._upload.ints(moving.pages[begin:end])
        for name, cache in self._caches.items():
            rows = as_movable(cache.pages).index_select(0, columns).view(cache.pages.dtype)
            assert moving.num_tokens is not None
            num_last = moving.num_tokens - (end - 1) * cache.page_size
            if num_last < cache.page_size:
                as_movable(rows)[-1, :, :, num_last:] = 0
            taken[name] = rows
        return self._send(moving, MovingPiece(begin, end, taken, None))

    def _send(self, moving: MovingPages, piece: MovingPiece) -> MovingPiece:
        """Start to copy a piece to its destination."""
        rows = {name: tensor[piece.begin : piece.end] for name, tensor in moving.tensors.items()}
        if self._stream is None or any(item.is_cuda for item in rows.values()):
            for name, tensor in piece.tensors.items():
                rows[name].copy_(tensor)
            piece.event = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
            return piece
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, tensor in piece.tensors.items():
                rows[name].copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
        piece.event = self._stream.record_event()
        return piece

    def _fetch(self, moving: MovingPages, begin: int, end: int) -> MovingPiece:
        """Start to copy pages of a payload from pinned memory to the device."""
        rows = {name: tensor[begin:end] for name, tensor in moving.tensors.items()}
        if self._stream is None:
            return MovingPiece(begin, end, rows, None)
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.to(self._device, non_blocking=True) for name, tensor in rows.items()}
        for tensor in copies.values():
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return MovingPiece(begin, end, copies, self._stream.record_event())

    def _put(self, piece: MovingPiece, pages: Sequence[int]) -> None:
        """Store a piece in its pages."""
        columns = self._upload.ints(pages[piece.begin : piece.end])
        for name, cache in self._caches.items():
            rows = piece.tensors.get(name)
            num_layers = 0 if rows is None else min(rows.shape[1], cache.pages.shape[1])
            stored = as_movable(cache.pages)
            if num_layers < stored.shape[1]:
                stored.index_fill_(0, columns, 0)
            if rows is not None and num_layers:
                fitting = as_movable(rows[:, :num_layers].to(cache.pages.dtype))
                stored[:, :num_layers].index_copy_(0, columns, fitting)


def as_movable(rows: Tensor) -> Tensor:
    """The same memory in a dtype that torch can index and fill: bytes instead of FP8."""
    return rows.view(torch.uint8) if rows.itemsize == 1 else rows


def _mixes(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether one of two dtypes is FP8: its numbers mean nothing without scales."""
    return one != other and 1 in (one.itemsize, other.itemsize)


def _but_layers(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0], *shape[2:])


def _shape(cache: KVCache, num_pages: int) -> tuple[int, ...]:
    return num_pages, *cache.pages.shape[1:]


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
