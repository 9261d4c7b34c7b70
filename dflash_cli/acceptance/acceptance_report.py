"""One evaluation as JSON, as tables, and as Markdown."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_cli.acceptance.condition_results import ConditionResult
from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.curve_shape import CurveShape, find_shapes
from dflash_cli.acceptance.disaggregated import TITLE, Disaggregation
from dflash_cli.acceptance.exact_match import ExactMatch
from dflash_cli.acceptance.intervals.resampling import MIN_UNITS
from dflash_cli.acceptance.intervals.statistics import DEFINITIONS, MIN_FOR_POSITIONS, Interval, Summary
from dflash_cli.acceptance.rejected_tokens import RejectedToken
from dflash_cli.generation.answers import plural

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
TABLE_NOTE = "conditional: of the steps that accepted the position before; light: the interval"
REJECTED = "tokens most often rejected"
BAR_WIDTH = 24
NAME_WIDTH = 16
SHOWN_TOKENS, SHOWN_REPLACEMENTS = 10, 2
"""Of the tokens that were rejected most often, and of what the target chose instead; JSON has more."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A prompt that could not be measured; the error names it."""

    index: int
    id: str | int | None
    error: str
    exit_code: int
    condition: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {"index": self.index, "id": self.id, "error": self.error, "condition": self.condition}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Where the prompts of an evaluation come from: of `num_available`, `num_chosen` were chosen by `sample`.

    `dataset` has the facts of a dataset: repository, commit, files, format. `num_too_long` were left out because they
    are longer by themselves than a context that was asked for.
    """

    name: str
    num_available: int
    num_chosen: int | None = None
    sample: str | None = None
    sample_seed: int | None = None
    is_bundled: bool = False
    version: str | None = None
    sha256: str | None = None
    dataset: Mapping[str, Any] | None = None
    num_too_long: int = 0
    warning: str | None = None

    @property
    def is_named(self) -> bool:
        """Whether the name says which prompts these are, to anybody."""
        return self.version is not None or self.dataset is not None

    @property
    def lines(self) -> list[str]:
        """How many were taken of how many, where that was not all."""
        of_all = f"of {self.num_available} prompts"
        chosen = {
            "stratified": f"{self.num_chosen} {of_all}, drawn from each category in proportion "
            f"(seed {self.sample_seed})",
            "random": f"{self.num_chosen} {of_all}, drawn at random (seed {self.sample_seed})",
            "head": f"the first {self.num_chosen} {of_all}",
        }
        found = [chosen[self.sample]] if self.sample is not None else []
        if self.num_too_long:
            found.append(f"{plural(self.num_too_long, 'prompt')} left out: longer than the shortest context asked for")
        return found

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What `dflash eval-acceptance` found.

    `settings` decide the result, `measured` says what it was measured with, `failures` what is not in it. Of a replay,
    `anchors` is the mean over anchors, which is another quantity than the acceptance length of a run. Under several
    conditions the total pools all of them.
    """

    total: Summary
    categories: Mapping[str, Summary]
    settings: Mapping[str, Any]
    measured: Mapping[str, Any]
    source: PromptSource
    conversations: tuple[ConversationCounts, ...] = ()
    failures: tuple[Failure, ...] = ()
    anchors: Summary | None = None
    conditions: tuple[ConditionResult, ...] = ()
    exact_match: tuple[ExactMatch, ...] = ()
    rejected_tokens: tuple[RejectedToken, ...] = ()
    disaggregation: Disaggregation | None = None
    seconds: float

    @property
    def num_prompts(self) -> int:
        """Prompts that were asked for, measured or not, each under every condition."""
        num_measured = sum(item.summary.num_conversations for item in self.conditions)
        return (num_measured or self.total.num_conversations) + len(self.failures)

    @property
    def base(self) -> Summary:
        """What a draft is judged by: the total, or under conditions that of the first, to which the others are held."""
        return self.conditions[0].summary if self.conditions else self.total

    @property
    def shapes(self) -> list[CurveShape]:
        """What the curve by position tells of a fault; nothing where it tells of none."""
        first = self.conditions[0].condition.name if self.conditions else None
        conversations = [item for item in self.conversations if item.condition == first]
        return find_shapes(self.base.counts, conversations, self.settings)

    @property
    def verdict(self) -> list[str]:
        """Whether prefilling in another process held; nothing where it was not asked."""
        return [] if self.disaggregation is None else self.disaggregation.lines

    def to_json(self) -> dict[str, Any]:
        return {
            **self.total.to_json(),
            "shapes": [shape.to_json() for shape in self.shapes],
            "num_failed": len(self.failures),
            "failed": [failure.to_json() for failure in self.failures],
            "categories": {name: summary.to_json() for name, summary in self.categories.items()},
            "conditions": [item.to_json() for item in self.conditions],
            "exact_match": [item.to_json() for item in self.exact_match],
            "conversations": [item.to_json() for item in self.conversations],
            "anchors": None if self.anchors is None else _anchors_json(self.anchors),
            "rejected_tokens": [item.to_json() for item in self.rejected_tokens],
            "disaggregation": None if self.disaggregation is None else self.disaggregation.to_json(),
            "settings": dict(self.settings),
            "prompts": self.source.to_json(),
            "measured": dict(self.measured),
            "seconds": round(self.seconds, 6),
        }


