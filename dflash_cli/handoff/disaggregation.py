"""Compare an evaluation with a separate prefill process to one engine on the same prompts.

Answers are compared turn by turn:

    text         equal tokens, or tokens that `--check-lossless` accepts as equally likely to the target
    acceptance   differences of the acceptance length and of the acceptance of position 1, paired by prompt. The
                 acceptance fell if an interval lies below zero.
    steps        in float32 rounding changes no accepted token, so a different step is a fault
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING

from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
from dflash_cli.acceptance.disaggregated import EXACT, Disaggregation, SideBySide
from dflash_cli.acceptance.intervals.acceptance_difference import TokenCounts
from dflash_cli.acceptance.journal import Journal
from dflash_cli.acceptance.measure import EvaluationPlan, measure
from dflash_cli.generation.answers import Answer, Tally
from dflash_cli.generation.loaded_pair import PairSession
from dflash_cli.handoff.handed_session import HandedSession
from dflash_cli.terminal import console
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request_output import RequestOutput

if TYPE_CHECKING:
    from dflash_cli.acceptance.acceptance_report import Evaluation

Pair = tuple[RequestOutput, RequestOutput]


def compare_with_one_engine(
    evaluation: "Evaluation", session: HandedSession, plan: EvaluationPlan, tally: Tally
) -> "Evaluation":
    """The evaluation with a comparison. This process alone answers the same prompts again."""
    return replace(evaluation, disaggregation=_compare(session, plan, _all_answers(session, plan, tally)))


def _compare(session: HandedSession, plan: EvaluationPlan, answers: Sequence[Answer]) -> Disaggregation:
    side = session.side
    if side.counts.num_given_up:
        prompts = plural(side.counts.num_given_up, "prompt")
        text = f"{prompts} prefilled here instead of in the prefill process: {side.counts.why_given_up}"
        console.warn(Notice(text, id="prompts-prefilled-here"))
    own = {(item.row.index, item.turn): item.output for item in _answer_alone(session.alone(), plan)}
    turns = [(item, own[item.row.index, item.turn]) for item in answers if (item.row.index, item.turn) in own]
    same_prompt = [turn for turn in turns if turn[0].output.prompt_token_ids == turn[1].prompt_token_ids]
    handed = [(item, one) for item, one in same_prompt if not _is_prefilled_here(item.output)]
    pairs = [(one, item.output) for item, one in handed]
    unlike = [pair for pair in pairs if pair[0].token_ids != pair[1].token_ids]
    indices = [item.row.prompt_index for item, _ in handed]
    return Disaggregation(
        connector=side.options.carrier,
        prefill_draft=side.options.prefill_draft,
        dtype=session.llm.pair.placement.dtype_name,
        num_turns=len(pairs),
        num_same_texts=len(pairs) - len(unlike),
        num_rounded=sum(_is_rounding(session, plan, two) for _, two in unlike),
        num_same_traces=sum(starmap(_is_same_trace, pairs)),
        acceptance_len=SideBySide.compare(*_count(pairs, indices, sum), confidence=plan.confidence),
        position_1=SideBySide.compare(*_count(pairs, indices, _num_first), confidence=plan.confidence),
        num_handed=sum(output.num_loaded > 0 for _, output in pairs),
        num_rows=sum(output.num_loaded for _, output in pairs),
        num_bytes=side.counts.num_bytes,
        num_prefilled_here=len(same_prompt) - len(handed),
        why_prefilled_here=side.counts.why_given_up or None,
        problems=tuple(dict.fromkeys((*side.counts.problems, *side.differences))),
    )


def _all_answers(session: HandedSession, plan: EvaluationPlan, tally: Tally) -> list[Answer]:
    """The answers of a run that succeeded, including the answers of an earlier run that it resumes."""
    params = plan.params.with_stops(session.stop_token_ids)
    settings = session.run_settings(params, chat=plan.chat)
    earlier = Journal(plan.journal, settings, plan.rows, resume=True).answers if plan.resume else []
    found = {(item.row.index, item.turn): item for item in (*earlier, *tally.answers) if item.output.error is None}
    return [found[key] for key in sorted(found)]


def _answer_alone(session: PairSession, plan: EvaluationPlan) -> list[Answer]:
    """The answers of one engine to the prompts of a plan."""
    console.status("answering the same prompts with one engine ...")
    again = replace(plan, journal=None, resume=False, num_resamples=0, scores=False)
    tally = Tally(session.num_draft_tokens)
    with AcceptanceProgress(sum(row.num_turns for row in plan.rows), plan.params.max_new_tokens) as progress:
        measure(session, again, tally=tally, progress=progress)
    return [answer for answer in tally.answers if answer.output.error is None]


def _is_prefilled_here(output: RequestOutput) -> bool:
    """Whether this process prefilled the prompt. An answer of one token needs no hand-off."""
    return not output.num_loaded and len(output.token_ids) > 1


def _is_rounding(session: HandedSession, plan: EvaluationPlan, output: RequestOutput) -> bool:
    """Whether rounding can explain a text that differs. Samples in bfloat16 are not judged, and count as rounding."""
    if not plan.params.is_greedy:
        return session.llm.pair.placement.dtype_name not in EXACT
    return session.llm.check_lossless([output]).is_lossless


def _is_same_trace(one: RequestOutput, two: RequestOutput) -> bool:
    """Whether all steps are equal: draft tokens and acceptance. Answers read from a file lack draft tokens."""
    has_same_counts = (one.acceptance_lengths, one.committed_lengths, one.rejected_ids) == (
        two.acceptance_lengths, two.committed_lengths, two.rejected_ids,
    )  # fmt: skip
    return has_same_counts and (not two.drafts or one.drafts == two.drafts)


def _num_first(lengths: Sequence[int]) -> int:
    """Number of steps that accepted position 1, from their acceptance lengths."""
    return sum(length > 1 for length in lengths)


def _count(
    pairs: Sequence[Pair], prompts: Sequence[int], total: Callable[[Sequence[int]], int]
) -> tuple[TokenCounts, TokenCounts]:
    """For each side and each prompt: a total over its steps, and the number of steps."""
    sides = dict.fromkeys(prompts, (0, 0)), dict.fromkeys(prompts, (0, 0))
    for pair, prompt in zip(pairs, prompts, strict=True):
        for output, counts in zip(pair, sides, strict=True):
            lengths, before = output.acceptance_lengths, counts[prompt]
            counts[prompt] = before[0] + total(lengths), before[1] + len(lengths)
    return list(sides[0].values()), list(sides[1].values())
