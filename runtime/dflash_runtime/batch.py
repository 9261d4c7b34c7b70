"""What one step runs, and the device tensors made from it.

Axis letters: R requests, N rows a request, P pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.slot_mapping import slot_mapping_ref
from dflash_runtime.request import Request


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests by what they do in this step. Prefill and decode are separate forwards."""

    prefill: tuple[Request, ...] = ()
    draft: tuple[Request, ...] = ()
    """Draft and verify a whole block."""
    plain: tuple[Request, ...] = ()
    """Decode one token: no draft in use, or a block would pass the model's limit."""

    @property
    def is_empty(self) -> bool:
        return not (self.prefill or self.draft or self.plain)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The tokens one request got from one step, before stops and limits. `num_accepted` is None without drafts."""

    request: Request
    token_ids: list[int]
    num_accepted: int | None = None


@dataclass(frozen=True, slots=True)
class Rows:
    """The state of R requests as device tensors, one row each."""

    context_lens: Tensor  # [R] rows of true KV
    page_table: Tensor  # [R, P], 0 where no page is owned
    limits: Tensor  # [R] first position that is not reserved
    temperatures: Tensor  # [R]
    top_ks: Tensor  # [R]
    top_ps: Tensor  # [R]
    seeds: Tensor  # [R]

    @classmethod
    def read(
        cls, requests: Sequence[Request], context_lens: Sequence[int], page_size: int, device: torch.device
    ) -> "Rows":
        width = max(len(request.pages) for request in requests)
        params = [request.params for request in requests]

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def floats(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        tables = [request.pages + [0] * (width - len(request.pages)) for request in requests]
        return cls(
            context_lens=ints(context_lens),
            page_table=torch.tensor(tables, dtype=torch.int64, device=device),
            limits=ints([len(request.pages) * page_size for request in requests]),
            temperatures=floats([item.temperature for item in params]),
            top_ks=ints([item.top_k for item in params]),
            top_ps=floats([item.top_p for item in params]),
            seeds=ints([item.seed for item in params]),
        )

    def positions(self, num_rows: int) -> Tensor:
        """Positions `context_len + i` of the next `num_rows` rows, [R, N]."""
        return self.context_lens[:, None] + torch.arange(num_rows, device=self.context_lens.device)

    def slots(self, positions: Tensor, page_size: int) -> Tensor:
        """Slots of positions [R, N], PAD where nothing is reserved."""
        return slot_mapping_ref(self.page_table, positions, self.limits, page_size)

    def context_table(self, num_tokens: int, page_size: int) -> Tensor:
        """The columns of the page table that `num_tokens` tokens of context reach, at least one: [R, P']."""
        return self.page_table[:, : max(1, -(-num_tokens // page_size))]
