"""Show a probe as lines and tables of at most 80 columns."""

import textwrap
from collections.abc import Sequence

from dflash_cli.acceptance.acceptance_report import MEANING, position_table
from dflash_cli.acceptance.intervals.statistics import DEFINITIONS, value_text
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.probing.asking.question import QuestionReport
from dflash_cli.probing.findings.attribution import Attribution
from dflash_cli.probing.probe_result import Probed
from dflash_cli.probing.served.token_equality import TokenEquality
from dflash_cli.terminal.shown import Table
from dflash_runtime.phrases import plural

WIDTH = 78
SHOWN_DIFFERENCES = 5
ORIGINS = {"answers": "answers", "counters": "counters", "timings": "sums", "nothing": "-"}


def headline(found: Probed) -> list[str]:
    """`vllm 0.33.0 serves org/model and drafts 7 tokens per step`, and the acceptance length of the first run."""
    facts, first = found.server, found.runs[0]
    engine = f"{facts.engine} {facts.release}" if facts.release else facts.engine
    if not found.is_engaged:
        what = "unknown whether it drafts" if found.is_engaged is None else "it drafts nothing"
        return [f"{engine} serves {facts.model}: {what}"]
    width = facts.num_draft_tokens or first.total.counts.num_speculative_tokens
    drafts = f"drafts {width} tokens per step" if width else "drafts"
    lines = [
        f"{engine} serves {facts.model} and {drafts}",
        f"acceptance length {first.total.length_text}, {first.name}",
    ]
    value = first.total.definitions.get(found.definition)
    if found.definition != "vllm" and value is not None:
        lines += _wrap(f"{value:.3f} by {found.server.engine}'s definition: {DEFINITIONS[found.definition]}")
    return lines


def legend(found: Probed) -> list[str]:
    """The definition of the acceptance length; empty if no token was drafted."""
    if not found.is_engaged:
        return []
    interval = found.runs[0].total.acceptance_len_interval
    lines = [MEANING]
    if interval is not None:
        return [*lines, f"in brackets, the {100 * interval.confidence:g}% interval over prompts"]
    return [*lines, *_wrap(f"no interval: {found.runs[0].total.acceptance_len_no_interval}")]


def all_tables(found: Probed) -> dict[str, Table]:
    """Title -> columns and rows."""
    shown = {"by concurrency": _load_table(found)}
    first = found.runs[0]
    if first.is_engaged and first.total.counts.num_speculative_tokens:
        shown[f"by position, {first.name}"] = position_table(first.total)
    return shown


def yardstick_lines(found: Probed) -> list[str]:
    """`own.jsonl: 3.439, +0.012 [-0.101, +0.077] against the server, undecided`, a line for each yardstick."""
    return [f"{item.other.name}: {item.other.acceptance_len:.3f}, {_change(item)}" for item in found.yardsticks]


def equality_lines(found: Probed) -> list[str]:
    """How many greedy answers are the same, and the first differences."""
    return [line for item in found.equalities for line in _equality(item)]


def question_lines(found: Probed) -> list[str]:
    """`tool-call (2 requests, 192 tokens, 1.3 s): the call is sound, streamed sound`, a line for each question."""
    return [line for item in found.questions for line in _wrap(f"{_cost(item)}: {_seen(item)}")]


def _cost(item: QuestionReport) -> str:
    requests, tokens = plural(item.num_requests, "request"), plural(item.num_tokens, "token")
    return f"asked {item.name} ({requests}, {tokens}, {item.seconds:.1f} s)"


def _seen(item: QuestionReport) -> str:
    return item.seen if item.is_judged else f"not judged: {item.seen}"


def finding_lines(found: Probed) -> list[str]:
    """Each finding: `warning prefix-cache-unused: what was seen`, what follows, and the next thing to do."""
    lines = []
    for item in found.findings:
        lines += _wrap(f"{item.severity} {item.id}: {item.seen}")
        lines += textwrap.wrap(item.follows, WIDTH, initial_indent="  ", subsequent_indent="  ")
        lines.append(f"  next: {item.next}")
    return lines


def fault_lines(found: Probed) -> list[str]:
    """Findings of rules about the draft on this engine, with --draft."""
    return [line for fault in found.known_faults for line in _wrap(f"known of {found.server.engine}: {fault}")]


def attribution_lines(attribution: Attribution) -> list[str]:
    """`cause: engine (rule 4): ...`, wrapped, and the next thing to do on one line, because it may be a command."""
    text = f"cause: {attribution.owner} (rule {attribution.rule}): {attribution.evidence}"
    return [
        *_wrap(text),
        f"  next: {attribution.hint}",
    ]


def _wrap(text: str) -> list[str]:
    """Lines of at most 78 columns, broken between words only."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _load_table(found: Probed) -> Table:
    changes = {item.other.name: item for item in found.loads}
    rows = []
    for run in found.runs:
        change = changes.get(run.name)
        rows.append(
            (
                str(run.concurrency),
                str(len({answer.row.index for answer in run.answers})),
                str(run.total.counts.num_drafts),
                run.total.length_text,
                _difference(change) if change is not None else "-",
                ORIGINS[run.origin],
            )
        )
    return ("requests", "prompts", "steps", "acceptance length", f"against {found.runs[0].concurrency}", "from"), rows


def _difference(item: Comparison) -> str:
    """The other result's acceptance length minus the first's, with its interval."""
    return value_text(item.total.difference, item.total.interval, "+.3f")


def _change(item: Comparison) -> str:
    sure = f", {item.total.verdict}" if item.total.verdict is not None else ""
    sure += f", no interval: {item.total.reason}" if item.total.interval is None else ""
    same = f", {plural(item.total.num_conversations, 'prompt')} in common" if item.is_paired else ""
    return f"{_difference(item)} against the server{sure}{same}"


def _equality(item: TokenEquality) -> list[str]:
    num_same = item.num_compared - len(item.differences)
    parts = [f"answers {item.base} and {item.other}: {num_same} of {item.num_compared} the same"]
    if item.differences:
        unjudged = len(item.differences) - item.num_near_ties - item.num_unexplained
        parts += [plural(item.num_near_ties, "near-tie"), f"{item.num_unexplained} unexplained"]
        parts += [f"{unjudged} not judged"] * bool(unjudged)
    if item.num_unlike:
        parts.append(f"{plural(item.num_unlike, 'prompt')} of other tokens")
    return [*_wrap(", ".join(parts)), *_some_differences(item)]


def _some_differences(item: TokenEquality) -> Sequence[str]:
    """The first few differences, near-ties last."""
    shown = sorted(item.differences, key=lambda difference: difference.is_near_tie)[:SHOWN_DIFFERENCES]
    return [
        f"  {difference.name}, token {difference.position + 1}: "
        + " or ".join("the end" if token is None else str(token) for token in difference.tokens)
        + (f", {difference.gap_nats:.3g} nat apart" if difference.gap_nats is not None else "")
        for difference in shown
    ]
