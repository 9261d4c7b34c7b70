"""Prefill and decode apart, beside one engine that does both: is the text the same, and is as much accepted.

Both answer the same prompts, so they are compared turn by turn. Of text, tokens must be the same, or as likely to the
target as `--check-lossless` allows. Of acceptance, it is the difference of the acceptance lengths, and of how often
position 1 is accepted, paired by prompt: an interval below nothing is a fall. In float32 rounding does not change what
is accepted, so there any step that differs is a fault, however few prompts there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import TYPE_CHECKING, Any

from dflash_cli import console
from dflash_cli.evaluation.acceptance_difference import (
    AcceptanceDifference,
    TokenCounts,
    paired_difference,
    tokens_per_step,
)
from dflash_cli.generation.answers import Answer, Tally, plural
from dflash_cli.generation.handoffs.handoff_problems import without_echoes
from dflash_runtime.errors import GateFailed
from dflash_runtime.scheduling.request import RequestOutput

if TYPE_CHECKING:
    from dflash_cli.evaluation.acceptance_report import Evaluation
    from dflash_cli.evaluation.measure import EvaluationRequest
    from dflash_cli.generation.answers import Answering
    from dflash_cli.generation.handoffs.handed_session import HandedSession
    from dflash_cli.generation.loaded_pair import PairSession

TITLE = "prefill and decode apart, and one engine"
EXACT = ("float32", "float64")
"""Dtypes in which sums that are rounded otherwise have never changed a token that is drafted or chosen."""
SHOWN_PROBLEMS = 6

Pair = tuple[RequestOutput, RequestOutput]
Table = tuple[Sequence[str], list[tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """One ratio of one engine, of two, and how far the second is above the first; None where too few prompts say."""

    one: float | None
    two: float | None
    difference: AcceptanceDifference | None

    @classmethod
    def compare(cls, one: TokenCounts, two: TokenCounts, *, confidence: float) -> "SideBySide":
        """Ratios over the same prompts, counted as tokens and steps."""
        return cls(
            one=tokens_per_step(one), two=tokens_per_step(two), difference=paired_difference(one, two, confidence)
        )

    @property
    def has_fallen(self) -> bool:
        """Whether it is lower with two engines, by more than chance explains."""
        return self.difference is not None and self.difference.interval.high < 0

    @property
    def text(self) -> str:
        """`3.44 -> 2.31 (-1.13 [-1.31, -0.95])`."""
        change = f" ({self.change})" if self.change else ""
        return f"{_number(self.one)} -> {_number(self.two)}{change}"

    @property
    def change(self) -> str:
        """`-1.13 [-1.31, -0.95]`; without an interval as far as the prompts go."""
        if self.one is None or self.two is None:
            return ""
        span = self.difference.interval if self.difference is not None else None
        return f"{self.two - self.one:+.3f}" + (f" [{span.low:+.3f}, {span.high:+.3f}]" if span is not None else "")

    def to_json(self) -> dict[str, Any]:
        span = self.difference.interval.to_json() if self.difference is not None else None
        change = None if self.one is None or self.two is None else self.two - self.one
        return {"one_engine": self.one, "disaggregated": self.two, "difference": change, "difference_interval": span}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregation:
    """What came of prefilling in another process. A turn is one answer; those prefilled here are not compared.

    `num_rounded` texts differ as far as rounding explains it. `problems` are what did not fit of hand-offs that were
    forced, `why_prefilled_here` the reason of the first turn for which no hand-off came.
    """

    connector: str
    prefill_draft: str | None
    dtype: str
    num_turns: int
    num_same_texts: int
    num_rounded: int
    num_same_traces: int
    acceptance_len: SideBySide
    position_1: SideBySide
    num_handed: int
    num_rows: int
    num_bytes: int
    num_prefilled_here: int
    why_prefilled_here: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def fault(self) -> str | None:
        """In what the two differ by more than they may; None where they do not."""
        num_wrong = self.num_turns - self.num_same_texts - self.num_rounded
        num_unlike = self.num_turns - self.num_same_traces - self.num_rounded
        if not self.num_handed:
            return f"nothing was handed over: {self.why_prefilled_here or 'every answer ended with its first token'}"
        if num_wrong:
            return f"{plural(num_wrong, 'text')} of {self.num_turns} differ by more than rounding"
        if self.acceptance_len.has_fallen or self.position_1.has_fallen:
            return f"acceptance fell: {self._figures}"
        if num_unlike > 0 and self.dtype in EXACT:
            which = f"{num_unlike} of {self.num_turns} traces differ"
            return f"{which}, which rounding does not do in {self.dtype}: {self._figures}"
        return None

    @property
    def lines(self) -> list[str]:
        """The verdict, what may be behind it, and what it does not cover."""
        if self.fault is not None:
            lines = [f"the hand-off does not hold: {self.fault}"]
            lines += [f"what does not fit: {problem}" for problem in self.problems[:SHOWN_PROBLEMS]]
            if not self.problems and self.num_handed:
                lines.append("nothing is missing by name: rows may have been sent before they were written, or changed")
        elif self.num_same_traces == self.num_turns:
            lines = ["the hand-off holds: the same text by the same steps as one engine"]
        else:
            lines = [f"the hand-off holds: no fall of acceptance is seen, {self._figures}"]
        if self.num_prefilled_here and self.num_handed:
            lines.append(f"{plural(self.num_prefilled_here, 'prompt')} prefilled here: {self.why_prefilled_here}")
        return lines

    @property
    def table(self) -> Table:
        """Both sides' figures, and what was handed over."""
        rows: list[tuple[str, ...]] = [
            (name, _number(item.one), _number(item.two), item.change)
            for name, item in (("acceptance length", self.acceptance_len), ("share at position 1", self.position_1))
        ]
        rows += [
            ("same text", "", f"{self.num_same_texts} of {self.num_turns}", ""),
            ("same steps", "", f"{self.num_same_traces} of {self.num_turns}", ""),
            ("handed over", "", str(self.num_handed), f"{self.num_rows} rows, {self.num_bytes / 1e6:.1f} MB"),
        ]
        return ("", "one engine", "two engines", "difference"), rows

    def check(self) -> None:
        """Require that the hand-off holds.

        Raises:
            GateFailed: it does not.
        """
        if self.fault is not None:
            raise GateFailed(
                f"the hand-off does not hold: {self.fault}",
                hint=None if self.problems else "both sides need the same pair and settings; --rows keeps every step",
            )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **plain,
            "acceptance_len": self.acceptance_len.to_json(),
            "position_1": self.position_1.to_json(),
            "problems": list(self.problems),
            "holds": self.fault is None,
            "fault": self.fault,
        }

    @property
    def _figures(self) -> str:
        return f"acceptance length {self.acceptance_len.text}, position 1 {self.position_1.text}"


