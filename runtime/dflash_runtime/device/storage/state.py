"""The device state of requests, one row each. Steps read and write it without waiting for the host.

A request holds one row from admission to its end. The host writes rows when requests are admitted, gain pages or are
switched on, once per step for all requests. Every step writes lengths, anchors and done flags. All writes happen in
stream order, so a row may go to a new request while steps of the old request are queued. These steps find the row done,
and their results have the old generation number.

Axis letters: B rows of the state, R rows in a step, P pages, S stop ids.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import pack, unpack

import torch
from torch import Tensor

from dflash_kernels.steps.row_changes import NUM_CHANGE_FIELDS, HeldRows
from dflash_kernels.steps.step_rows import RowState
from dflash_kernels.suite import Kernels
from dflash_runtime.scheduling.batch import PageAddition
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import MAX_STOP_IDS

_NO_FIELDS = [0] * (NUM_CHANGE_FIELDS - 5 + MAX_STOP_IDS)


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Tensors over all rows, [B] unless another shape is given."""

    kv_lens: Tensor
    anchors: Tensor
    remaining: Tensor  # tokens that may still be committed
    done: Tensor  # bool; a row without a running request is done
    generations: Tensor
    reserved_lens: Tensor  # first position without a reserved page
    widths: Tensor  # rows of a block to verify, including the anchor
    temperatures: Tensor  # float64
    top_ks: Tensor
    top_ps: Tensor  # float64
    seeds: Tensor
    stop_ids: Tensor  # [B, S], -1 where unused
    page_table: Tensor  # [B, P], 0 without a page
    kernels: Kernels

    @classmethod
    def empty(cls, num_rows: int, max_pages: int, kernels: Kernels, device: torch.device) -> "DeviceState":
        """A state of `num_rows` rows without requests."""

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
            kernels=kernels,
        )

    @property
    def row_state(self) -> RowState:
        """The tensors that a decode step reads and writes."""
        return RowState(*(getattr(self, name) for name in RowState._fields))

    @property
    def held_rows(self) -> HeldRows:
        """The tensors that change when rows are given to requests."""
        return HeldRows(*(getattr(self, name) for name in HeldRows._fields))

    def admit(
        self,
        requests: Sequence[Request],
        additions: Sequence[PageAddition],
        full_width: int,
        page_size: int,
        upload: "Uploader",
    ) -> None:
        """Give rows to requests and pages to rows, in one copy and one launch.

        A row stays done until it is switched on. A new row starts without pages; its pages are among the additions.
        """
        if not (requests or additions):
            return
        gains = _gains(additions)
        given = {row_of(request): request for request in requests}
        changes, pages = list[int](), list[int]()
        for row in dict.fromkeys((*given, *gains)):
            column, gained = gains.get(row, (0, []))
            fields = _fields(given[row], full_width) if row in given else _NO_FIELDS
            changes += (row, row in given, column, len(gained), len(pages), *fields)
            pages += gained
        sent, sent_pages = upload.lists(changes, pages)
        width = NUM_CHANGE_FIELDS + MAX_STOP_IDS
        self.kernels.change_rows(self.held_rows, sent.view(-1, width), sent_pages, page_size)


def _gains(additions: Sequence[PageAddition]) -> dict[int, tuple[int, list[int]]]:
    """The first column and the pages that each row gains. A row's additions are adjacent."""
    gains: dict[int, tuple[int, list[int]]] = {}
    for item in additions:
        column, pages = gains.setdefault(item.row, (item.column, []))
        assert item.column == column + len(pages)
        pages += item.pages
    return gains


def _fields(request: Request, full_width: int) -> list[int]:
    """The fields of a request's new row, see `NUM_CHANGE_FIELDS`, and its stop ids, padded with -1."""
    params = request.params
    width = min(params.verify_width or full_width, full_width)
    stops = params.effective_stops
    floats = unpack("<2q", pack("<2d", params.temperature, params.top_p))
    padding = [-1] * (MAX_STOP_IDS - len(stops))
    return [request.generation, width, params.top_k, request.seed, *floats, *stops, *padding]


def row_of(request: Request) -> int:
    """The row of the device state that a request holds."""
    assert request.row is not None
    return request.row


def rows_of(requests: Iterable[Request]) -> list[int]:
    """The rows of the device state that requests hold."""
    return [row_of(request) for request in requests]


class Uploader:
    """Copies host lists to device tensors without waiting.

    Each upload has its own pinned memory. torch's allocator reuses that memory only after the copy has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def ints(self, values: Sequence[int]) -> Tensor:
        """A list as a device tensor, int64."""
        return self._send(torch.tensor(values, dtype=torch.int64, pin_memory=self._is_cuda))

    def over(self, tensor: Tensor, values: Sequence[int]) -> None:
        """Overwrite a tensor [N], after every queued step that reads it."""
        tensor.copy_(torch.tensor(values, dtype=torch.int64, pin_memory=self._is_cuda), non_blocking=True)

    def lists(self, *lists: Sequence[int]) -> list[Tensor]:
        """Several lists as device tensors, int64, in one copy.

        Each list begins at a multiple of 16 bytes, because kernels were compiled for pointers with this alignment.
        """
        sizes = [len(values) + len(values) % 2 for values in lists]
        flat = self.ints([value for values in lists for value in (*values, *[0] * (len(values) % 2))])
        return [part[: len(values)] for part, values in zip(flat.split(sizes), lists, strict=True)]

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
