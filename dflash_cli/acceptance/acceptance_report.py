"""One evaluation as JSON, and the headline, legend and tables that every form of a report shows."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from dflash_cli.acceptance.acceptance_figures import find_figures
from dflash_cli.acceptance.calibration import TITLE as CALIBRATION_TITLE
from dflash_cli.acceptance.calibration import Calibration, PredictedBlock
from dflash_cli.acceptance.condition_results import ConditionResult
from dflash_cli.acceptance.context_curve import ContextCurve
from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.curve_shape import CurveShape, find_shapes, lookup_of
from dflash_cli.acceptance.disaggregated import TITLE, Disaggregation
from dflash_cli.acceptance.draft_confidence import TITLE as CONFIDENCE_TITLE
from dflash_cli.acceptance.draft_confidence import DraftConfidence
from dflash_cli.acceptance.exact_match import ExactMatch
from dflash_cli.acceptance.intervals.enough_prompts import why_no_interval
from dflash_cli.acceptance.intervals.statistics import (
    DEFINITIONS,
    Anchors,
    Interval,
    Summary,
    limit_text,
    value_text,
)
from dflash_cli.acceptance.rejected_tokens import RejectedToken
from dflash_cli.acceptance.tree_results import TITLE as TREE_TITLE
from dflash_cli.acceptance.tree_results import TreeResult, tree_table
from dflash_cli.figures.figure import Figure
from dflash_cli.generation.prompt_source import Failure, PromptSource
from dflash_cli.generation.run_facts import EvaluationRun, ReplayRun
from dflash_cli.terminal.shown import Shown, Table
from dflash_runtime.documents import HIDDEN, INLINE, NOT_REQUIRED, computed_key, to_json
from dflash_runtime.phrases import shorten

TABLE_NOTE = "conditional: acceptance rate given that the previous position was accepted; shaded: the interval"
MEANING = "tokens per verify step, in whole blocks, the target's own included (as in vLLM)"
PAST_END = 0.95
"""If the answers keep a smaller share of the counted tokens, the legend gives the length up to their ends too."""
REJECTED = "tokens most often rejected"
CONFIDENCE = 0.95
"""Confidence of the limit that a result without an interval states."""
BAR_WIDTH = 24
NAME_WIDTH = 16
SHOWN_TOKENS, SHOWN_REPLACEMENTS = 10, 2
"""Number of rejected tokens, and of replacements for each, that tables show. JSON has more."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Evaluation(Shown):
    """Result of `dflash eval-acceptance`. The total pools all conditions."""

    KIND: ClassVar[str] = "eval-acceptance"

    total: Annotated[Summary, INLINE]
    categories: Mapping[str, Summary]
    settings: Annotated[Mapping[str, Any], "everything that decides the result; --resume compares it"]
    measured: EvaluationRun | ReplayRun
    prompts: PromptSource
    conversations: Annotated[tuple[ConversationCounts, ...], NOT_REQUIRED] = ()
    failed: Annotated[tuple[Failure, ...], "prompts that were not measured and are not in the result"] = ()
    anchors: Annotated[Anchors | None, "acceptance over every anchor; only in a replay"] = None
    conditions: Annotated[tuple[ConditionResult, ...], NOT_REQUIRED, "empty without conditions"] = ()
    context: Annotated[ContextCurve | None, NOT_REQUIRED, "with --context-lengths: falls of acceptance"] = None
    exact_match: Annotated[tuple[ExactMatch, ...], NOT_REQUIRED, "for answers with a reference number"] = ()
    rejected_tokens: Annotated[tuple[RejectedToken, ...], NOT_REQUIRED, "tokens rejected most often"] = ()
    draft_confidence: Annotated[
        DraftConfidence | None,
        NOT_REQUIRED,
        "the draft's confidence beside its acceptance; without a confidence head only with --calibration",
    ] = None
    calibration: Annotated[
        Calibration | None, NOT_REQUIRED, "how well the draft's confidence predicts acceptance of held-out prompts"
    ] = None
    blocks: Annotated[tuple[PredictedBlock, ...], HIDDEN] = ()
    trees: Annotated[
        tuple[TreeResult, ...], NOT_REQUIRED, "with --mode replay --tree: trees of these sizes along the same texts"
    ] = ()
    disaggregation: Annotated[
        Disaggregation | None,
        NOT_REQUIRED,
        "with --disaggregated: prefill and decode in two engines, compared with one engine",
    ] = None
    seconds: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", round(self.seconds, 6))

    @property
    def num_prompts(self) -> int:
        """Number of requested prompts, measured or not. A prompt counts once for each condition."""
        num_measured = sum(item.summary.num_conversations for item in self.conditions)
        return (num_measured or self.total.num_conversations) + self.num_failed

    @property
    @computed_key
    def num_failed(self) -> int:
        """Number of prompts that were not measured."""
        return len(self.failed)

    @property
    def base(self) -> Summary:
        """The summary by which the draft is judged: the total, or the first condition if there are conditions."""
        return self.conditions[0].summary if self.conditions else self.total

    @property
    @computed_key
    def shapes(self) -> list[CurveShape]:
        """Shapes of the acceptance curve that point to a fault of a draft model."""
        first = self.conditions[0].condition.name if self.conditions else None
        conversations = [item for item in self.conversations if item.condition == first]
        return find_shapes(self.base.counts, conversations, self.settings)

    def summary(self) -> list[str]:
        return [headline(self), *legend(self)]

    def shown_tables(self) -> Mapping[str, Table]:
        return tables(self, is_full=False)

    def shown_figures(self) -> Sequence[Figure]:
        known = self.total.counts.acceptance_len is not None
        return find_figures({str(self.settings.get("draft")): self}) if known else ()

    @property
    def remarks(self) -> list[list[str]]:
        """Paragraphs about context, right answers, calibration and, with prompts prefilled elsewhere, the hand-off."""
        found = [self.context.lines] if self.context is not None else []
        found += [item.lines for item in self.exact_match]
        if self.calibration is not None:
            found.append([self.calibration.line])
        return found if self.disaggregation is None else [*found, self.disaggregation.lines]


