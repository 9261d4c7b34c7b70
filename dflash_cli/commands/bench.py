"""`dflash bench`: how much faster a pair decodes with its draft than without, at several batch sizes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal import console
from dflash_cli.terminal.engine_options import EngineOptions
from dflash_cli.terminal.options import GateFileOptions, PairOptions, PromptOptions, ReadingOptions
from dflash_cli.terminal.parameters import ESSENTIALS, MEASURING, Option
from dflash_cli.terminal.progress import Meter
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.sampling_options import DraftedOptions, RivalOptions, SeedOptions
from dflash_cli.terminal.shown import Shown, Table
from dflash_cli.terminal.tables import print_table
from dflash_cli.tuning.timed_steps import MIN_STEPS
from dflash_runtime.engine_config import MAX_TREE_NODES
from dflash_runtime.errors import UsageError
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dflash_cli.acceptance.intervals.statistics import Interval
    from dflash_cli.generation.loaded_pair import PairSession
    from dflash_cli.generation.prompt_source import PromptSource
    from dflash_cli.tuning.batch_speeds import BatchSpeed, BenchDocument, Speed
    from dflash_cli.tuning.speed import SpeedRequest
    from dflash_cli.tuning.step_parts import StepParts

SPEED_COLUMNS = ("batch", "plain tokens/s", "drafting tokens/s", "speedup", "tokens per step")
STEP_COLUMNS = ("batch", "plain ms", "drafting ms")
PART_COLUMNS = ("batch", "draft ms", "verify ms", "rest ms")
LEGEND = """decoding only, while all requests of the batch are running
tokens per step: committed per request and step with a draft; ms: time of a step
draft, verify, rest: parts of the drafting ms, measured by leaving out first the draft, then the target
in brackets, 95% intervals over rounds"""
ONE_ROUND = "no intervals: one round was timed, and an interval needs two or more"


@dataclass(frozen=True, kw_only=True)
class BenchRequest(
    GateFileOptions,
    EngineOptions,
    DraftedOptions,
    SeedOptions,
    RivalOptions,
    PromptOptions,
    ReadingOptions,
    PairOptions,
):
    """Measure how much faster a pair decodes with its draft than without.

    The speed-up depends on the text: give prompts of your users with --prompts. Without --prompts or --dataset, the
    bundled prompts are used: 64 chats (mix-64), or for the bundled target 64 pieces of Python.
    """

    concurrency: Annotated[
        tuple[int, ...], Option(min=1, group=ESSENTIALS, help="Numbers of requests at once to measure.")
    ] = (1, 4, 16)
    rounds: Annotated[
        int,
        Option(
            min=1, group=MEASURING,
            help="Rounds to time, each with the next prompts, plus one untimed warm-up round.",
        ),
    ] = 4  # fmt: skip
    tree: Annotated[
        tuple[int, ...],
        Option(
            metavar="N,...", min=1, max=MAX_TREE_NODES, group=MEASURING,
            help="Also measure trees of N draft tokens per step instead of one block.",
        ),
    ] = ()  # fmt: skip
    min_speedup: Annotated[
        float | None,
        Option(
            above=0, group=MEASURING, is_setting=False,
            help="Exit with 3 if drafting is not X times as fast as plain decoding at every --concurrency.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        self.require_gate("--min-speedup", is_given=self.min_speedup is not None)
        if self.min_speedup is not None and self.rounds < 2:
            raise UsageError(
                field="--rounds", found=self.rounds, expected="2 or more: one timing does not decide --min-speedup"
            )
        if self.max_new_tokens <= MIN_STEPS:  # plain decoding gets the first token from the prefill
            raise UsageError(
                field="--max-new-tokens", found=self.max_new_tokens,
                expected=f"{MIN_STEPS + 1} or more: {MIN_STEPS} steps are the fewest that are timed",
            )  # fmt: skip
        if not self.concurrency:
            raise UsageError(field="--concurrency", found=[], expected="one number of requests or more")


@dataclass(frozen=True, kw_only=True, repr=False)
class Bench(Shown):
    """The speeds of a pair, with one entry per number of concurrent requests."""

    session: "PairSession"
    plan: "SpeedRequest"
    source: "PromptSource"
    speeds: "Sequence[BatchSpeed]"

    @property
    def document(self) -> "BenchDocument":
        from dflash_cli.tuning.batch_speeds import BenchDocument

        return BenchDocument(
            draft=self.session.references["draft"],
            target=self.session.references["target"],
            num_speculative_tokens=self.session.llm.num_draft_tokens,
            max_new_tokens=self.plan.max_new_tokens,
            num_rounds=self.plan.num_rounds,
            num_prompts=len(self.plan.prompts),
            prompts=self.source,
            batches=tuple(self.speeds),
            measured=self.session.describe(),
        )

    def summary(self) -> list[str]:
        return _headline(self.speeds).split("\n")

    def shown_tables(self) -> dict[str, Table]:
        return {"": (SPEED_COLUMNS, [row[: len(SPEED_COLUMNS)] for speed in self.speeds for row in _rows(speed)])}


@verb(BenchRequest)
def bench(request: BenchRequest) -> Bench:
    """Measure decoding with and without the draft.

    Raises:
        UsageError, RequestError: the pair or a prompt cannot be served, or answers are too short to time.
    """
    config = request.engine_config(
        num_draft_tokens=request.num_speculative_tokens, draft_sampling=request.draft_sampling
    )
    from dflash_cli.generation.prompt_sets import read_prompts

    given = read_prompts(request.prompts, request.dataset, request.dataset_format, count=request.num_prompts)
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.checkpoints.opening import Overrides
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.loaded_pair import load_session, open_pair

    opened = open_pair(
        request.draft,
        request.target,
        config,
        overrides=Overrides(request.causality, request.layout),
        template_options=request.template_options,
    )
    choice = choose_prompts(request, opened, given)
    announce_loading(opened.references, device=config.device)
    from dflash_cli.tuning.speed import smallest, speed_request

    session = load_session(opened, smallest(config), threads=request.threads)
    plan = speed_request(
        session, choice.rows, request.concurrency, max_new_tokens=request.max_new_tokens, num_rounds=request.rounds,
        chat=choice.chat, rivals=request.rivals, trees=request.tree,
    )  # fmt: skip
    return Bench(session=session, plan=plan, source=choice.source, speeds=_measure(session, plan))


def command(request: BenchRequest) -> None:
    """Measure and print."""
    found = bench(request)
    console.show(found, lambda: _print(found.speeds))
    for notice in _doubts(found.speeds):
        console.warn(notice)
    if request.min_speedup is not None:
        from dflash_cli.documents.junit import gate_written
        from dflash_cli.tuning.batch_speeds import check_speedup

        with gate_written(request.gate_out, "dflash bench", f"speedup of at least {request.min_speedup:g}"):
            doubt = check_speedup(found.speeds, request.min_speedup)
        if doubt is not None:
            console.warn(doubt)


def _doubts(speeds: "Sequence[BatchSpeed]") -> "Iterator[Notice]":
    """Yield a warning for each batch size where the parts of a step exceed the step."""
    for speed in speeds:
        if speed.parts is not None and not speed.parts.adds_up:
            text = f"batch {speed.batch}: draft and verify do not add up to the step, so the parts are unsafe; "
            yield Notice(f"{text}measure with more --rounds on an idle machine", id="parts-do-not-add-up")


def _measure(session: "PairSession", request: "SpeedRequest") -> "list[BatchSpeed]":
    from dflash_cli.tuning.speed import measure_speeds

    speeds: list[BatchSpeed] = []
    pair = session.llm.pair
    with Meter(request.num_runs(pair), "rounds") as meter:
        for speed in measure_speeds(pair, request, meter.update):
            speeds.append(speed)
    return speeds


def _headline(speeds: "Sequence[BatchSpeed]") -> str:
    found = (f"{_text(speed.speedup, speed.speedup_interval)} at batch {speed.batch}" for speed in speeds)
    lines = ["speedup by drafting: " + ", ".join(found)]
    gains = [
        f"{_text(tree.gain, tree.gain_interval)} at batch {speed.batch} ({tree.num_nodes} tokens)"
        for speed in speeds
        if (tree := max(speed.trees, key=lambda item: item.gain, default=None)) is not None
    ]
    if gains:
        lines.append("best tree against a block: " + ", ".join(gains))
    leads = [
        f"{_text(best.lead, best.lead_interval)} at batch {speed.batch} ({best.name})"
        for speed in speeds
        if (best := min(speed.rivals, key=lambda item: item.lead, default=None)) is not None
    ]
    if leads:
        lines.append("times as fast as the best drafting without a model: " + ", ".join(leads))
    return "\n".join(lines)


def _text(value: float, interval: "Interval | None") -> str:
    from dflash_cli.acceptance.intervals.statistics import value_text

    return value_text(value, interval, ".2f")


def _print(speeds: "Sequence[BatchSpeed]") -> None:
    legend = LEGEND if speeds[0].speedup_interval is not None else LEGEND.rpartition("\n")[0] + f"\n{ONE_ROUND}"
    console.result(*_headline(speeds).split("\n"), *legend.split("\n"))
    console.result("")
    rows = [row for speed in speeds for row in _rows(speed)]
    print_table(SPEED_COLUMNS, [row[: len(SPEED_COLUMNS)] for row in rows])
    console.result("")
    print_table(STEP_COLUMNS, [(row[0], *row[len(SPEED_COLUMNS) :]) for row in rows])
    console.result("")
    print_table(PART_COLUMNS, [_parts(speed.batch, speed.parts) for speed in speeds if speed.parts is not None])


def _rows(speed: "BatchSpeed") -> list[tuple[str, ...]]:
    """The row of a batch size, and of each other way that was timed: adaptive width, row budget, trees, rivals."""
    rows = [_row(speed.plain, str(speed.batch), speed.speculative, speed.speedup, speed.speedup_interval)]
    if speed.adaptive is not None and speed.adaptive_speedup is not None:
        name, interval = f"{speed.batch} adaptive", speed.adaptive_speedup_interval
        rows.append(_row(speed.plain, name, speed.adaptive, speed.adaptive_speedup, interval))
    if speed.budget is not None and speed.budget_speedup is not None:
        name, interval = f"{speed.batch} budget", speed.budget_speedup_interval
        rows.append(_row(speed.plain, name, speed.budget, speed.budget_speedup, interval))
    for tree in speed.trees:
        name = f"{speed.batch} tree {tree.num_nodes}"
        rows.append(_row(speed.plain, name, tree.speed, tree.speedup, tree.speedup_interval))
    for rival in speed.rivals:
        name = f"{speed.batch} {rival.name}"
        rows.append(_row(speed.plain, name, rival.speed, rival.speedup, rival.speedup_interval))
    return rows


def _row(plain: "Speed", name: str, arm: "Speed", speedup: float, interval: "Interval | None") -> tuple[str, ...]:
    return (
        name, f"{plain.tokens_per_second:.1f}", f"{arm.tokens_per_second:.1f}", _text(speedup, interval),
        f"{arm.tokens_per_step:.2f}", _text(plain.step_ms, plain.step_ms_interval),
        _text(arm.step_ms, arm.step_ms_interval),
    )  # fmt: skip


def _parts(batch: int, parts: "StepParts") -> tuple[str, ...]:
    spans = [(parts.draft_ms, parts.draft_ms_interval), (parts.verify_ms, parts.verify_ms_interval)]
    return (str(batch), *(_text(*span) for span in spans), _text(parts.rest_ms, None))
