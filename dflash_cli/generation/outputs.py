"""Outputs of a run: text to stdout, rows to a file, figures to a progress line."""

import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from dflash_cli.documents.atomic_file import atomic_text, json_line
from dflash_cli.generation.answers import Answer, AnswerRow, Event, split_step
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.token_meter import TokenMeter
from dflash_cli.generation.tokenizer import REPLACEMENT, StreamDecoder, Tokenizer
from dflash_cli.terminal import console

Sink = Callable[[Event], None]
"""Receives the events of a run. The `ExitStack` that opened a sink also closes it."""


class Headings:
    """A heading line before each answer, if there are several answers and stdout is a terminal."""

    def __init__(self, rows: Sequence[PromptRow]) -> None:
        self._num_rows = len(rows)
        self._is_shown = sum(row.num_turns for row in rows) > 1 and console.is_terminal()

    def before(self, row: PromptRow, turn: int) -> str:
        """`--- prompt 2 of 3 ---`, or nothing."""
        if not self._is_shown:
            return ""
        which = f"prompt {row.index + 1} of {self._num_rows}"
        if row.num_turns > 1:
            which += f", turn {turn + 1} of {row.num_turns}"
        return console.dim(f"--- {which} ---") + "\n"


class TextSink:
    """Streams each row to stdout in input order; later rows wait. Prints ids for a target without a tokenizer."""

    def __init__(self, rows: Sequence[PromptRow]) -> None:
        self._pending = {row.index: row.num_turns for row in rows}
        self._headings = Headings(rows)
        self._held: dict[int, list[str]] = {row.index: [self._headings.before(row, 0)] for row in rows}
        self._is_line_open = False

    def end_line(self) -> None:
        """End a line that an interruption left open, so that the next message starts on its own line."""
        if self._is_line_open:
            console.result("")
            self._is_line_open = False

    def __call__(self, event: Event) -> None:
        index = event.row.index
        ids = "".join(f"{token} " for token in event.token_ids)
        self._held[index].append(ids if event.text is None else event.text)
        if event.answer is not None:
            # A request that failed before its first token prints nothing, not even an empty line.
            has_failed = event.answer.output.error is not None
            self._held[index].append("\n" if event.answer.output.token_ids or not has_failed else "")
            self._pending[index] -= 1
            if self._pending[index]:
                self._held[index].append(self._headings.before(event.row, event.row.num_turns - self._pending[index]))
        self._release()

    def _release(self) -> None:
        """Print the text of the first unfinished row, and of every finished row before it."""
        while self._held:
            index = next(iter(self._held))
            text = "".join(self._held[index])
            self._held[index].clear()
            if text:
                self._is_line_open = not text.endswith("\n")
                console.result_text(text)
            if self._pending[index]:
                return
            del self._held[index]


TRACE_LEGEND = (
    "each line is a step: accepted/drafted [accepted tokens][the target's own token][the draft token it replaced]"
)
POSITION_STYLES = tuple(f"color({number})" for number in (28, 29, 30, 31, 32, 33))
"""Styles of accepted tokens by position, from green to blue; later positions use the last one."""


class TraceSink:
    """Shows each answer when it ends; the first prompts step by step, with accepted, own and replaced tokens."""

    def __init__(self, rows: Sequence[PromptRow], tokenizer: Tokenizer | None, num_traced: int) -> None:
        self._num_traced = num_traced
        self._in_order = InOrder(rows)
        self._headings = Headings(rows)
        self._tokenizer = tokenizer
        console.status(TRACE_LEGEND)

    def __call__(self, event: Event) -> None:
        for answer in self._in_order.push(event):
            if answer.output.error is not None:
                continue
            console.result_text(self._headings.before(answer.row, answer.turn))
            if answer.row.prompt_index >= self._num_traced:
                console.result_text((answer.text or " ".join(map(str, answer.output.token_ids))) + "\n")
                continue
            for line in trace_lines(answer, self._tokenizer):
                console.spans(line)