def _anchors_json(anchors: Summary) -> dict[str, Any]:
    """The mean over anchors, under names that say what it is not."""
    found = anchors.to_json()
    return {
        "num_anchors": anchors.counts.num_drafts,
        "mean_over_anchors": anchors.counts.acceptance_len,
        "mean_over_anchors_interval": found["acceptance_len_interval"],
        "per_pos_acceptance_rates": found["per_pos_acceptance_rates"],
        "histogram": found["histogram"],
    }


def headline(evaluation: Evaluation) -> str:
    """`acceptance length 3.52 [3.31, 3.74], at most 8`, and what must not be overlooked about it."""
    total = evaluation.total
    block = total.counts.num_speculative_tokens + 1
    parts = [f"acceptance length {_length(total)}, at most {block}"]
    if total.counts.is_capped:
        parts.append(f"capped: of {block - 1} drafted tokens {_num_verified(total)} were verified")
    if evaluation.failures:
        parts.append(f"{len(evaluation.failures)} of {evaluation.num_prompts} prompts not measured")
    if evaluation.source.is_named:
        parts.append(f"on {evaluation.source.name}")
    if len(evaluation.conditions) > 1:
        parts.append(f"over {len(evaluation.conditions)} conditions")
    return ", ".join(parts)


def _num_verified(total: Summary) -> int:
    """Drafted tokens of a block that were verified at all."""
    return sum(count > 0 for count in total.counts.per_pos_verified)


def legend(evaluation: Evaluation) -> str:
    """What the headline counts, and its largest possible value."""
    block = evaluation.total.counts.num_speculative_tokens + 1
    interval = evaluation.total.interval
    lines = [
        "average number of tokens committed per verify step, the target's own token included (vLLM's definition)",
        f"at most {block}: {block - 1} drafted tokens and the target's own",
    ]
    if interval is not None:
        lines[1] += f"; in brackets, the {100 * interval.confidence:g}% interval over prompts"
        if evaluation.total.num_conversations < MIN_FOR_POSITIONS:
            lines.append(f"positions have an interval from {MIN_FOR_POSITIONS} prompts on")
    else:
        lines[1] += f"; no interval: {evaluation.total.no_interval}"
    if evaluation.anchors is not None:
        mean = f"mean over {evaluation.anchors.counts.num_drafts} anchors {_length(evaluation.anchors)}"
        lines.append(f"{mean}: another quantity, over blocks that a run passes over too")
    if evaluation.conditions:
        lines.append("by condition: tokens of a prompt on average; against the first condition, paired by prompt")
    return "\n".join([*lines, *evaluation.source.lines])


def tables(evaluation: Evaluation, *, is_full: bool = True) -> dict[str, Table]:
    """Title -> columns and rows; those that explain the figure only where it is full. All fit 80 columns."""
    found = {"by position": _position_table(evaluation.total)}
    if evaluation.conditions:
        found["by condition"] = _condition_table(evaluation)
    if evaluation.categories:
        found["by category"] = _category_table(evaluation)
    if evaluation.disaggregation is not None:
        found[TITLE] = evaluation.disaggregation.table
    if is_full and evaluation.rejected_tokens:
        found[REJECTED] = _rejected_table(evaluation.rejected_tokens)
    if is_full:
        found["by each project's own definition"] = _definition_table(evaluation.total)
    return found


def to_markdown(evaluation: Evaluation, title: str = "Acceptance") -> str:
    """A report to keep beside a checkpoint."""
    lines = [f"# {title}", "", f"**{headline(evaluation)}**", "", legend(evaluation), TABLE_NOTE, ""]
    if evaluation.source.warning is not None:
        lines += [f"Note: {evaluation.source.warning}.", ""]
    lines += [line for shape in evaluation.shapes for line in (*shape.lines, "")]
    lines += [line for item in evaluation.exact_match for line in (*item.lines, "")]
    lines += [line for line in evaluation.verdict for line in (line, "")]
    lines += [f"- {name}: `{value}`" for name, value in provenance(evaluation).items()]
    if evaluation.failures:
        lines += ["", "## Not measured", "", *(f"- {failure.error}" for failure in evaluation.failures)]
    for name, (columns, rows) in tables(evaluation).items():
        if name == REJECTED:
            rows = [(_as_code(token), *numbers, _as_code(chosen)) for token, *numbers, chosen in rows]
        lines += ["", f"## {name.capitalize()}", "", *markdown_table(columns, rows)]
    return "\n".join(lines) + "\n"


