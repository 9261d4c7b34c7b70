"""One request: its prompt, what was generated, and its lengths.

Lengths, in tokens:

    [0, prompt_len)            the prompt
    [prompt_len, total_len)    generated and committed
    total_len - 1              the anchor: committed, its KV row not written yet
    kv_len = total_len - 1     rows of true KV, once prefilled
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dflash_runtime.errors import RequestError


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    `stop_token_ids` end a request and are kept as its last token; `ignore_eos` makes them ordinary tokens.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

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

    def with_stops(self, token_ids: Iterable[int]) -> "SamplingParams":
        """The same parameters, ending at these ids as well."""
        return replace(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, *token_ids})))


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt on its way through the engine. Only the scheduler changes it."""

    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    kept_lengths: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

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
    def anchor_id(self) -> int:
        return self.output_token_ids[-1]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def commit(self, token_ids: list[int], max_model_len: int) -> list[int]:
        """Make tokens final, up to the first stop token or limit, and return those that were kept."""
        room = min(self.params.max_new_tokens - len(self.output_token_ids), max_model_len - self.total_len)
        kept = token_ids[:room]
        stop = next((place for place, token in enumerate(kept) if self._is_stop(token)), None)
        if stop is not None:
            kept = kept[: stop + 1]
            self.finish_reason = FinishReason.STOP
        elif len(kept) == room:
            self.finish_reason = FinishReason.LENGTH
        self.output_token_ids += kept
        return kept

    def _is_stop(self, token: int) -> bool:
        return not self.params.ignore_eos and token in self.params.stop_token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of a request.

    `acceptance_lengths` has accepted + 1 for each verify step, untruncated; the prefill's token is no step.
    `kept_lengths` has the tokens each of those steps left in the output after stops and limits.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    acceptance_lengths: tuple[int, ...]
    kept_lengths: tuple[int, ...]
