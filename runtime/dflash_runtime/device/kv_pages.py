"""KV of one request out of its pages and into pages, as a payload has it; see `kv_transfer.handoff`.

What is taken or put is so in stream order: what is taken is what every step queued before has written, and what is put
is there for every step queued after. Copies between device and host run on a stream of their own, piece by piece, so
that the device needs room for a few pieces and not for a payload. Nobody waits: `PagePorter.advance` does what can be
done.

Axis letters: P pages, L layers, W numbers of a row's keys in the layer that has most.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_runtime.device.kv import KVCache
from dflash_runtime.device.state import Uploader
from dflash_runtime.models.placement import as_current

PIECE_BYTES = 64 * 2**20
"""What is copied at a time, in whole pages: long enough for the link, short beside a step."""

MAX_PIECES = 4
"""Pieces of one request that are on their way at a time."""


@dataclass(slots=True)
class MovingPiece:
    """Columns `[begin, end)` of a request's pages on their way, and what the device holds of them meanwhile."""

    begin: int
    end: int
    tensors: Mapping[str, Tensor]
    event: torch.cuda.Event | None

    @property
    def is_ready(self) -> bool:
        """Whether the copy has run; never waits."""
        return self.event is None or self.event.query()


@dataclass(slots=True)
class MovingPages:
    """Pages of a request on their way out of its KV into `tensors`, or from there into its KV; in order.

    Columns `[first, num_done)` have been moved. `num_tokens` is set on the way out: rows past them become zeros.
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
        return self.num_tokens is not None


class PagePorter:
    """Moves the pages of a runner's caches, each under the name that payloads have for it."""

    def __init__(self, caches: Mapping[str, KVCache], device: torch.device, upload: Uploader) -> None:
        self._caches = caches
        self._device = device
        self._upload = upload
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        page_bytes = sum(cache.page_bytes for cache in caches.values())
        self._pages_at_a_time = max(1, PIECE_BYTES // max(1, page_bytes))

    def shapes(self, num_tokens: int) -> dict[str, tuple[int, ...]]:
        """The shape each tensor of a payload of so many tokens has."""
        return {name: _shape(cache, -(-num_tokens // cache.page_size)) for name, cache in self._caches.items()}

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a payload's pages of so many tokens."""
        return sum(-(-num_tokens // cache.page_size) * cache.page_bytes for cache in self._caches.values())

    def begin_out(self, pages: Sequence[int], num_tokens: int, *, stays: bool = False) -> MovingPages:
        """Begin to take the first `num_tokens` rows in these pages, which hold them until `advance` says it is done.

        They go to the host, or where `stays` is set to other memory of the device.
        """
        pages = pages[: max((shape[0] for shape in self.shapes(num_tokens).values()), default=0)]
        on_device = {"device": self._device} if stays else {"pin_memory": self._stream is not None}
        tensors = {
            name: torch.empty(_shape(cache, len(pages)), dtype=cache.pages.dtype, **on_device)
            for name, cache in self._caches.items()
        }
        return MovingPages(tensors, pages, num_tokens=num_tokens)

    def begin_in(self, tensors: Mapping[str, Tensor], pages: Sequence[int], first: int) -> MovingPages:
        """Begin to put a payload's pages from column `first` on into a request's; those before are another's.

        Where a tensor is missing, or is of fewer layers, zeros are stored: nothing of who had the page before.
        """
        fitting = {
            name: tensors[name]
            for name, cache in self._caches.items()
            if name in tensors and _but_layers(tensors[name].shape) == _but_layers(_shape(cache, len(pages)))
        }
        return MovingPages(fitting, pages, first)

    @torch.inference_mode()
    def advance(self, moving: MovingPages, *, begins: bool = True) -> bool:
        """Do what can be done of a move without waiting; whether it is done, as far as it `begins` anything more."""
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
        """Put tensors where the device can copy them from by itself. Takes as long as copying them; for any thread."""
        return tensors if self._stream is None else {name: _pinned(tensor) for name, tensor in tensors.items()}

    def _land(self, moving: MovingPages) -> None:
        """Note the pieces that have come, oldest first; on the way in they are put into their pages now."""
        while moving.flying and moving.flying[0].is_ready:
            piece = moving.flying.popleft()
            if not moving.is_out:
                self._put(piece, moving.pages)
            moving.num_done = piece.end

    def _take(self, moving: MovingPages, begin: int, end: int) -> MovingPiece:
        """Columns out of their pages, behind all steps that are queued, and towards where they go."""
        taken = {}
        columns = self._upload.ints(moving.pages[begin:end])
        for name, cache in self._caches.items():
            rows = cache.pages.index_select(0, columns)
            assert moving.num_tokens is not None
            num_last = moving.num_tokens - (end - 1) * cache.page_size
            if num_last < cache.page_size:
                rows[-1, :, :, num_last:] = 0
            taken[name] = rows
        return self._send(moving, MovingPiece(begin, end, taken, None))

    def _send(self, moving: MovingPages, piece: MovingPiece) -> MovingPiece:
        """Copy a piece that was taken to where the move goes."""
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
        """Columns of a payload on their way to the device, from pinned memory."""
        rows = {name: tensor[begin:end] for name, tensor in moving.tensors.items()}
        if self._stream is None:
            return MovingPiece(begin, end, rows, None)
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.to(self._device, non_blocking=True) for name, tensor in rows.items()}
        for tensor in copies.values():
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return MovingPiece(begin, end, copies, self._stream.record_event())

    def _put(self, piece: MovingPiece, pages: Sequence[int]) -> None:
        columns = self._upload.ints(pages[piece.begin : piece.end])
        for name, cache in self._caches.items():
            rows = piece.tensors.get(name)
            num_layers = 0 if rows is None else min(rows.shape[1], cache.pages.shape[1])
            if num_layers < cache.pages.shape[1]:
                cache.pages.index_fill_(0, columns, 0)
            if rows is not None and num_layers:
                cache.pages[:, :num_layers].index_copy_(0, columns, rows[:, :num_layers].to(cache.pages.dtype))


def _but_layers(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0], *shape[2:])


def _shape(cache: KVCache, num_pages: int) -> tuple[int, ...]:
    return num_pages, *cache.pages.shape[1:]


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
