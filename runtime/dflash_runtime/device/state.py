"""The state of each batch row on the device, which steps read and write without waiting for the host.

A request holds one row from admission to its end. The host writes a row when a request is admitted, when pages are
added and when the request is switched on; every step writes lengths, anchor and done flag. All of that happens in
stream order, so a row may be given to a new request while steps of the old one are still queued: those steps find
the row done, and their results carry the old generation number.

Axis letters: B rows of the state, R rows in a step, P pages, S stop ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def admit(self, request: Request, generation: int, full_width: int, upload: "Uploader") -> None:
        """Write what does not change while a request holds its row; it stays done until `activate`."""
        params = request.params
        width = min(params.verify_width or full_width, full_width)
        stops = [*params.effective_stops, *[-1] * (MAX_STOP_IDS - len(params.effective_stops))]
        ints = upload.ints([generation, width, params.top_k, request.seed, *stops])
        floats = upload.floats([params.temperature, params.top_p])
        row = request.row
        self.generations[row], self.widths[row], self.top_ks[row], self.seeds[row] = ints[0], ints[1], ints[2], ints[3]
        self.stop_ids[row] = ints[4:]
        self.temperatures[row], self.top_ps[row] = floats[0], floats[1]
        self.done[row].fill_(True)
        self.page_table[row].zero_()
        self.reserved_lens[row].zero_()

    def add_pages(self, additions: Sequence[PageAddition], page_size: int, upload: "Uploader") -> None:
        """Enter pages into the table and extend what the rows have reserved."""
        cells = [(item.row, item.column + index, page) for item in additions for index, page in enumerate(item.pages)]
        if not cells:
            return
        rows, columns, pages = upload.ints([value for cell in zip(*cells, strict=True) for value in cell]).view(3, -1)
        self.page_table[rows, columns] = pages
        # One entry a row: writing an index twice in one call has no defined order on a GPU.
        reserved = {item.row: (item.column + len(item.pages)) * page_size for item in additions}
        reserved_rows, lens = upload.ints([*reserved, *reserved.values()]).view(2, -1)
        self.reserved_lens[reserved_rows] = lens

    def activate(self, row: int, kv_len: int, anchor: Tensor, remaining: Tensor, done: Tensor) -> None:
        """Switch a row on after its prefill: anchor, remaining and done are device scalars."""
        self.kv_lens[row].fill_(kv_len)
        self.anchors[row] = anchor
        self.remaining[row] = remaining
        self.done[row] = done


class Uploader:
    """Host lists to device tensors without waiting.

    Each upload has pinned memory of its own; torch's allocator hands it out again only after the copy has run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def ints(self, values: Sequence[int]) -> Tensor:
        return self._send(torch.tensor(values, dtype=torch.int64, pin_memory=self._is_cuda))

    def floats(self, values: Sequence[float]) -> Tensor:
        return self._send(torch.tensor(values, dtype=torch.float64, pin_memory=self._is_cuda))

    def _send(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)