class RowSink:
    """Writes one JSON line per answer, in the order of prompts and turns."""

    def __init__(
        self,
        rows: Sequence[PromptRow],
        write: Callable[[str], object],
        num_speculative_tokens: int,
        *,
        num_traced: int = 0,
    ) -> None:
        self._in_order = InOrder(rows)
        self._write = write
        self._num_speculative_tokens = num_speculative_tokens
        self._num_traced = num_traced

    def __call__(self, event: Event) -> None:
        self._write_all(self._in_order.push(event))

    def close(self) -> None:
        """Write answers that still wait for earlier rows, for example after an interruption."""
        self._write_all(self._in_order.rest())

    def _write_all(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            with_trace = answer.row.prompt_index < self._num_traced
            row = AnswerRow.of(answer, self._num_speculative_tokens, with_trace=with_trace)
            self._write(json_line(row))


class InOrder:
    """Holds answers back until all earlier answers, by row and turn, have ended."""

    def __init__(self, rows: Sequence[PromptRow]) -> None:
        self._order = iter([(row.index, turn) for row in rows for turn in range(row.num_turns)])
        self._next = next(self._order, None)
        self._held: dict[tuple[int, int], Answer] = {}

    def push(self, event: Event) -> Iterator[Answer]:
        """Take an event and yield the answers that no longer wait."""
        if event.answer is not None:
            self._held[event.row.index, event.answer.turn] = event.answer
        while self._next is not None and self._next in self._held:
            yield self._held.pop(self._next)
            self._next = next(self._order, None)

    def rest(self) -> Iterator[Answer]:
        """Yield all answers that still wait, in order."""
        for key in sorted(self._held):
            yield self._held.pop(key)


class ProgressSink:
    """Shows how many prompts are answered, with the acceptance length so far."""

    def __init__(self, num_answers: int, stack: ExitStack, max_new_tokens: int | None = None) -> None:
        self._meter = TokenMeter(num_answers, max_new_tokens)
        stack.enter_context(self._meter)
        self._num_answers = self._num_tokens = self._num_steps = 0

    def __call__(self, event: Event) -> None:
        if event.answer is not None:
            self._num_answers += 1
            self._num_tokens += sum(event.answer.output.acceptance_lengths)
            self._num_steps += len(event.answer.output.acceptance_lengths)
        self._meter.tell(event, self._num_answers, self._length)

    def _length(self) -> str:
        return f"{self._num_tokens / self._num_steps:.2f}" if self._num_steps else ""


def open_row_sink(
    rows: Sequence[PromptRow],
    output: str,
    stack: ExitStack,
    num_speculative_tokens: int,
    *,
    num_traced: int = 0,
) -> RowSink:
    """Return a sink that writes rows to stdout (`-`) or to a file that appears when the run is complete.

    `stack` closes the sink before the file.
    """
    write: Callable[[str], object] = console.result_text
    if output != "-":
        write = stack.enter_context(atomic_text(Path(output))).write
    sink = RowSink(rows, write, num_speculative_tokens, num_traced=num_traced)
    stack.callback(sink.close)
    return sink


def trace_lines(answer: Answer, tokenizer: Tokenizer | None) -> list[list[tuple[str, str]]]:
    """Return one line per verify step, as (text, style) spans."""
    lines = []
    for step in answer.output.drafts:
        accepted, bonus, replaced = split_step(step, answer.output.token_ids)
        lines.append(
            [
                (f"{step.num_accepted}/{len(step.draft_ids)} ", "dim"),
                *_by_position(accepted, tokenizer),
                (show(bonus, tokenizer), "bold"),
                (show(replaced, tokenizer), "red strike"),
            ]
        )
    return lines


def show_steps(answers: Sequence[Answer], tokenizer: Tokenizer | None, num_prompts: int) -> None:
    """Print the steps of the first `num_prompts` prompts with answers."""
    if not num_prompts:
        return
    console.status(TRACE_LEGEND)
    chosen = sorted({answer.row.index for answer in answers})[:num_prompts]
    for answer in sorted(answers, key=lambda item: (item.row.index, item.turn)):
        if answer.row.index in chosen:
            console.result("", f"steps of {answer.row.where}")
            for line in trace_lines(answer, tokenizer):
                console.spans(line)


def show(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """Return tokens on one line, in brackets, so that they are separated without colour."""
    return f"[{visible(token_ids, tokenizer)}]" if token_ids else ""


def visible(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """Return the text of tokens on one line, with control characters escaped. Tokens without text become ids."""
    if tokenizer is None:
        return " ".join(map(str, token_ids))
    text = tokenizer.decode(token_ids)
    if not text or text == REPLACEMENT:
        return " ".join(f"<{token_id}>" for token_id in token_ids)
    return _escaped(text)


def _escaped(text: str) -> str:
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    is_hidden = unicodedata.category(character)[0] == "C" or character in "\u2028\u2029\\"
    return character.encode("unicode_escape").decode() if is_hidden else character


def _by_position(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[tuple[str, str]]:
    """Return accepted tokens as `show` prints them, each in the style of its position."""
    if not token_ids:
        return []
    if tokenizer is None:
        pieces = [str(token_id) for token_id in token_ids]
        pieces[1:] = [f" {piece}" for piece in pieces[1:]]
    else:
        decoder = StreamDecoder(tokenizer)
        pieces = [_escaped(decoder.push([token_id])) for token_id in token_ids]
        pieces[-1] += _escaped(decoder.finish())
    last = len(POSITION_STYLES) - 1
    inside = [(piece, POSITION_STYLES[min(place, last)]) for place, piece in enumerate(pieces)]
    return [("[", "dim"), *inside, ("]", "dim")]
