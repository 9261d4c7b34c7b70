"""KV of one request out of its pages and into pages, as a payload has it; see `kv_transfer.handoff`.

Taking and putting are queued in stream order: what is taken is what every step queued before has written, and what is
put is there for every step queued after. Copies between device and host run on a stream of their own meanwhile, and
nobody waits for them: `is_ready` is asked.

Axis letters: P pages, L layers, W numbers of a row's keys in the layer that has most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_runtime.device.kv import KVCache


@dataclass(frozen=True, slots=True)
class Copied:
    """Tensors on their way between host and device."""

    tensors: Mapping[str, Tensor]
    event: torch.cuda.Event | None = None

    @property
    def is_ready(self) -> bool:
        """Whether they are there; never waits."""
        return self.event is None or self.event.query()


class PagePorter:
    """Moves the pages of a runner's caches, each under the name that payloads have for it."""

    def __init__(self, caches: Mapping[str, KVCache], device: torch.device) -> None:
        self._caches = caches
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def shapes(self, num_tokens: int) -> dict[str, tuple[int, ...]]:
        """The shape each tensor of a payload of so many tokens has."""
        return {name: _shape(cache, -(-num_tokens // cache.page_size)) for name, cache in self._caches.items()}

    def take(self, pages: Sequence[int], num_tokens: int) -> dict[str, Tensor]:
        """The first `num_tokens` rows in these pages, [P, L, 2, page_size, W]; what lies past them becomes zeros."""
        return {name: self._take(cache, pages, num_tokens) for name, cache in self._caches.items()}

    def put(self, tensors: Mapping[str, Tensor], pages: Sequence[int], first: int) -> None:
        """Store a payload's pages from column `first` on in a request's; the columns before are another's.

        Where a tensor is missing, or is of fewer layers, zeros are stored: nothing of who had the page before.
        """
        columns = torch.tensor(pages[first:], device=self._device)
        if not len(columns):
            return
        for name, cache in self._caches.items():
            self._put(cache, tensors.get(name), columns, first)

    def left_here(self, tensors: Mapping[str, Tensor]) -> Copied:
        """Leave on the device what was taken; ready once it is written."""
        return Copied(tensors, None if self._stream is None else torch.cuda.current_stream(self._device).record_event())

    def to_host(self, tensors: Mapping[str, Tensor]) -> Copied:
        """Copy to the host what was taken."""
        if self._stream is None:
            return Copied(tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = {name: _to_pinned(tensor) for name, tensor in tensors.items()}
            for tensor in tensors.values():
                tensor.record_stream(self._stream)
        return Copied(copies, self._stream.record_event())

    def pin(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Put tensors where the device can copy them from by itself. Takes as long as copying them; for any thread."""
        return tensors if self._stream is None else {name: _pinned(tensor) for name, tensor in tensors.items()}

    def to_device(self, tensors: Mapping[str, Tensor]) -> Copied:
        """Copy to the device what is to be put, from pinned memory."""
        if self._stream is None:
            return Copied(tensors)
        with torch.cuda.stream(self._stream):
            copies = {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
        current = torch.cuda.current_stream(self._device)
        for tensor in copies.values():
            tensor.record_stream(current)
        return Copied(copies, self._stream.record_event())

    def _take(self, cache: KVCache, pages: Sequence[int], num_tokens: int) -> Tensor:
        size = cache.page_size
        used = pages[: -(-num_tokens // size)]
        taken = cache.keys.new_zeros(_shape(cache, len(used)))
        columns = torch.tensor(used, device=self._device)
        for index, whole in enumerate((cache.keys, cache.values)):
            taken[:, :, index] = _by_page(whole, size)[:, columns].transpose(0, 1)
        if num_tokens % size:
            taken[-1, :, :, num_tokens % size :] = 0
        return taken

    def _put(self, cache: KVCache, tensor: Tensor | None, columns: Tensor, first: int) -> None:
        shape = _shape(cache, len(columns))
        rows = tensor[first : first + len(columns)] if tensor is not None and tensor.ndim == len(shape) else None
        num_layers = (
            0 if rows is None or _but_layers(rows.shape) != _but_layers(shape) else min(rows.shape[1], shape[1])
        )
        for index, whole in enumerate((cache.keys, cache.values)):
            by_page = _by_page(whole, cache.page_size)
            if num_layers < shape[1]:
                by_page[:, columns] = 0
            if rows is not None and num_layers:
                by_page[:num_layers, columns] = rows[:, :num_layers, index].transpose(0, 1).to(whole.dtype)


def _but_layers(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[0], *shape[2:])


def _shape(cache: KVCache, num_pages: int) -> tuple[int, ...]:
    num_layers, _, *row = cache.keys.shape
    return num_pages, num_layers, 2, cache.page_size, torch.Size(row).numel()


def _by_page(whole: Tensor, page_size: int) -> Tensor:
    """[L, S, KV, D] -> the same memory as [L, P, page_size, W]."""
    return whole.view(len(whole), -1, page_size, whole.shape[2:].numel())


def _to_pinned(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return copy


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
