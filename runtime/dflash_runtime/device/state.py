"""The state of each batch row on the device, which steps read and write without waiting for the host.

A request holds one row from admission to its end. The host writes a row when a request is admitted, when pages are
added and when the request is switched on, for all requests of a step together; every step writes lengths, anchor and
done flag. All of that happens in
stream order, so a row may be given to a new request while steps of the old one are still queued: those steps find
the row done, and their results carry the old generation number.

Axis letters: B rows of the state, R rows in a step, P pages, S stop ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.step_rows import RowState
from dflash_runtime.scheduling.batch import PageAddition
from dflash_runtime.scheduling.request import MAX_STOP_IDS, Request


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Tensors over all rows, [B] unless said otherwise."""

    kv_lens: Tensor
    anchors: Tensor
    remaining: Tensor  # tokens that may still be committed
    done: Tensor  # bool; a row without a running request is done
    generations: Tensor
    reserved_lens: Tensor  # first position that no page is reserved for
    widths: Tensor  # rows of a block to verify, the anchor included
    temperatures: Tensor  # float64
    top_ks: Tensor
    top_ps: Tensor  # float64
    seeds: Tensor
    stop_ids: Tensor  # [B, S], -1 where unused
    page_table: Tensor  # [B, P], 0 where no page is owned

    @classmethod
    def empty(cls, num_rows: int, max_pages: int, device: torch.device) -> "DeviceState":
        def ints(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        def floats() -> Tensor:
            return torch.zeros(num_rows, dtype=torch.float64, device=device)

        return cls(
            kv_lens=ints(num_rows),
            anchors=ints(num_rows),
            remaining=ints(num_rows),
            done=torch.ones(num_rows, dtype=torch.bool, device=device),
            generations=ints(num_rows),
            reserved_lens=ints(num_rows),
            widths=ints(num_rows),
            temperatures=floats(),
            top_ks=ints(num_rows),
            top_ps=floats(),
            seeds=ints(num_rows),
            stop_ids=ints(num_rows, MAX_STOP_IDS, fill=-1),
            page_table=ints(num_rows, max_pages),
        )

    @property
    def row_state(self) -> RowState:
        """What the two ends of a decode step read and write."""
        return RowState(
            done=self.done,
            kv_lens=self.kv_lens,
            anchors=self.anchors,
            remaining=self.remaining,
            reserved_lens=self.reserved_lens,
            widths=self.widths,
            generations=self.generations,
            stop_ids=self.stop_ids,
            page_table=self.page_table,
        )

    def admit(
        self,
        requests: Sequence[Request],
        additions: Sequence[PageAddition],
        full_width: int,
        page_size: int,
        upload: "Uploader",
    ) -> None:
        """Give rows to requests and pages to rows; a row stays done until `activate`.

        A row begins without pages: those of the request itself are among the additions. Whatever their number, the
        device is asked as often, since every field is written for all rows at once.
        """
        if not (requests or additions):
            return
        cells = [(item.row, item.column + index, page) for item in additions for index, page in enumerate(item.pages)]
        # One entry a row: writing an index twice in one call has no defined order on a GPU.
        reserved = {item.row: (item.column + len(item.pages)) * page_size for item in additions if item.pages}
        rows, fields, stops, cell, reserved_rows, lens = upload.lists(
            [_row(request) for request in requests],
            [value for request in requests for value in _int_fields(request, full_width)],
            [stop for request in requests for stop in _stops(request)],
            [value for column in zip(*cells, strict=True) for value in column],
            list(reserved),
            list(reserved.values()),
        )
        if requests:
            self._begin(rows, fields.view(len(requests), -1), stops.view(len(requests), -1))
            floats = upload.floats(
                [value for item in requests for value in (item.params.temperature, item.params.top_p)]
            )
            self.temperatures[rows], self.top_ps[rows] = floats.view(-1, 2).unbind(1)
        if cells:
            cell_rows, columns, pages = cell.view(3, -1)
            self.page_table[cell_rows, columns] = pages
            self.reserved_lens[reserved_rows] = lens

    def _begin(self, rows: Tensor, fields: Tensor, stops: Tensor) -> None:
        """Write what does not change while requests hold rows [R]: `_int_fields` [R, ...] and stop ids [R, S]."""
        self.generations[rows], self.widths[rows], self.top_ks[rows], self.seeds[rows] = fields.unbind(1)
        self.stop_ids[rows] = stops
        self.done.index_fill_(0, rows, True)
        self.page_table.index_fill_(0, rows, 0)
        self.reserved_lens.index_fill_(0, rows, 0)

    def activate(self, rows: Tensor, kv_lens: Tensor, anchors: Tensor, remaining: Tensor, done: Tensor) -> None:
        """Switch rows [R] on after their prefill; everything is [R]."""
        self.kv_lens[rows] = kv_lens
        self.anchors[rows] = anchors
        self.remaining[rows] = remaining
        self.done[rows] = done


def _row(request: Request) -> int:
    assert request.row is not None
    return request.row


def _int_fields(request: Request, full_width: int) -> tuple[int, int, int, int]:
    """Generation, width, top-k and seed."""
    width = min(request.params.verify_width or full_width, full_width)
    return request.generation, width, request.params.top_k, request.seed


def _stops(request: Request) -> list[int]:
    """Its stop ids, filled up with -1."""
    stops = request.params.effective_stops
    return [*stops, *[-1] * (MAX_STOP_IDS - len(stops))]


class Uploader:
    """Host lists to device tensors without waiting.

    Each upload has pinned memory of its own; torch's allocator hands it out again only after the copy has run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def ints(self, values: Sequence[int]) -> Tensor:
        return self._send(torch.tensor(values, dtype=torch.int64, pin_memory=self._is_cuda))

    def over(self, tensor: Tensor, values: Sequence[int]) -> None:
        """Integers in place of those of a tensor [N], behind what is queued that reads them."""
        tensor.copy_(torch.tensor(values, dtype=torch.int64, pin_memory=self._is_cuda), non_blocking=True)

    def lists(self, *lists: Sequence[int]) -> list[Tensor]:
        """Several lists in one copy.

        Each begins at a multiple of 16 bytes, so that a kernel that is given one finds every pointer as aligned as the
        ones it was compiled for.
        """
        sizes = [len(values) + len(values) % 2 for values in lists]
        flat = self.ints([value for values in lists for value in (*values, *[0] * (len(values) % 2))])
        return [part[: len(values)] for part, values in zip(flat.split(sizes), lists, strict=True)]

    def floats(self, values: Sequence[float]) -> Tensor:
        return self._send(torch.tensor(values, dtype=torch.float64, pin_memory=self._is_cuda))

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