def provenance(evaluation: Evaluation) -> dict[str, Any]:
    """What was measured, with which settings and versions, by which command and when; what is not known is left out."""
    prompts = {f"prompts.{name}": value for name, value in _flat(evaluation.source.to_json()).items() if value}
    facts = {**evaluation.settings, **prompts, **_flat(evaluation.measured)}
    return {name: value for name, value in facts.items() if value is not None}


def command_line(evaluation: Evaluation) -> str:
    """The command that measured it, as it would be typed."""
    argv = evaluation.measured.get("argv") or ["dflash", "eval-acceptance"]
    return shlex.join(["dflash", *map(str, argv[1:])])


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table; what would end a cell is escaped."""
    return [_markdown_row(columns), _markdown_row(["---"] * len(columns)), *map(_markdown_row, rows)]


def _flat(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Nested facts on one level, such as `draft.commit`."""
    flat: dict[str, Any] = {}
    for name, value in measured.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": item for key, item in value.items()}
        else:
            flat[name] = shlex.join(value) if name == "argv" else value
    return flat


def _position_table(total: Summary) -> Table:
    counts = total.counts
    rows = [
        (
            str(place + 1),
            f"{accepted}",
            _rate(rate) + _span(total.per_pos_intervals[place]),
            _rate(conditional),
            _bar(rate, total.per_pos_intervals[place]),
        )
        for place, (accepted, rate, conditional) in enumerate(
            zip(counts.per_pos_accepted, counts.per_pos_acceptance_rates, total.conditional_rates, strict=False)
        )
        if counts.per_pos_verified[place]
    ]
    return ("position", "accepted", "share of steps", "conditional", ""), rows


def _definition_table(total: Summary) -> Table:
    rows = [
        (name, "-" if total.definitions[name] is None else f"{total.definitions[name]:.3f}", meaning)
        for name, meaning in DEFINITIONS.items()
    ]
    return ("definition", "value", "meaning"), rows


def _condition_table(evaluation: Evaluation) -> Table:
    rows = [
        (
            item.condition.name,
            str(item.summary.num_conversations),
            "-" if item.prompt_len is None else f"{item.prompt_len:.0f}",
            _length(item.summary),
            _against_first(item),
        )
        for item in evaluation.conditions
    ]
    return ("condition", "prompts", "tokens", "acceptance length", "against the first"), rows


def _against_first(item: ConditionResult) -> str:
    """`-0.51 [-0.62, -0.40]`."""
    interval = item.difference_interval
    if item.difference is None or interval is None:
        return ""
    return f"{item.difference:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}]"


def _category_table(evaluation: Evaluation) -> Table:
    rows = [
        (
            _short(name),
            str(summary.num_conversations),
            str(summary.counts.num_drafts),
            _length(summary) + _lack(summary),
        )
        for name, summary in evaluation.categories.items()
    ]
    total = evaluation.total
    rows.append(("all", str(total.num_conversations), str(total.counts.num_drafts), _length(total)))
    return ("category", "prompts", "steps", "acceptance length"), rows


def _length(summary: Summary) -> str:
    if summary.counts.acceptance_len is None:
        return "-"
    return f"{summary.counts.acceptance_len:.3f}{_span(summary.interval)}"


def _span(interval: Interval | None) -> str:
    return f" [{interval.low:.3f}, {interval.high:.3f}]" if interval is not None else ""


def _lack(summary: Summary) -> str:
    """Why a category has no interval, where that is for its size."""
    return " (too few prompts)" if 0 < summary.num_conversations < MIN_UNITS else ""


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.3f}"


def _bar(rate: float, interval: Interval | None) -> str:
    """The rate as a bar; with an interval it is solid up to the lower end, and light from there to the upper one."""
    solid, light = (interval.low, interval.high) if interval is not None else (rate, rate)
    num_solid = round(solid * BAR_WIDTH)
    return "█" * num_solid + "░" * (round(light * BAR_WIDTH) - num_solid)


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else f"{name[: NAME_WIDTH - 1]}…"


def _rejected_table(tokens: Sequence[RejectedToken]) -> Table:
    """Tokens in brackets, so that spaces at their ends show."""
    rows = [
        (
            _short(f"[{item.text}]"),
            str(item.num_rejected),
            str(item.num_judged),
            f"{item.rate:.2f}",
            "  ".join(f"{_short(f'[{other.text}]')} {other.count}" for other in item.replacements[:SHOWN_REPLACEMENTS]),
        )
        for item in tokens[:SHOWN_TOKENS]
    ]
    return ("token", "rejected", "judged", "share", "the target chose"), rows


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _as_code(text: str) -> str:
    """Text in which nothing is Markdown or HTML; spaces within it stay."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"
