"""Prefill and decode apart, beside one engine that does both: is the text the same, and is as much accepted.

Both answer the same prompts, so they are compared turn by turn. Of text, tokens must be the same, or as likely to the
target as `--check-lossless` allows. Of acceptance, it is the difference of the acceptance lengths, and of how often
position 1 is accepted, paired by prompt: an interval below nothing is a fall. In float32 rounding does not change what
is accepted, so there any step that differs is a fault, however few prompts there are.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING

from dflash_cli.acceptance.disaggregated import EXACT, Disaggregation, SideBySide
from dflash_cli.acceptance.intervals.acceptance_difference import TokenCounts
from dflash_cli.generation.answers import Answer, Tally
from dflash_cli.handoff.handoff_problems import without_echoes
from dflash_cli.terminal import console
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request import RequestOutput

if TYPE_CHECKING:
    from dflash_cli.acceptance.acceptance_report import Evaluation
    from dflash_cli.acceptance.measure import EvaluationPlan
    from dflash_cli.generation.answers import Answering
    from dflash_cli.generation.loaded_pair import PairSession
    from dflash_cli.handoff.handed_session import HandedSession

Pair = tuple[RequestOutput, RequestOutput]


def hold_against_one_engine(
    evaluation: "Evaluation", answering: "Answering", request: "EvaluationPlan", tally: Tally
) -> "Evaluation":
    """The evaluation with what one engine says to the same prompts, where another process has prefilled them."""
    from dflash_cli.handoff.handed_session import HandedSession

    if not isinstance(answering, HandedSession):
        return evaluation
    found = _compare_with_one_engine(answering, request, _all_answers(answering, request, tally))
    return replace(evaluation, disaggregation=found)


def _compare_with_one_engine(
    session: "HandedSession", request: "EvaluationPlan", answers: Sequence[Answer]
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


def _all_answers(session: "HandedSession", request: "EvaluationPlan", tally: Tally) -> list[Answer]:
    """The answers of a run that succeeded, those of an earlier one that it went on from among them."""
    from dflash_cli.acceptance.journal import Journal

    params = request.params.with_stops(session.stop_token_ids)
    settings = session.run_settings(params, chat=request.chat)
    earlier = Journal(request.journal, settings, request.rows, resume=True).answers if request.resume else []
    found = {(item.row.index, item.turn): item for item in (*earlier, *tally.answers) if item.output.error is None}
    return [found[key] for key in sorted(found)]


def _ask(session: "PairSession", request: "EvaluationPlan") -> list[Answer]:
    """The answers of one engine to the prompts of a request."""
    from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
    from dflash_cli.acceptance.measure import measure

    console.status("the same prompts by one engine ...")
    again = replace(request, journal=None, resume=False, num_resamples=0, scores=False)
    tally = Tally(session.num_draft_tokens)
    with AcceptanceProgress(sum(row.num_turns for row in request.rows)) as progress:
        measure(session, again, tally=tally, progress=progress)
    return [answer for answer in tally.answers if answer.output.error is None]


def _is_prefilled_here(output: RequestOutput) -> bool:
    """Whether no hand-off came; an answer that ended with its first token had nothing to hand over."""
    return not output.num_loaded and len(output.token_ids) > 1


def _is_rounding(session: "HandedSession", request: "EvaluationPlan", output: RequestOutput) -> bool:
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