def hold_against_one_engine(
    evaluation: "Evaluation", answering: "Answering", request: "EvaluationRequest", tally: Tally
) -> "Evaluation":
    """The evaluation with what one engine says to the same prompts, where another process has prefilled them."""
    from dflash_cli.generation.handoffs.handed_session import HandedSession

    if not isinstance(answering, HandedSession):
        return evaluation
    found = _compare_with_one_engine(answering, request, _all_answers(answering, request, tally))
    return replace(evaluation, disaggregation=found)


def _compare_with_one_engine(
    session: "HandedSession", request: "EvaluationRequest", answers: Sequence[Answer]
) -> Disaggregation:
    """Ask one engine, which is this process's by itself, the same prompts, and hold the answers against its own."""
    if session.side.counts.num_given_up:
        console.warn(
            f"{plural(session.side.counts.num_given_up, 'prompt')} prefilled here instead of in the prefill process: "
            f"{session.side.counts.why_given_up}"
        )
    own = {(item.row.index, item.turn): item.output for item in _ask(session.alone(), request)}
    turns = [(item, own[item.row.index, item.turn]) for item in answers if (item.row.index, item.turn) in own]
    asked_alike = [turn for turn in turns if turn[0].output.prompt_token_ids == turn[1].prompt_token_ids]
    handed = [(item, one) for item, one in asked_alike if not _is_prefilled_here(item.output)]
    pairs = [(one, item.output) for item, one in handed]
    unlike = [pair for pair in pairs if pair[0].token_ids != pair[1].token_ids]
    prompts = [item.row.prompt_index for item, _ in handed]
    side = session.side
    return Disaggregation(
        connector=side.request.connector,
        prefill_draft=side.request.draft,
        dtype=session.llm.pair.placement.dtype_name,
        num_turns=len(pairs),
        num_same_texts=len(pairs) - len(unlike),
        num_rounded=sum(_is_rounding(session, request, two) for _, two in unlike),
        num_same_traces=sum(starmap(_is_same_trace, pairs)),
        acceptance_len=SideBySide.compare(*_count(pairs, prompts, sum), confidence=request.confidence),
        position_1=SideBySide.compare(*_count(pairs, prompts, _num_first), confidence=request.confidence),
        num_handed=sum(output.num_loaded > 0 for _, output in pairs),
        num_rows=sum(output.num_loaded for _, output in pairs),
        num_bytes=side.counts.num_bytes,
        num_prefilled_here=len(asked_alike) - len(handed),
        why_prefilled_here=side.counts.why_given_up or None,
        problems=tuple(without_echoes((*side.differences, *side.counts.problems))),
    )


