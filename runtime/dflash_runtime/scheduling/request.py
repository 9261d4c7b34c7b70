"""One request: its prompt, its generated tokens, and its lengths.

Lengths, in tokens:

    [0, prompt_len)            the prompt
    [prompt_len, total_len)    generated and committed
    total_len - 1              the anchor: committed, its KV row not written yet
    kv_len = total_len - 1     rows of true KV, once prefilled

While steps are in flight the device is ahead of these lengths, by at most the tokens that `num_in_flight` steps commit.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from numbers import Real
from operator import index as as_integer
from typing import Annotated, Any, NamedTuple

from dflash_kernels.temperature import MIN_TEMPERATURE
from dflash_runtime.documents import OPTIONAL
from dflash_runtime.errors import DFlashError, RequestError
from dflash_runtime.phrases import shorten
from dflash_runtime.scheduling.grammar import Grammar
from dflash_runtime.scheduling.text_index import TextIndex

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

REPR_CHARS = 400
"""The most characters of one field in the repr of an output."""

MAX_STOP_IDS = 16
"""The most stop ids of a request. The device compares every token with all of them."""

INT64 = range(-(2**63), 2**63)
"""The values of an integer on the device."""


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    temperature      below `MIN_TEMPERATURE` the request is greedy
    seed             the same seed samples the same text in every run; without one the engine draws a seed per request,
                     so equal prompts give different texts
    stop_token_ids   each ends the request and stays its last token; `ignore_eos` makes them ordinary tokens
    verify_width     how many rows of each block are verified, including the anchor. The draft always drafts the whole
                     block, except with width 1, which is plain decoding.
    grammar          the texts that the answer may have. It ends at a stop token, where the grammar allows an end. While
                     a request with a grammar runs, no step begins before the results of the last one are read

    Raises:
        RequestError: a value has the wrong type or is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    verify_width: int | None = None
    grammar: Annotated[Grammar | None, OPTIONAL] = None

    def __post_init__(self) -> None:
        self._check_integer("max_new_tokens", range(1, INT64.stop), "1 to 2**63 - 1")
        self._check_integer("top_k", range(INT64.stop), "0 (off) to 2**63 - 1")
        self._check_integer("seed", INT64, "a 64-bit integer")
        self._check_integer("verify_width", range(1, INT64.stop), "1 (the last committed token) to 2**63 - 1")
        self._check_real("temperature", lambda value: 0 <= value < float("inf"), "a finite number of 0 or more")
        self._check_real("top_p", lambda value: 0 < value <= 1, "a number in (0, 1]")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(field="ignore_eos", found=self.ignore_eos, expected="True or False")
        stops = check_ids(self.stop_token_ids, "stop_token_ids")
        if len(stops) > MAX_STOP_IDS:
            raise RequestError(
                f"{len(stops)} stop ids, expected at most {MAX_STOP_IDS}",
                id="too-many-stop-ids", field="stop_token_ids", found=len(stops), expected=f"at most {MAX_STOP_IDS}",
            )  # fmt: skip
        wrong = next((stop for stop in stops if not 0 <= stop < INT64.stop), None)
        if wrong is not None:
            raise RequestError(field="stop_token_ids", found=wrong, expected="64-bit integers of 0 or more")
        object.__setattr__(self, "stop_token_ids", stops)

    def _check_integer(self, name: str, allowed: range, expected: str) -> None:
        """Check that a field is an integer in its range, and store it as a plain integer.

        `seed` and `verify_width` may be None.
        """
        value = getattr(self, name)
        if value is None and name in ("seed", "verify_width"):
            return
        try:
            number = plain_integer(value)
        except TypeError as error:
            raise RequestError(field=name, found=value, expected="an integer") from error
        if number not in allowed:
            raise RequestError(field=name, found=number, expected=expected)
        object.__setattr__(self, name, number)

    def _check_real(self, name: str, is_allowed: Callable[[float], bool], expected: str) -> None:
        """Check that a field is a number in its range, and store it as a float."""
        value = getattr(self, name)
        try:
            number = float(value) if is_real(value) else float("nan")
        except OverflowError:  # an integer beyond the largest float
            number = float("nan")
        if not is_allowed(number):
            raise RequestError(field=name, found=value, expected=expected)
        object.__setattr__(self, name, number)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def max_drafts(self) -> int | None:
        """The most draft tokens of a block that are verified for this request. None means all."""
        return None if self.verify_width is None else self.verify_width - 1

    @property
    def has_filters(self) -> bool:
        """Whether top-k or top-p cut the distribution that this request samples from."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def effective_stops(self) -> tuple[int, ...]:
        """The ids that end this request: empty with `ignore_eos`."""
        return () if self.ignore_eos else self.stop_token_ids

    @property
    def settings(self) -> dict[str, Any]:
        """The parameters as values of a JSON document."""
        return {**asdict(self), "stop_token_ids": list(self.stop_token_ids)}

    def with_stops(self, token_ids: Iterable[int]) -> "SamplingParams":
        """The same parameters with these stop ids added."""
        return replace(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, *token_ids})))


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One verify step of one request.

    `draft_ids` are the verified draft tokens. The first `num_accepted` of them were accepted. Draft tokens beyond the
    verify width are left out, since nobody knows whether the target would accept them. Of a tree, they are the accepted
    path and the most likely nodes after it, then -1 at depths that this path does not reach. The step committed
    `num_committed` output tokens from `start` on: the accepted drafts, then the bonus, cut at stops and limits.

    `confidences` are the draft's own predictions that the target accepts each draft token if it accepts all before it.
    They are empty for a draft that makes none, and None where the draft's value is not a number. Steps are compared
    without them, because other requests of a batch change their last digits.
    """

    start: int
    draft_ids: tuple[int, ...]
    num_accepted: int
    num_committed: int
    confidences: tuple[float | None, ...] = field(default=(), compare=False)

    @property
    def verify_width(self) -> int:
        """How many rows of the block were verified, including the anchor."""
        return len(self.draft_ids) + 1

    @property
    def rejected_id(self) -> int | None:
        """The draft token that the target replaced by its own.

        None if every verified draft was accepted, or if a stop or a limit cut off the target's own token. Also None at
        an empty position, which has a negative id: the draft left it empty, or the tree ends before it.
        """
        has_bonus = self.num_committed > self.num_accepted
        token_id = self.draft_ids[self.num_accepted] if has_bonus and self.num_accepted < len(self.draft_ids) else -1
        return token_id if token_id >= 0 else None


def confidences_of(steps: Sequence[DraftStep]) -> tuple[tuple[float | None, ...], ...]:
    """The draft's predictions for the tokens of each step; empty if no step has any."""
    return tuple(step.confidences for step in steps) if any(step.confidences for step in steps) else ()


