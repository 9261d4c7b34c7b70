"""Answer prompts turn by turn, yielding text as it is committed. Does not write to the terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self

from dflash_cli.generation.prompts import Conversation, PromptRow
from dflash_cli.generation.run_facts import PairRun
from dflash_cli.generation.tokenizer import StreamDecoder, Tokenizer
from dflash_runtime.documents import NOT_REQUIRED, OPTIONAL
from dflash_runtime.errors import RequestError
from dflash_runtime.metrics import AcceptanceCounts, Metrics, count_acceptance, request_metrics
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request import DraftStep, FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams, derive_seed

if TYPE_CHECKING:
    from dflash_runtime.llm import Delta

Streaming = Callable[[list[list[int]], list[SamplingParams], list[PromptRow]], Iterator["Delta"]]
"""Runs prompts, each with its sampling parameters and its row, and yields their tokens."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished turn of one row."""

    row: PromptRow
    turn: int
    output: RequestOutput
    text: str | None


def split_step(step: DraftStep, token_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the accepted draft tokens, the bonus token, and the draft token that the bonus replaced.

    Tokens that stops or limits cut from the output are left out.
    """
    kept = tuple(token_ids[step.start : step.start + step.num_committed])
    accepted, bonus = kept[: step.num_accepted], kept[step.num_accepted :]
    return accepted, bonus, () if step.rejected_id is None else (step.rejected_id,)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """The token ids of one verify step."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    bonus: tuple[int, ...]
    replaced: Annotated[tuple[int, ...], "the draft token that the bonus replaced"]
    confidences: Annotated[tuple[float | None, ...], OPTIONAL, "see `draft_confidences`"] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRow:
    """One answer, as `dflash generate --output` writes it."""

    index: int
    id: Annotated[str | int | None, OPTIONAL] = None
    turn: Annotated[int | None, OPTIONAL] = None
    prompt_index: Annotated[int | None, OPTIONAL, "set if prompts are answered under several conditions"] = None
    condition: Annotated[str | None, OPTIONAL] = None
    is_plain: Annotated[bool, OPTIONAL, "answered without the draft"] = False
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    acceptance_lengths: Annotated[tuple[int, ...], "accepted drafts + 1 of each verify step"]
    verify_widths: Annotated[
        tuple[int, ...], NOT_REQUIRED, "rows that each verify step verified; of a tree, rows of its longest path"
    ] = ()
    rejected_ids: Annotated[tuple[int | None, ...], NOT_REQUIRED, "the draft token that each verify step rejected"] = ()
    draft_confidences: Annotated[
        tuple[tuple[float | None, ...], ...],
        OPTIONAL,
        "for each draft token of each verify step, the draft's prediction that the target accepts it if it accepts all "
        "tokens before it; only of a DSpark draft with a confidence head, null if not a number",
    ] = ()
    metrics: Annotated[Metrics | None, NOT_REQUIRED] = None
    num_loaded: Annotated[int, OPTIONAL, "tokens whose KV came from a hand-off"] = 0
    trace: Annotated[tuple[TracedStep, ...] | None, OPTIONAL] = None
    error: Annotated[str | None, OPTIONAL] = None

    @classmethod
    def of(cls, answer: Answer, num_speculative_tokens: int, *, with_trace: bool = False, **more: Any) -> Self:
        """Return the row of an answer of a run that drafts `num_speculative_tokens` per step, with `more` fields."""
        row, output = answer.row, answer.output
        trace = tuple(
            TracedStep(
                tuple(token for token in step.draft_ids if token >= 0),
                *split_step(step, output.token_ids),
                step.confidences,
            )
            for step in output.drafts
        )
        fields: dict[str, Any] = {
            "index": row.index,
            "id": row.id,
            "turn": answer.turn if row.kind == "turns" else None,
            "prompt_index": row.prompt_index if row.condition is not None else None,
            "condition": row.condition_name,
            "is_plain": row.is_plain,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": output.token_ids,
            "text": answer.text,
            "finish_reason": output.finish_reason,
            "acceptance_lengths": output.acceptance_lengths,
            "verify_widths": output.verify_widths,
            "rejected_ids": output.rejected_ids,
            "draft_confidences": output.draft_confidences,
            "metrics": request_metrics(output, num_speculative_tokens),
            "num_loaded": output.num_loaded,
            "trace": trace if with_trace else None,
            "error": output.error,
        }
        return cls(**fields | more)


@dataclass(frozen=True, slots=True)
class Event:
    """Tokens that one step committed for one row.

    `text` is the new text that later tokens cannot change: a character split over tokens comes with its last token.
    `text` is None without a tokenizer. `answer` is set in the last event of a turn.
    """

    row: PromptRow
    token_ids: tuple[int, ...]
    text: str | None
    answer: Answer | None = None


class Answering(Protocol):
    """Answers the prompts of a run: a pair loaded in this process, or workers."""

    @property
    def references(self) -> Mapping[str, str | None]: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def num_draft_tokens(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def check_params(self, params: SamplingParams) -> None: ...

    def run_settings(self, params: SamplingParams, *, chat: bool) -> dict[str, Any]: ...

    def describe(self) -> PairRun: ...

    def warm_up(self, params: SamplingParams, num_prompts: int) -> None: ...

    def answer(self, rows: Sequence[PromptRow], params: SamplingParams, *, chat: bool) -> Iterator[Event]: ...


@dataclass(slots=True)
class Tally:
    """Answers and token counts of a run, collected from its events."""

    num_speculative_tokens: int
    num_tokens: int = 0
    answers: list[Answer] = field(default_factory=list)

    def add(self, event: Event) -> None:
        self.num_tokens += len(event.token_ids)
        if event.answer is not None:
            self.answers.append(event.answer)

    @property
    def outputs(self) -> list[RequestOutput]:
        return [answer.output for answer in self.answers if answer.output.error is None]

    @property
    def counts(self) -> AcceptanceCounts:
        return count_acceptance(self.outputs, self.num_speculative_tokens)

    def figures(self, seconds: float) -> str:
        """`128 tokens, 41 steps, acceptance length 3.12, 95.2 tokens/s (with prompts, without loading)`."""
        counts = self.counts
        parts = [plural(self.num_tokens, "token")]
        if counts.acceptance_len is not None:
            capped = f" (capped: {counts.draft_tokens_per_step:.1f} of {self.num_speculative_tokens} drafts verified)"
            length = f"acceptance length {counts.acceptance_len:.2f}" + (capped if counts.is_capped else "")
            parts += [plural(counts.num_drafts, "step"), length]
        if seconds > 0 and self.num_tokens:
            parts.append(f"{self.num_tokens / seconds:.1f} tokens/s (with prompts, without loading)")
        return ", ".join(parts)


def answer_rows(
    rows: Sequence[PromptRow],
    params: SamplingParams,
    *,
    stream: Streaming,
    tokenizer: Tokenizer | None,
    chat: bool = False,
) -> Iterator[Event]:
    """Answer every row. All rows take their first turn together, then their second, and so on.

    If a turn cannot be served, its answer and the answers of the row's later turns have an error. Other rows go on.
    """
    pending = [Conversation(row) for row in rows]
    while pending:
        prompts, ready = [], []
        for conversation in pending:
            try:
                prompts.append(conversation.next_prompt(tokenizer, chat=chat))
                ready.append(conversation)
            except RequestError as error:
                yield from _fail(conversation, error.message, error.exit_code)
        pending = ready
        texts = [_Text(tokenizer) for _ in pending]
        given = [own_seed(params, item.row) for item in pending]
        for delta in stream(prompts, given, [item.row for item in pending]):
            conversation, text = pending[delta.index], texts[delta.index]
            output = _of_row(delta.output, conversation) if delta.output is not None else None
            if output is not None and output.error is not None:
                yield from _fail(conversation, output.error, output.exit_code, output)
                continue
            released = text.push(delta.token_ids, is_last=output is not None)
            answer = None
            if output is not None:
                answer = Answer(conversation.row, conversation.turn, output, text.whole)
                conversation.add_answer(text.whole)
            yield Event(conversation.row, delta.token_ids, released, answer)
        pending = [conversation for conversation in pending if not conversation.is_done]


def fail_row(row: PromptRow, reason: str, code: int) -> Iterator[Event]:
    """Yield failed answers to all turns of a row. `code` is the exit code of the command."""
    return _fail(Conversation(row), reason, code)


def own_seed(params: SamplingParams, row: PromptRow) -> SamplingParams:
    """Derive the prompt's own seed. With one seed for all, prompts would draw equal numbers at equal positions."""
    return params if params.seed is None else replace(params, seed=derive_seed(params.seed, row.prompt_index))


def _of_row(output: RequestOutput, conversation: Conversation) -> RequestOutput:
    """Return the output with the row's own index, and with the row's name in its error."""
    row = conversation.row
    if output.error is None:
        return replace(output, index=row.index)
    turn = f"turn {conversation.turn + 1}: " if row.num_turns > 1 else ""
    return replace(output, index=row.index, error=f"{row.where}: {turn}{output.error}")


def _fail(conversation: Conversation, reason: str, code: int, output: RequestOutput | None = None) -> Iterator[Event]:
    """Yield the answers of a failed turn and of the turns after it."""
    row, failed = conversation.row, conversation.turn
    for turn in range(failed, row.num_turns):
        if turn > failed or output is None:
            error = (
                reason
                if turn == failed
                else f"{row.where}: turn {turn + 1} was skipped because turn {failed + 1} failed"
            )
            output = RequestOutput(
                index=row.index,
                prompt_token_ids=(),
                token_ids=(),
                finish_reason=FinishReason.ERROR,
                error=error,
                exit_code=code,
            )
        yield Event(row, (), None, Answer(row, turn, output, None))
    conversation.fail()


class _Text:
    """The text of one turn as it grows; None without a tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._decoder = StreamDecoder(tokenizer) if tokenizer is not None else None
        self._pieces: list[str] = []

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> str | None:
        if self._decoder is None:
            return None
        released = self._decoder.push(token_ids)
        if is_last:
            released += self._decoder.finish()
        self._pieces.append(released)
        return released

    @property
    def whole(self) -> str | None:
        return "".join(self._pieces) if self._decoder is not None else None