def headline(evaluation: Evaluation) -> str:
    """Return `acceptance length 3.52 [3.31, 3.74], at most 8`, and warnings such as capped verification."""
    total = evaluation.total
    block = total.counts.num_speculative_tokens + 1
    parts = [f"acceptance length {total.length_text}, at most {block}"]
    if total.counts.is_capped:
        num_verified = sum(count > 0 for count in total.counts.per_pos_verified)
        parts.append(f"capped: of {block - 1} drafted tokens {num_verified} were verified")
    if num_nodes := evaluation.settings.get("num_tree_nodes"):
        parts.append(f"from trees of {num_nodes} drafted tokens")
    if evaluation.failed:
        parts.append(f"{evaluation.num_failed} of {evaluation.num_prompts} prompts not measured")
    if (lookup := lookup_of(evaluation.settings)) is not None:
        parts.append(f"drafted by {lookup} without a draft model")
    if evaluation.prompts.is_named:
        parts.append(f"on {evaluation.prompts.name}")
    if len(evaluation.conditions) > 1:
        parts.append(f"over {len(evaluation.conditions)} conditions")
    return ", ".join(parts)


def legend(evaluation: Evaluation) -> list[str]:
    """Return lines that explain the acceptance length of the headline, its interval and its largest possible value."""
    block = evaluation.total.counts.num_speculative_tokens + 1
    interval = evaluation.total.acceptance_len_interval
    lines = [
        MEANING,
        f"at most {block}: {block - 1} drafted tokens and the target's own",
    ]
    if interval is not None:
        lines[1] += f"; in brackets, the {100 * interval.confidence:g}% interval over prompts"
    else:
        lines[1] += f"; no interval: {evaluation.total.acceptance_len_no_interval}"
    if evaluation.total.num_units:
        lines.append(limit_text(evaluation.total.num_units, CONFIDENCE if interval is None else interval.confidence))
    lines += past_end(evaluation.total)
    if evaluation.anchors is not None:
        anchors = evaluation.anchors
        length = value_text(anchors.mean_over_anchors, anchors.mean_over_anchors_interval)
        mean = f"mean over {anchors.num_anchors} anchors {length}"
        lines.append(f"{mean}: another mean, which includes blocks that a live run skips")
    if evaluation.conditions:
        lines.append("by condition: mean tokens per prompt; difference to the first condition, paired by prompt")
    return [*lines, *evaluation.prompts.lines]


def past_end(total: Summary) -> list[str]:
    """Return a line if many counted tokens lie past the ends of the answers."""
    committed, length = (total.definitions.get(name) for name in ("committed", "vllm"))
    if committed is None or length is None or committed >= PAST_END * length:
        return []
    return [f"answers end within their last blocks: {committed:.3f} tokens per step are part of an answer"]


