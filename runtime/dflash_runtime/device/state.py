"""The state of each batch row on the device, which steps read and write without waiting for the host.

A request holds one row from admission to its end. The host writes a row when a request is admitted, when pages are
added and when the request is switched on, for all requests of a step together; every step writes lengths, anchor and
done flag. All of that happens in stream order, so a row may be given to a new request while steps of the old one are
still queued: those steps find the row done, and their results carry the old generation number.

Axis letters: B rows of the state, R rows in a step, P pages, S stop ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack, unpack

import torch
from torch import Tensor

from dflash_kernels.row_changes import NUM_CHANGE_FIELDS, HeldRows
from dflash_kernels.step_rows import RowState
from dflash_kernels.suite import Kernels
from dflash_runtime.scheduling.batch import PageAddition
from dflash_runtime.scheduling.request import MAX_STOP_IDS, Request

_NO_FIELDS = [0] * (NUM_CHANGE_FIELDS - 5 + MAX_STOP_IDS)


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
    kernels: Kernels

    @classmethod
    def empty(cls, num_rows: int, max_pages: int, kernels: Kernels, device: torch.device) -> "DeviceState":
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
        """What the two ends of a decode step read and write."""
        return RowState(*(getattr(self, name) for name in RowState._fields))

    @property
    def held_rows(self) -> HeldRows:
        """What rows have from when they are given to requests."""
        return HeldRows(*(getattr(self, name) for name in HeldRows._fields))

    def admit(
        self,
        requests: Sequence[Request],
        additions: Sequence[PageAddition],
        full_width: int,
        page_size: int,
        upload: "Uploader",
    ) -> None:
        """Give rows to requests and pages to rows, in one copy and one launch; a row stays done until it is
        switched on.

        A row begins without pages: those of the request itself are among the additions.
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
    """Where each row's new pages begin, and all of them: a row's additions follow one another."""
    gains: dict[int, tuple[int, list[int]]] = {}
    for item in additions:
        column, pages = gains.setdefault(item.row, (item.column, []))
        assert item.column == column + len(pages)
        pages += item.pages
    return gains


def _fields(request: Request, full_width: int) -> list[int]:
    """What a row that is given has: see `NUM_CHANGE_FIELDS`; then its stop ids, filled up with -1."""
    params = request.params
    width = min(params.verify_width or full_width, full_width)
    stops = params.effective_stops
    floats = unpack("<2q", pack("<2d", params.temperature, params.top_p))
    padding = [-1] * (MAX_STOP_IDS - len(stops))
    return [request.generation, width, params.top_k, request.seed, *floats, *stops, *padding]


def row_of(request: Request) -> int:
    """Its row of the device state."""
    assert request.row is not None
    return request.row


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

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