def _all_answers(session: "HandedSession", request: "EvaluationRequest", tally: Tally) -> list[Answer]:
    """The answers of a run that succeeded, those of an earlier one that it went on from among them."""
    from dflash_cli.evaluation.journal import Journal

    params = request.params.with_stops(session.stop_token_ids)
    settings = session.run_settings(params, chat=request.chat)
    earlier = Journal(request.journal, settings, request.rows, resume=True).answers if request.resume else []
    found = {(item.row.index, item.turn): item for item in (*earlier, *tally.answers) if item.output.error is None}
    return [found[key] for key in sorted(found)]


def _ask(session: "PairSession", request: "EvaluationRequest") -> list[Answer]:
    """The answers of one engine to the prompts of a request."""
    from dflash_cli.evaluation.acceptance_progress import AcceptanceProgress
    from dflash_cli.evaluation.measure import measure

    console.status("the same prompts by one engine ...")
    again = replace(request, journal=None, resume=False, num_resamples=0, scores=False)
    tally = Tally(session.num_draft_tokens)
    with AcceptanceProgress(sum(row.num_turns for row in request.rows)) as progress:
        measure(session, again, tally=tally, progress=progress)
    return [answer for answer in tally.answers if answer.output.error is None]


def _is_prefilled_here(output: RequestOutput) -> bool:
    """Whether no hand-off came; an answer that ended with its first token had nothing to hand over."""
    return not output.num_loaded and len(output.token_ids) > 1


def _is_rounding(session: "HandedSession", request: "EvaluationRequest", output: RequestOutput) -> bool:
    """Whether a text that differs is one that rounding may make. A sample in bfloat16 is not judged, and counts so."""
    if not request.params.is_greedy:
        return session.llm.pair.placement.dtype_name not in EXACT
    return session.llm.check_lossless([output]).is_lossless


def _is_same_trace(one: RequestOutput, two: RequestOutput) -> bool:
    """Step by step the same drafts, and as many of them accepted; answers that were kept in a file have no drafts."""
    is_counted_alike = (one.acceptance_lengths, one.committed_lengths, one.rejected_ids) == (
        two.acceptance_lengths, two.committed_lengths, two.rejected_ids,
    )  # fmt: skip
    return is_counted_alike and (not two.drafts or one.drafts == two.drafts)


def _num_first(lengths: Sequence[int]) -> int:
    """Steps that accepted position 1, of their acceptance lengths."""
    return sum(length > 1 for length in lengths)


def _count(
    pairs: Sequence[Pair], prompts: Sequence[int], total: Callable[[Sequence[int]], int]
) -> tuple[TokenCounts, TokenCounts]:
    """Of either side, for each prompt: a total over its steps, and how many they are."""
    sides = dict.fromkeys(prompts, (0, 0)), dict.fromkeys(prompts, (0, 0))
    for pair, prompt in zip(pairs, prompts, strict=True):
        for output, counts in zip(pair, sides, strict=True):
            lengths, before = output.acceptance_lengths, counts[prompt]
            counts[prompt] = before[0] + total(lengths), before[1] + len(lengths)
    return list(sides[0].values()), list(sides[1].values())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