@dataclass(frozen=True, slots=True)
class Awaited:
    """The first `num_pages` pages of a text, which `publisher` publishes while it holds its row."""

    publisher: "Request"
    generation: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A look at the pool that found too little room.

    num_found   how many pages of the request the cache has
    num_idle    how many of these no other request holds
    num_freed   `PagePool.num_freed` at that time
    """

    num_found: int
    num_idle: int
    num_freed: int


class SnapshotAt(NamedTuple):
    """A snapshot of recurrent states: the rows that it includes, and its slot."""

    position: int
    slot: int


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt on its way through the engine. Only the scheduler changes it.

    seed            from the parameters, or drawn by the engine
    num_delivered   how many output tokens the caller has received
    load_key        the key of the hand-off that its KV is loaded from; None once loaded or given up
    load_len        rows of that hand-off, if known before it arrives
    send_key        the key under which the request is handed off after its prompt
    sent_params     the parameters that the receiver of that hand-off uses
    is_private      shares no pages with other requests
    relative        an earlier request whose prompt has its first `num_common` full pages in common with this prompt
    page_digests    digests of its full pages, computed when first needed; without the first `num_common` pages if
                    `common_digests`, the list of its relative, has these
    num_shared      pages found in the prefix cache when it got its pages
    num_published   pages found in the prefix cache or entered in it
    awaited         pages that it waits for instead of computing them
    refusal         when it last got no room
    num_loaded      rows that came from a hand-off
    is_loading      those rows are still loading, or the request is not switched on yet
    is_sending      the request has ended and holds its pages until they are handed off
    prefill_len     `rows_to_prefill` when the request got its row
    restored        the snapshot that it continues from, for a target with recurrent layers
    keep_at         positions after which its prompt keeps a snapshot
    keeping         slots of snapshots that queued steps write, by position
    spare           the slot in which decode steps keep the state at the last page boundary
    text_index      the index of its text from which a lookup drafts
    likely          confidences of its last drafts, verified or not

    Raises:
        RequestError: a token id is not an integer.
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
    load_key: str | None = None
    load_len: int | None = None
    send_key: str | None = None
    sent_params: SamplingParams | None = None
    is_private: bool = False
    relative: "Request | None" = field(default=None, repr=False)
    num_common: int = 0

    row: int | None = None
    generation: int = 0
    pages: list[int] = field(default_factory=list)
    page_digests: list[bytes] = field(default_factory=list, repr=False)
    common_digests: list[bytes] = field(default_factory=list, repr=False)
    num_shared: int = 0
    num_published: int = 0
    awaited: Awaited | None = field(default=None, repr=False)
    refusal: Refusal | None = None
    num_cached: int = 0
    num_loaded: int = 0
    is_loading: bool = False
    is_sending: bool = False
    prefilled_len: int = 0
    prefill_len: int = 0
    num_in_flight: int = 0
    num_preemptions: int = 0
    restored: SnapshotAt | None = None
    keep_at: set[int] = field(default_factory=set)
    keeping: dict[int, int] = field(default_factory=dict)
    spare: int | None = None
    likely: tuple[float | None, ...] = ()
    text_index: TextIndex | None = field(default=None, repr=False)
    _prompt_bytes: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = check_ids(self.prompt_token_ids)
        self.seed = self.params.seed or 0

    @property
    def prompt_bytes(self) -> bytes:
        """The prompt with 8 bytes per token, to compare and hash parts of it quickly."""
        if not self._prompt_bytes:
            self._prompt_bytes = array("q", self.prompt_token_ids).tobytes()
        return self._prompt_bytes

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
        """Tokens `[start, end)` of the prompt and the output together. Copies only the tokens it returns."""
        generated = slice(max(0, start - self.prompt_len), max(0, end - self.prompt_len))
        return self.prompt_token_ids[start:end] + tuple(self.output_token_ids[generated])

    @property
    def rows_to_prefill(self) -> int:
        """Rows that a prefill starting now must compute: the prompt, or all rows before the anchor when resuming."""
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
        """Whether the steps in flight end the request even if they accept no draft. Each commits at least one token."""
        return self.num_in_flight >= self.remaining(max_model_len)

    def forget_pages(self) -> None:
        """Clear the page list without releasing the pages."""
        self.pages = []
        self.num_shared = self.num_published = 0
        self.prefilled_len = 0
        self.restored = None
        self.keep_at = set()

    def commit(self, token_ids: Iterable[int], max_model_len: int) -> None:
        """Append committed tokens and set the finish reason. The device has already cut them at stops and limits."""
        self.output_token_ids += token_ids
        if self.output_token_ids[-1] in self.params.effective_stops:
            self.finish_reason = FinishReason.STOP
        elif self.remaining(max_model_len) <= 0:
            self.finish_reason = FinishReason.LENGTH

    def fail(self, error: DFlashError) -> None:
        """End the request with an error."""
        self.finish_reason = FinishReason.ERROR
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RequestOutput:
    """The result of one request.

    Per verify step (neither the prefill nor a plain decode step is a verify step):

    acceptance_lengths   accepted drafts + 1, untruncated
    verify_widths        rows verified: the most that the acceptance length can be
    committed_lengths    tokens left in the output after stops and limits
    rejected_ids         the draft token that the target replaced, or None
    drafts               the verified draft tokens
    draft_confidences    the draft's predictions for these tokens; empty for a draft that makes none

    `num_cached` rows of the prompt came from the prefix cache, and `num_loaded` rows from a hand-off.

    After a failure, `finish_reason` is ERROR, `error`, `error_id` and `exit_code` describe it, and `token_ids` has the
    tokens generated before it.

    `decode` turns token ids into text. It is None for a target without a tokenizer.
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
    draft_confidences: tuple[tuple[float | None, ...], ...] = field(default=(), compare=False)
    num_cached: int = 0
    num_loaded: int = 0
    num_preemptions: int = 0
    error: str | None = None
    error_id: str | None = None
    exit_code: int = 0
    decode: Decode | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Counts, then the beginning of the text, or of the token ids without a tokenizer."""
        shown: dict[str, object] = {"index": self.index, "finish_reason": self.finish_reason.value}
        if self.error is not None:
            shown |= {"error_id": self.error_id, "error": self.error}
        shown |= {"num_prompt_tokens": len(self.prompt_token_ids), "num_tokens": len(self.token_ids)}
        if self.acceptance_lengths:
            num_steps = len(self.acceptance_lengths)
            shown |= {"num_steps": num_steps, "acceptance_length": round(sum(self.acceptance_lengths) / num_steps, 2)}
        shown |= {"text": self.text} if self.decode is not None else {"token_ids": self.token_ids}
        return (
            f"RequestOutput({', '.join(f'{name}={shorten(repr(value), REPR_CHARS)}' for name, value in shown.items())})"
        )

    @property
    def text(self) -> str | None:
        """The generated text without special tokens; None for a target without a tokenizer.

        Raises:
            CheckpointError: the tokenizer's files cannot be loaded.
        """
        return None if self.decode is None else self.decode(self.token_ids)

    @property
    def num_plain_steps(self) -> int:
        """Plain decode steps, which commit one token each. The prefill, which gives the first token, is not counted."""
        return max(0, len(self.token_ids) - 1 - sum(self.committed_lengths))

    @classmethod
    def read(cls, request: Request, decode: Decode | None = None) -> "RequestOutput":
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
            draft_confidences=confidences_of(request.steps),
            num_cached=request.num_cached,
            num_loaded=request.num_loaded,
            num_preemptions=request.num_preemptions,
            decode=decode,
            **({} if request.error is None else _facts_of(request.error)),
        )

    @classmethod
    def refuse(
        cls, index: int, prompt_token_ids: tuple[int, ...], error: DFlashError, decode: Decode | None = None
    ) -> "RequestOutput":
        """The output of a refused prompt."""
        return cls(
            index=index,
            prompt_token_ids=prompt_token_ids,
            token_ids=(),
            finish_reason=FinishReason.ERROR,
            decode=decode,
            **_facts_of(error),
        )


def _facts_of(error: DFlashError) -> dict[str, Any]:
    """The fields of a RequestOutput that describe an error."""
    return {"error": error.message, "error_id": error.id, "exit_code": error.exit_code}


def check_ids(token_ids: Iterable[int], field: str = "prompt_token_ids") -> tuple[int, ...]:
    """Token ids as plain integers. A value such as 1.0 is refused and not rounded, since it is hardly a token id.

    Raises:
        RequestError: `token_ids` is not a sequence, or one of them is not an integer.
    """
    try:
        values = tuple(token_ids)
    except TypeError as error:
        raise RequestError(field=field, found=token_ids, expected="a sequence of token ids") from error
    if set(map(type, values)) <= {int}:
        return values
    ids = []
    for value in values:
        try:
            ids.append(plain_integer(value))
        except TypeError as error:
            raise RequestError(field=field, found=value, expected="an integer as token id") from error
    return tuple(ids)


def is_real(value: object) -> bool:
    """Whether a value is a number of any real type, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def plain_integer(value: Any) -> int:
    """An integer of any integer type as a plain one.

    Raises:
        TypeError: it is not an integer, or it is a bool.
    """
    if isinstance(value, bool):
        raise TypeError("a bool")
    return as_integer(value)


def derive_seed(base: int, index: int) -> int:
    """The seed of request `index`, derived from a common base: a signed 64-bit integer."""
    digest = hashlib.blake2b(f"{base}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
