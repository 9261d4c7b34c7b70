"""One request: its prompt, what was generated, and its lengths.

Lengths, in tokens:

    [0, prompt_len)            the prompt
    [prompt_len, total_len)    generated and committed
    total_len - 1              the anchor: committed, its KV row not written yet
    kv_len = total_len - 1     rows of true KV, once prefilled

While steps are in flight the device is ahead of these lengths, by at most what `num_in_flight` steps can commit.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from numbers import Real
from operator import index as as_integer

from dflash_kernels.temperature import MIN_TEMPERATURE
from dflash_runtime.errors import DFlashError, RequestError
from dflash_runtime.phrases import shorten

MAX_STOP_IDS = 16
"""Stop ids a request may have; the device compares with all of them in every step."""

INT64 = range(-(2**63), 2**63)
"""What an integer on the device can hold."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    A temperature below `MIN_TEMPERATURE` is greedy. With a `seed` a request samples the same text in every run; without
    one the engine draws a seed for each request, so that equal prompts give different texts. `stop_token_ids` end a
    request and stay its last token; `ignore_eos` makes them ordinary tokens. `verify_width` verifies only so many rows
    of the block, the anchor included; the draft sees the whole block all the same, unless the width is 1, which is
    plain decoding.

    Raises:
        RequestError: a value of another type than stated, or out of its range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    verify_width: int | None = None

    def __post_init__(self) -> None:
        self._check_integer("max_new_tokens", range(1, INT64.stop), "at least 1")
        self._check_integer("top_k", range(INT64.stop), "0 (off) or more")
        self._check_integer("seed", INT64, "a 64-bit integer")
        self._check_integer("verify_width", range(1, INT64.stop), "at least 1 (the last committed token)")
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature must be 0 or more and finite, got {self.temperature!r}")
        if not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p!r}")
        stops = check_ids(self.stop_token_ids, "stop_token_ids")
        if len(stops) > MAX_STOP_IDS:
            raise RequestError(f"{len(stops)} stop ids, expected at most {MAX_STOP_IDS}")
        wrong = next((stop for stop in stops if not 0 <= stop < INT64.stop), None)
        if wrong is not None:
            raise RequestError(f"stop_token_ids must be 64-bit integers of 0 or more, got {wrong}")
        object.__setattr__(self, "stop_token_ids", stops)

    def _check_integer(self, name: str, allowed: range, expected: str) -> None:
        """Hold a field that is not None against its range, and keep it as a plain integer."""
        value = getattr(self, name)
        if value is None and name in ("seed", "verify_width"):
            return
        try:
            number = as_integer(value)
        except TypeError as error:
            raise RequestError(f"{name} must be an integer, got {value!r}") from error
        if number not in allowed:
            raise RequestError(f"{name} must be {expected}, got {shorten(repr(number), 60)}")
        object.__setattr__(self, name, number)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def max_drafts(self) -> int | None:
        """Drafts of a block that are verified for this request at most; None is all."""
        return None if self.verify_width is None else self.verify_width - 1

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

    `draft_ids` are the drafts that were verified, `num_accepted` of them accepted. What the draft proposed beyond the
    verify width is not here: nobody knows whether it would have been accepted. The `num_committed` tokens are those of
    the output from `start` on: accepted drafts, then the bonus, cut at stops and limits.
    """

    start: int
    draft_ids: tuple[int, ...]
    num_accepted: int
    num_committed: int

    @property
    def verify_width(self) -> int:
        """Rows of the block that were verified, the anchor included."""
        return len(self.draft_ids) + 1

    @property
    def rejected_id(self) -> int | None:
        """The drafted token that the target's own replaced.

        None where all that were verified were accepted, or where a stop or a limit came before the target's own.
        """
        has_bonus = self.num_committed > self.num_accepted
        return self.draft_ids[self.num_accepted] if has_bonus and self.num_accepted < len(self.draft_ids) else None


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt on its way through the engine. Only the scheduler changes it.

    `seed` is that of its parameters, or one the engine drew. `num_delivered` of its output tokens have been handed out.
    With a `load_key` its KV is loaded from the hand-off of that key, and with a `send_key` it is handed off under it
    after the prompt, `sent_params` being those to go on with. What is private shares no pages with other requests.

    Raises:
        RequestError: token ids that are no integers.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    steps: list[DraftStep] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: DFlashError | None = None
    seed: int = 0
    num_delivered: int = 0
    load_key: str | None = None  # until it is loaded, or given up
    load_len: int | None = None  # rows that will come, where that is known
    send_key: str | None = None
    sent_params: SamplingParams | None = None
    is_private: bool = False

    row: int | None = None
    generation: int = 0
    pages: list[int] = field(default_factory=list)
    page_digests: list[bytes] = field(default_factory=list)  # of its full pages, as far as they were asked for
    num_published: int = 0  # pages that were found in the prefix cache, or entered in it
    num_cached: int = 0
    num_loaded: int = 0  # rows that were handed off to it
    is_loading: bool = False  # they are on their way, or not switched on yet
    is_sending: bool = False  # it has ended, and its pages are wanted until they are handed off
    prefilled_len: int = 0
    prefill_len: int = 0  # `rows_to_prefill` when the row was given
    num_in_flight: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.prompt_token_ids = check_ids(self.prompt_token_ids)
        self.seed = self.params.seed or 0

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def total_len(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def kv_len(self) -> int:
        return self.total_len - 1

    def token_slice(self, start: int, end: int) -> tuple[int, ...]:
        """Tokens `[start, end)` of everything committed, prompt first. Costs no more than what it returns."""
        generated = slice(max(0, start - self.prompt_len), max(0, end - self.prompt_len))
        return self.prompt_token_ids[start:end] + tuple(self.output_token_ids[generated])

    @property
    def rows_to_prefill(self) -> int:
        """Rows a prefill that starts now has to bring: the prompt, or everything up to the anchor when resuming."""
        return self.prompt_len if not self.output_token_ids else self.kv_len

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled_len >= self.prefill_len and not self.is_loading

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def remaining(self, max_model_len: int) -> int:
        """Tokens that may still be committed."""
        return min(self.params.max_new_tokens - len(self.output_token_ids), max_model_len - self.total_len)

    def surely_ends(self, max_model_len: int) -> bool:
        """Whether the steps in flight end it even if they accept nothing: each gives at least one token."""
        return self.num_in_flight >= self.remaining(max_model_len)

    def forget_pages(self) -> None:
        """Hold no pages, whoever has them now."""
        self.pages = []
        self.num_published = 0
        self.prefilled_len = 0

    def commit(self, token_ids: Iterable[int], max_model_len: int) -> None:
        """Make tokens final. The device has cut them at stops and limits; here only the reason is named."""
        self.output_token_ids += token_ids
        if self.output_token_ids[-1] in self.params.effective_stops:
            self.finish_reason = FinishReason.STOP
        elif self.remaining(max_model_len) <= 0:
            self.finish_reason = FinishReason.LENGTH

    def fail(self, error: DFlashError) -> None:
        """End it where it is, for a reason of its own."""
        self.finish_reason = FinishReason.ERROR
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of a request.

    `acceptance_lengths` has accepted + 1 for each verify step, untruncated; the prefill's token is no step.
    `verify_widths` has the most that each of them can be. `committed_lengths` has the tokens each of those steps left
    in the output after stops and limits, `rejected_ids` the drafted token that the target's own replaced, if any, and
    `drafts` what each step verified. A step that decoded plainly is in none of them.

    `num_cached` rows of the prompt were found in the prefix cache, and `num_loaded` came by hand-off.

    `error` says why prompt `index` was not served, or not finished, with `finish_reason` ERROR, the exit code its error
    has, and the tokens it had until then.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    acceptance_lengths: tuple[int, ...] = ()
    verify_widths: tuple[int, ...] = ()
    committed_lengths: tuple[int, ...] = ()
    rejected_ids: tuple[int | None, ...] = ()
    drafts: tuple[DraftStep, ...] = ()
    num_cached: int = 0
    num_loaded: int = 0
    num_preemptions: int = 0
    error: str | None = None
    exit_code: int = 0

    @property
    def num_plain_steps(self) -> int:
        """Steps that decoded plainly, a token each; the first token is the prefill's."""
        return max(0, len(self.token_ids) - 1 - sum(self.committed_lengths))

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
            verify_widths=tuple(step.verify_width for step in request.steps),
            committed_lengths=tuple(step.num_committed for step in request.steps),
            rejected_ids=tuple(step.rejected_id for step in request.steps),
            drafts=tuple(request.steps),
            num_cached=request.num_cached,
            num_loaded=request.num_loaded,
            num_preemptions=request.num_preemptions,
            error=request.error.message if request.error is not None else None,
            exit_code=request.error.exit_code if request.error is not None else 0,
        )

    @classmethod
    def refuse(cls, index: int, prompt_token_ids: tuple[int, ...], error: DFlashError) -> "RequestOutput":
        """The output of a prompt that was never run."""
        return cls(
            index=index,
            prompt_token_ids=prompt_token_ids,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            error=error.message,
            exit_code=error.exit_code,
        )


def check_ids(token_ids: Iterable[int], where: str = "") -> tuple[int, ...]:
    """Token ids as plain integers; what only rounds to one is refused, since it was meant for something else.

    Raises:
        RequestError: naming the first that is no integer, after `where`.
    """
    prefix = f"{where}: " if where else ""
    try:
        values = tuple(token_ids)
    except TypeError as error:
        raise RequestError(f"{prefix}{shorten(repr(token_ids), 60)}, expected a sequence of token ids") from error
    ids = []
    for value in values:
        try:
            ids.append(as_integer(value))
        except TypeError as error:
            raise RequestError(f"{prefix}{shorten(repr(value), 60)} is no token id, expected integers") from error
    return tuple(ids)


def derive_seed(base: int, index: int) -> int:
    """The seed of the request `index` among those that share the base: a 64-bit integer."""
    digest = hashlib.blake2b(f"{base}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
