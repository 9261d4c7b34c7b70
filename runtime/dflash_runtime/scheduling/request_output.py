"""The result of one request: its tokens, and what each verify step accepted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash_runtime.errors import DFlashError
from dflash_runtime.phrases import shorten
from dflash_runtime.scheduling.request import DraftStep, FinishReason, Request

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

REPR_CHARS = 400
"""The most characters of one field in the repr of an output."""


def confidences_of(steps: Sequence[DraftStep]) -> tuple[tuple[float | None, ...], ...]:
    """The draft's predictions for the tokens of each step; empty if no step has any."""
    return tuple(step.confidences for step in steps) if any(step.confidences for step in steps) else ()


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
