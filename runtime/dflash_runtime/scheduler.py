"""Which requests run in a step, and what their results make of them. Host only; knows pages and lengths, no tensors.

Pages are reserved for a request's whole life when it is admitted, lookahead included, so a running request never
waits for memory.
"""

from collections import deque
from dataclasses import dataclass

from dflash_runtime.batch import Batch, StepOutput
from dflash_runtime.errors import CapacityError, RequestError
from dflash_runtime.pages import PagePool
from dflash_runtime.request import Request


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that became final in a step, after stops and limits."""

    request: Request
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The engine's fixed numbers, resolved before start."""

    num_draft_tokens: int
    max_model_len: int
    max_num_requests: int
    vocab_size: int

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots a step may write past a request's true KV: the anchor and each drafted token."""
        return self.num_draft_tokens + 1

    def can_draft(self, kv_len: int) -> bool:
        """Whether a whole block still fits the model; blocks are never shortened."""
        return self.num_draft_tokens > 0 and kv_len + self.num_lookahead_tokens <= self.max_model_len

    def reserved_len(self, request: Request) -> int:
        """Tokens a request may ever write: all it may generate, and the lookahead past that."""
        longest = request.prompt_len + request.params.max_new_tokens - 1 + self.num_lookahead_tokens
        return min(longest, self.max_model_len)


class Scheduler:
    """First come, first served; a step prefills what was admitted and decodes what is running."""

    def __init__(self, limits: Limits, pages: PagePool) -> None:
        self.limits = limits
        self.pages = pages
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: a prompt this model cannot take.
            CapacityError: the request would not fit an empty pool.
        """
        self._check(request)
        self._waiting.append(request)

    def schedule(self) -> Batch:
        """Choose what runs now."""
        decoding = list(self._running)
        admitted = self._admit()
        return Batch(
            prefill=tuple(admitted),
            draft=tuple(request for request in decoding if self.limits.can_draft(request.kv_len)),
            plain=tuple(request for request in decoding if not self.limits.can_draft(request.kv_len)),
        )

    def commit(self, outputs: list[StepOutput]) -> list[Committed]:
        """Make a step's tokens final and retire the requests that ended."""
        committed = []
        for output in outputs:
            request = output.request
            kept = request.commit(output.token_ids, self.limits.max_model_len)
            if output.num_accepted is not None:
                request.acceptance_lengths.append(output.num_accepted + 1)
                request.kept_lengths.append(len(kept))
            if request.is_finished:
                self._retire(request)
            committed.append(Committed(request, kept))
        return committed

    def abort(self) -> None:
        """Drop every request and give their pages back."""
        self._waiting.clear()
        for request in list(self._running):
            self._retire(request)

    def _admit(self) -> list[Request]:
        admitted: list[Request] = []
        while self._waiting and len(self._running) < self.limits.max_num_requests:
            reserved = self.limits.reserved_len(self._waiting[0])
            if not self.pages.can_allocate(reserved):
                break
            request = self._waiting.popleft()
            request.pages = self.pages.allocate(reserved)
            self._running.append(request)
            admitted.append(request)
        return admitted

    def _retire(self, request: Request) -> None:
        self._running.remove(request)
        self.pages.free(request.pages)
        request.pages = []

    def _check(self, request: Request) -> None:
        where = f"prompt {request.index}"
        if not request.prompt_token_ids:
            raise RequestError(f"{where}: empty, expected at least one token")
        worst = next((token for token in request.prompt_token_ids if not 0 <= token < self.limits.vocab_size), None)
        if worst is not None:
            raise RequestError(f"{where}: token id {worst}, expected ids in [0, {self.limits.vocab_size})")
        if request.prompt_len >= self.limits.max_model_len:
            raise RequestError(
                f"{where}: {request.prompt_len} tokens, expected fewer than the model's {self.limits.max_model_len}"
            )
        reserved = self.limits.reserved_len(request)
        if not self.pages.can_ever_hold(reserved):
            raise CapacityError(
                f"{where}: needs {self.pages.pages_for(reserved)} KV pages of {self.pages.page_size} tokens for "
                f"{reserved} tokens, the pool has {self.pages.num_pages - 1}",
                hint="lower --max-new-tokens or --max-model-len",
            )