def tables(evaluation: Evaluation, *, is_full: bool = True) -> dict[str, Table]:
    """Return columns and rows by title, all within 80 columns. `is_full` adds rejected tokens and other definitions."""
    found = {"by position": position_table(evaluation.total)}
    if evaluation.trees:
        found[TREE_TITLE] = tree_table(evaluation.trees, evaluation.total)
    if evaluation.conditions:
        found["by condition"] = _condition_table(evaluation)
    if evaluation.categories:
        found["by category"] = _category_table(evaluation)
    if evaluation.draft_confidence is not None:
        found[CONFIDENCE_TITLE] = evaluation.draft_confidence.table
    if evaluation.calibration is not None:
        found[CALIBRATION_TITLE] = evaluation.calibration.table
    if evaluation.disaggregation is not None:
        found[TITLE] = evaluation.disaggregation.table
    if is_full and evaluation.rejected_tokens:
        found[REJECTED] = _rejected_table(evaluation.rejected_tokens)
    if is_full:
        found["by each project's own definition"] = _definition_table(evaluation.total)
    return found


def provenance(evaluation: Evaluation) -> dict[str, Any]:
    """Return known facts by name: what was measured, settings, versions, command and date."""
    prompts = {f"prompts.{name}": value for name, value in _flat(to_json(evaluation.prompts)).items() if value}
    facts = {**evaluation.settings, **prompts, **_flat(to_json(evaluation.measured))}
    return {name: value for name, value in facts.items() if value is not None}


def command_line(evaluation: Evaluation, *, draft: str | None = None, target: str | None = None) -> str:
    """Return the command of the evaluation, with the names under which the draft and the target are published."""
    argv = list(evaluation.measured.argv[1:])
    for name, flags in ((draft, ("eval-acceptance", "--draft", "-d")), (target, ("--target", "-t"))):
        for place in range(1, len(argv)):
            if name is not None and argv[place - 1] in flags and not argv[place].startswith("-"):
                argv[place] = name
    return shlex.join(["dflash", *argv])


def _flat(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested facts on one level, such as `draft.commit`."""
    flat: dict[str, Any] = {}
    for name, value in measured.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = shlex.join(value) if name == "argv" else value
    return flat


def position_table(total: Summary) -> Table:
    """Return acceptance by position, as columns and rows."""
    counts = total.counts
    rows = [
        (
            str(place + 1),
            f"{accepted}",
            value_text(rate, total.per_pos_intervals[place]),
            value_text(conditional),
            _bar(rate, total.per_pos_intervals[place]),
        )
        for place, (accepted, rate, conditional) in enumerate(
            zip(counts.per_pos_accepted, counts.per_pos_acceptance_rates, total.per_pos_conditional_rates, strict=False)
        )
        if counts.per_pos_verified[place]
    ]
    return ("position", "accepted", "share of steps", "conditional", ""), rows


def _definition_table(total: Summary) -> Table:
    rows = [(name, value_text(total.definitions[name]), meaning) for name, meaning in DEFINITIONS.items()]
    return ("definition", "value", "meaning"), rows


def _condition_table(evaluation: Evaluation) -> Table:
    rows = [
        (
            item.condition.name,
            str(item.summary.num_conversations),
            "-" if item.prompt_len is None else f"{item.prompt_len:.0f}",
            item.summary.length_text,
            "" if item.difference is None else value_text(item.difference, item.difference_interval, "+.2f"),
        )
        for item in evaluation.conditions
    ]
    return ("condition", "prompts", "tokens", "acceptance length", "against the first"), rows


def _category_table(evaluation: Evaluation) -> Table:
    rows = [
        (
            shorten(name, NAME_WIDTH),
            str(summary.num_conversations),
            str(summary.counts.num_drafts),
            summary.length_text
            + (" (too few prompts)" if summary.num_units and why_no_interval(summary.num_units) else ""),
        )
        for name, summary in evaluation.categories.items()
    ]
    total = evaluation.total
    rows.append(("all", str(total.num_conversations), str(total.counts.num_drafts), total.length_text))
    return ("category", "prompts", "steps", "acceptance length"), rows


def _bar(rate: float, interval: Interval | None) -> str:
    """Return the rate as a bar. With an interval, it is solid up to the lower end and shaded up to the upper end."""
    solid, light = (interval.low, interval.high) if interval is not None else (rate, rate)
    num_solid = round(solid * BAR_WIDTH)
    return "█" * num_solid + "░" * (round(light * BAR_WIDTH) - num_solid)


def _rejected_table(tokens: Sequence[RejectedToken]) -> Table:
    """Return the most often rejected tokens, as columns and rows. Brackets make leading and trailing spaces visible."""
    rows = [
        (
            shorten(f"[{item.text}]", NAME_WIDTH),
            str(item.num_rejected),
            str(item.num_judged),
            f"{item.rate:.2f}",
            "  ".join(
                f"{shorten(f'[{other.text}]', NAME_WIDTH)} {other.count}"
                for other in item.replacements[:SHOWN_REPLACEMENTS]
            ),
        )
        for item in tokens[:SHOWN_TOKENS]
    ]
    return ("token", "rejected", "judged", "share", "the target chose"), rows
