"""The result of `dflash tune` as JSON, as tables of at most 80 columns, and as advice in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, ClassVar

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.calibration import Calibration
from dflash_cli.acceptance.intervals.statistics import Interval, Summary, value_text
from dflash_cli.comparing.comparison_report import contrast_cells
from dflash_cli.comparing.contrasts import Contrast
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.generation.run_facts import EvaluationRun
from dflash_cli.terminal.shown import Table
from dflash_cli.tuning.budget_gain import BudgetGain
from dflash_cli.tuning.candidates import Candidate
from dflash_cli.tuning.round_intervals import time_interval
from dflash_cli.tuning.speedups import Choice, Speedup
from dflash_cli.tuning.step_costs import StepTimes, Times
from dflash_cli.tuning.tuned_engines import EngineSettings
from dflash_cli.tuning.tuner import Tuning
from dflash_runtime.documents import INLINE, NOT_REQUIRED
from dflash_runtime.phrases import shorten

CATEGORY_WIDTH = 14
WAYS_LEGEND = """resized: the draft gets a block of K + 1 rows, as in engines
narrowed: the draft gets its trained block, and K + 1 of its rows are verified
difference: narrowed - resized, paired by prompt; p is corrected (Holm)"""
SPEED_LEGEND = """times as fast as plain decoding: acceptance length x plain ms / drafting ms
in brackets, intervals that hold for all candidates of a batch size together
* best at its batch size, = not certainly slower than the best"""
CATEGORY_LEGEND = """best K by category, and its speed-up; r resized, n narrowed, t tree
? undecided whether drafting pays, - drafting does not pay"""
RIVAL_LEGEND = """without a draft model: tokens looked up in each request's own text
marks as above, among candidates and lookups together"""
BUDGET_LEGEND = """simulated row budget: times as fast as verifying all rows, and as the best width
requests of two kinds: half nearly rejected, half nearly whole blocks
rows: per request and step with the budget; width: the best width
{line}"""
WHAT_IF_LEGEND = """simulated: values are rounded to the format, and computed in {dtype}
the format's effect on step times is not simulated"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEntry:
    """An acceptance length."""

    acceptance_len: float | None
    acceptance_len_interval: Interval | None
    num_conversations: int

    @classmethod
    def of(cls, summary: Summary) -> "LengthEntry":
        """Return the acceptance length of a summary."""
        return cls(
            acceptance_len=summary.counts.acceptance_len,
            acceptance_len_interval=summary.acceptance_len_interval,
            num_conversations=summary.num_conversations,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateEntry:
    """The acceptance length of one candidate."""

    candidate: Annotated[Candidate, INLINE]
    total: Annotated[LengthEntry, INLINE]
    categories: Mapping[str, LengthEntry]


@dataclass(frozen=True, slots=True)
class WayEntry:
    """The narrowed block compared with the resized block, for one K."""

    num_speculative_tokens: int
    contrast: Annotated[Contrast, INLINE]


@dataclass(frozen=True, slots=True)
class WhatIfEntry:
    """A rounded pair compared with the pair as it is."""

    what_if: str
    contrast: Annotated[Contrast, INLINE]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneDocument:
    """Result of `dflash tune`."""

    KIND: ClassVar[str] = "tune"

    draft: str | None
    target: str | None
    candidates: tuple[CandidateEntry, ...]
    ways: tuple[WayEntry, ...]
    step_times: Annotated[StepTimes, "read by --step-times"]
    choices: tuple[Choice, ...]
    num_speculative_tokens: Annotated[
        int | None, "the best K of resized blocks over all batch sizes; null if drafting does not pay"
    ]
    schedule: Annotated[tuple[tuple[int, int, int], ...], "first batch size, last batch size, K"]
    advice: tuple[str, ...]
    what_ifs: tuple[WhatIfEntry, ...]
    settings: Annotated[Mapping[str, Any], "of the trained block"]
    prompts: PromptSource
    measured: EvaluationRun
    seconds: float
    engines: Annotated[tuple[EngineSettings, ...], "empty if drafting pays at no batch size"]
    caveats: Annotated[tuple[str, ...], NOT_REQUIRED, "batch sizes at which the settings may be slower"] = ()
    rivals: Annotated[tuple[CandidateEntry, ...], NOT_REQUIRED, "lookups, which draft without a draft model"] = ()
    contests: Annotated[tuple[Choice, ...], NOT_REQUIRED, "choices among candidates and rivals together"] = ()
    budget: Annotated[tuple[BudgetGain, ...], NOT_REQUIRED, "simulated, with --budget"] = ()
    calibration: Annotated[Calibration | None, NOT_REQUIRED, "of the whole block, with --budget"] = None


def tune_document(tuning: Tuning, engines: Sequence[EngineSettings]) -> TuneDocument:
    """Return the document of a tuning, with the settings of engines for it."""
    whole = tuning.whole
    assert isinstance(whole.measured, EvaluationRun)
    return TuneDocument(
        draft=tuning.session.references["draft"],
        target=tuning.session.references["target"],
        candidates=_entries(tuning.evaluations),
        ways=tuple(WayEntry(number, line) for number, line in tuning.ways.items()),
        step_times=tuning.costs.times,
        choices=tuple(tuning.choices),
        num_speculative_tokens=tuning.overall.num_speculative_tokens if tuning.overall else None,
        schedule=tuple(tuning.schedule),
        advice=(*advice(tuning.choices), *rival_advice(tuning.contests)),
        what_ifs=tuple(WhatIfEntry(name, line) for name, line in tuning.what_ifs.items()),
        settings=whole.settings,
        prompts=whole.prompts,
        measured=whole.measured,
        seconds=round(tuning.seconds, 6),
        engines=tuple(engines),
        caveats=tuple(caveats(tuning.choices, tuning.overall.num_speculative_tokens)) if tuning.overall else (),
        rivals=_entries(tuning.rivals),
        contests=tuple(tuning.contests),
        budget=tuple(tuning.budget),
        calibration=whole.calibration,
    )


def _entries(evaluations: Mapping[Candidate, Evaluation]) -> tuple[CandidateEntry, ...]:
    return tuple(
        CandidateEntry(
            candidate=candidate,
            total=LengthEntry.of(item.total),
            categories={name: LengthEntry.of(summary) for name, summary in item.categories.items()},
        )
        for candidate, item in evaluations.items()
    )


def advice(choices: Sequence[Choice]) -> Iterator[str]:
    """Yield a sentence for each batch size, over all prompts."""
    for choice in choices:
        if choice.category is None:
            yield _advice(choice)
            yield from _tree_advice(choice)


def _tree_advice(choice: Choice) -> Iterator[str]:
    """Yield a sentence about the best tree beside the best block, if both were tried."""
    trees = [item for item in choice.speedups if item.candidate.way == "tree"]
    blocks = [item for item in choice.speedups if item.candidate.way != "tree"]
    if not trees or not blocks:
        return
    tree, block = trees[0], blocks[0]
    level = {choice.best.candidate, *choice.ties}
    verdict = "does not pay" if block is choice.best else "pays"
    if tree.candidate in level and block.candidate in level:
        verdict = "is level with it"
    names = _title(tree.candidate), _title(block.candidate)
    ratio = _number(tree.speedup / block.speedup)
    yield f"batch {choice.batch}: {names[0]} {verdict}: {ratio} times as fast as {names[1]}"


def _advice(choice: Choice) -> str:
    best, start = choice.best, f"batch {choice.batch}: "
    number = _title(best.candidate)
    gain = _number(best.speedup, best.interval)
    if choice.payoff == "pays":
        level = ", ".join(_title(item).removeprefix("K ") for item in sorted(choice.ties))
        return f"{start}{number} pays, {gain} times as fast" + (f"; level with it: {level}" if level else "")
    if choice.payoff == "does not pay":
        return f"{start}drafting does not pay: the best, {number}, is {gain} times as fast; decode plainly"
    more = "measure more prompts or rounds" if best.interval is not None else f"no interval: {best.no_interval}"
    return f"{start}undecided whether drafting pays: the best, {number}, is {gain} times as fast; {more}"


def rival_advice(contests: Sequence[Choice]) -> Iterator[str]:
    """Yield a sentence for each batch size: whether the best K beats the best lookup, over all prompts."""
    for contest in contests:
        lookup = next((item for item in contest.speedups if item.candidate.is_lookup), None)
        own = next((item for item in contest.speedups if not item.candidate.is_lookup), None)
        if contest.category is not None or lookup is None or own is None:
            continue
        is_level = {own.candidate, lookup.candidate} & {*contest.ties}
        verdict = "is level with" if is_level else "beats" if own is contest.best else "is slower than"
        number = _title(own.candidate)
        gain = _number(lookup.speedup, lookup.interval)
        yield f"batch {contest.batch}: {number} {verdict} {lookup.candidate.way} without a draft ({gain} times)"


def settings_line(tuning: Tuning) -> str:
    """Return the K of the printed engine settings, and the K of each range of batch sizes, in words."""
    assert tuning.overall is not None, "a pair for which drafting pays at some batch size"
    number = tuning.overall.num_speculative_tokens
    lines = [f"engines resize the block: K {number} is the best one, by the geometric mean over these batch sizes"]
    if len(tuning.schedule) > 1:
        ranges = ", ".join(f"{number} up to {last}" for _, last, number in tuning.schedule)
        lines.append(f"engines with a K for each batch size get {ranges}")
    return "\n".join([*lines, *caveats(tuning.choices, number)])


def caveats(choices: Sequence[Choice], number: int) -> Iterator[str]:
    """Yield a line with the batch sizes at which the resized block of this K is not shown to pay."""
    found: dict[str, list[str]] = {}
    for choice in choices:
        for item in choice.speedups:
            is_served = item.candidate.num_speculative_tokens == number and item.candidate.is_resized
            if choice.category is None and is_served and item.payoff != "pays":
                found.setdefault(item.payoff, []).append(f"batch {choice.batch} ({_number(item.speedup)})")
    for payoff, batches in found.items():
        meaning = "is slower than plain decoding" if payoff == "does not pay" else "may be slower than plain decoding"
        yield f"caution: K {number} {meaning} at {', '.join(batches)}"


def rival_table(tuning: Tuning, batches: Sequence[int]) -> Table:
    """Return the acceptance length of each lookup and its speed-up by batch size, as columns and rows."""
    contests = [item for item in tuning.contests if item.category is None and item.batch in batches]
    columns = ("lookup", "length", *(f"batch {batch}" for batch in batches))
    rows: list[tuple[str, ...]] = []
    for candidate, item in tuning.rivals.items():
        marks = {contest.batch: _mark(contest, candidate) for contest in contests}
        length = _number(item.total.counts.acceptance_len)
        rows.append((candidate.way, length, *(marks.get(batch, "-") for batch in batches)))
    return columns, rows


def budget_table(gains: Sequence[BudgetGain]) -> Table:
    """Return the simulated gains of a row budget, as columns and rows."""
    columns = ("batch", "requests", "predictions", "all rows", "one width", "rows", "width")
    rows: list[tuple[str, ...]] = [
        (
            str(item.batch), item.requests, item.feature, _number(item.over_all_rows), _number(item.over_one_width),
            f"{item.rows_per_request:.1f}", str(item.one_width),
        )
        for item in gains
    ]  # fmt: skip
    return columns, rows


def ways_table(tuning: Tuning) -> Table:
    """Return K, both acceptance lengths and their difference, as columns and rows."""
    columns = ("K", "resized", "narrowed", "difference", "p", "verdict")
    rows: list[tuple[str, ...]] = [
        (str(number), *map(_number, line.acceptance_lens), *contrast_cells(line))
        for number, line in tuning.ways.items()
    ]
    whole = next(candidate for candidate in tuning.evaluations if candidate.way == "whole")
    length = tuning.whole.total.counts.acceptance_len
    rows.append((str(whole.num_speculative_tokens), _number(length), _number(length), "the whole block", "", ""))
    return columns, rows


def times_table(tuning: Tuning, batches: Sequence[int]) -> Table:
    """Return milliseconds of a step by batch size: plain decoding, then each candidate, as columns and rows."""
    rows = [("plain", *(_time(tuning.costs.plain[batch]) for batch in batches))]
    for candidate in sorted(tuning.costs.drafting.keys() & tuning.evaluations.keys()):
        times = tuning.costs.drafting[candidate]
        cells = [_time(times[batch]) if batch in times else "-" for batch in batches]
        rows.append((_name(candidate), *cells))
    return _columns("ms of a step", batches), rows


def speed_table(tuning: Tuning, batches: Sequence[int]) -> Table:
    """Return the speed-up of each candidate by batch size, over all prompts, as columns and rows."""
    choices = [item for item in tuning.choices if item.category is None and item.batch in batches]
    candidates = sorted({item.candidate for choice in choices for item in choice.speedups})
    rows = [(_name(item), *(_mark(choice, item) for choice in choices)) for item in candidates]
    return _columns("speed-up", batches), rows


def category_table(tuning: Tuning, batches: Sequence[int]) -> Table:
    """Return the best K of each category by batch size, as columns and rows."""
    found: dict[str, dict[int, Choice]] = {}
    for choice in tuning.choices:
        if choice.category is not None:
            found.setdefault(choice.category, {})[choice.batch] = choice
    rows = [(shorten(name, CATEGORY_WIDTH), *(_best(of.get(batch)) for batch in batches)) for name, of in found.items()]
    return _columns("best K", batches), rows


def _columns(first: str, batches: Sequence[int]) -> tuple[str, ...]:
    return (first, *(f"batch {batch}" for batch in batches))


def what_if_table(tuning: Tuning) -> Table:
    """Return the acceptance length of each rounded pair, and its difference to the original pair's."""
    columns = ("what if", "length", "difference", "p", "verdict")
    length = tuning.whole.total.counts.acceptance_len
    rows: list[tuple[str, ...]] = [("as it is", _number(length), "", "", "")]
    rows += [(name, _number(line.acceptance_lens[1]), *contrast_cells(line)) for name, line in tuning.what_ifs.items()]
    return columns, rows


def tables(tuning: Tuning) -> Iterator[tuple[str, Table]]:
    """Yield legends with their tables. A table with many batch sizes is split into several."""
    if tuning.ways:
        yield WAYS_LEGEND, ways_table(tuning)
    for batches in _split(tuning.costs.batches, 3):
        yield f"step times: {tuning.costs.source}", times_table(tuning, batches)
    for batches in _split(tuning.costs.batches, 3):
        yield SPEED_LEGEND, speed_table(tuning, batches)
    if tuning.rivals:
        for batches in _split(tuning.costs.batches, 3):
            yield RIVAL_LEGEND, rival_table(tuning, batches)
    if tuning.budget:
        assert tuning.whole.calibration is not None
        yield BUDGET_LEGEND.format(line=tuning.whole.calibration.line), budget_table(tuning.budget)
    if any(item.category is not None for item in tuning.choices):
        for batches in _split(tuning.costs.batches, 5):
            yield CATEGORY_LEGEND, category_table(tuning, batches)
    if tuning.what_ifs:
        legend = WHAT_IF_LEGEND.format(dtype=tuning.session.llm.pair.placement.dtype_name)
        yield legend, what_if_table(tuning)


def _split(batches: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (batches[start : start + size] for start in range(0, len(batches), size))


def _time(times: Times) -> str:
    return _number(fmean(times), time_interval(times))


def _mark(choice: Choice, candidate: Candidate) -> str:
    item = next((item for item in choice.speedups if item.candidate == candidate), None)
    if item is None:
        return "-"
    mark = "*" if item is choice.best else "=" if candidate in choice.ties else " "
    return f"{_number(item.speedup, item.interval)}{mark}"


def _best(choice: Choice | None) -> str:
    if choice is None:
        return ""
    best: Speedup = choice.best
    sign = {"pays": "", "undecided": "?", "does not pay": "-"}[choice.payoff]
    way = {"whole": "", "resized": "r", "narrowed": "n", "tree": "t"}[best.candidate.way]
    number = best.candidate.num_nodes or best.candidate.num_speculative_tokens
    return f"{number}{way} {best.speedup:.2f}{sign}"


def _name(candidate: Candidate) -> str:
    return f"{candidate.num_nodes or candidate.num_speculative_tokens} {candidate.way}"


def _title(candidate: Candidate) -> str:
    if candidate.way == "tree":
        return f"a tree of {candidate.num_nodes} tokens"
    number = f"K {candidate.num_speculative_tokens}"
    return number if candidate.way == "whole" else f"{number} {candidate.way}"


def _number(value: float | None, interval: Interval | None = None) -> str:
    return value_text(value, interval, ".2f")
