"""One request: its prompt, what was generated, and its lengths.

Lengths, in tokens:

    [0, prompt_len)            the prompt
    [prompt_len, total_len)    generated and committed
    total_len - 1              the anchor: committed, its KV row not written yet
    kv_len = total_len - 1     rows of true KV, once prefilled

While steps are in flight the device is ahead of these lengths, by at most what `num_in_flight` steps can commit.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dflash_runtime.errors import DFlashError, RequestError

MAX_STOP_IDS = 16
"""Stop ids a request may have; the device compares with all of them in every step."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    `stop_token_ids` end a request and stay its last token; `ignore_eos` makes them ordinary tokens.
    `verify_width` verifies only so many rows of the block, the anchor included; the draft sees the whole block all the
    same.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    verify_width: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if self.top_k < 0:
            raise RequestError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}")
        if not -(2**63) <= self.seed < 2**63:
            raise RequestError(f"seed must be a 64-bit integer, got {self.seed}")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise RequestError(f"{len(self.stop_token_ids)} stop ids, expected at most {MAX_STOP_IDS}")
        if self.verify_width is not None and self.verify_width < 1:
            raise RequestError(f"verify_width must be at least 1 (the last committed token), got {self.verify_width}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_filters(self) -> bool:
        """Whether top-k or top-p cut the distribution this request is sampled from."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def effective_stops(self) -> tuple[int, ...]:
        """The ids that do end this request."""
        return () if self.ignore_eos else self.stop_token_ids

    def with_stops(self, token_ids: Iterable[int]) -> "SamplingParams":
        """The same parameters, ending at these ids as well."""
        return replace(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, *token_ids})))


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One verify step of one request.

    Its `num_committed` tokens are those of the output from `start` on: accepted drafts, then the bonus, cut at stops
    and limits.
    """

    start: int
    draft_ids: tuple[int, ...]
    num_accepted: int
    num_committed: int


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt on its way through the engine. Only the scheduler changes it."""

    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    steps: list[DraftStep] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    row: int | None = None
    generation: int = 0
    pages: list[int] = field(default_factory=list)
    page_digests: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    prefilled_len: int = 0
    prefill_len: int = 0  # `rows_to_prefill` when the row was given
    num_in_flight: int = 0
    num_preemptions: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def total_len(self) -> int:
        return self.prompt_len + len(self.output_token_ids)

    @property
    def kv_len(self) -> int:
        return self.total_len - 1

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Everything committed, prompt first."""
        return self.prompt_token_ids + tuple(self.output_token_ids)

    @property
    def rows_to_prefill(self) -> int:
        """Rows a prefill that starts now has to bring: the prompt, or everything up to the anchor when resuming."""
        return self.prompt_len if not self.output_token_ids else self.kv_len

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled_len >= self.prefill_len

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def remaining(self, max_model_len: int) -> int:
        """Tokens that may still be committed."""
        return min(self.params.max_new_tokens - len(self.output_token_ids), max_model_len - self.total_len)

    def commit(self, token_ids: Iterable[int], max_model_len: int) -> None:
        """Make tokens final. The device has cut them at stops and limits; here only the reason is named."""
        self.output_token_ids += token_ids
        if self.output_token_ids[-1] in self.params.effective_stops:
            self.finish_reason = FinishReason.STOP
        elif self.remaining(max_model_len) <= 0:
            self.finish_reason = FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of a request.

    `acceptance_lengths` has accepted + 1 for each verify step, not cut at stops and limits; the token of a
    prefill belongs to no step. `committed_lengths` counts the tokens of each of those steps that the output has after
    stops and limits, and `drafts` holds what the steps proposed. A step that decoded plainly is in none of them.
    `error` says why a request was not served; its `finish_reason` is then ERROR, and `exit_code` that of the error.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    acceptance_lengths: tuple[int, ...] = ()
    committed_lengths: tuple[int, ...] = ()
    drafts: tuple[DraftStep, ...] = ()
    num_cached: int = 0
    num_preemptions: int = 0
    error: str | None = None
    exit_code: int = 0

    @classmethod
    def read(cls, request: Request) -> "RequestOutput":
        """The output of a request that has ended."""
        assert request.finish_reason is not None
        return cls(
            index=request.index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            acceptance_lengths=tuple(step.num_accepted + 1 for step in request.steps),
            committed_lengths=tuple(step.num_committed for step in request.steps),
            drafts=tuple(request.steps),
            num_cached=request.num_cached,
            num_preemptions=request.num_preemptions,
        )

    @classmethod
    def refuse(cls, request: Request, error: DFlashError) -> "RequestOutput":
        """The output of a request that was never run."""
        return cls(
            index=request.index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            error=error.message,
            exit_code=error.exit_code,
        )
