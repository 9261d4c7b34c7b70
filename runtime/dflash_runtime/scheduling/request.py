"""One request: its prompt, its generated tokens, and its lengths.

Lengths, in tokens:

    [0, prompt_len)            the prompt
    [prompt_len, total_len)    generated and committed
    total_len - 1              the anchor: committed, its KV row not written yet
    kv_len = total_len - 1     rows of true KV, once prefilled

While steps are in flight the device is ahead of these lengths, by at most the tokens that `num_in_flight` steps commit.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dflash_runtime.errors import DFlashError
from dflash_runtime.scheduling.sampling_params import SamplingParams, check_ids
from dflash_runtime.scheduling.text_index import TextIndex


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


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
    load_key        the key of the hand-off with its KV; None once loaded or given up
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
