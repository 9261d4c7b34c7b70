"""`dflash bench`: how much faster a pair decodes with its draft than without, at several batch sizes."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.options import (
    CausalityOption,
    ChatOption,
    DatasetFormatOption,
    DatasetOption,
    EngineOptions,
    JsonOption,
    MaxNewTokensOption,
    OptionalDraftArg,
    PromptsOption,
    TargetOption,
    TemplateOption,
    ThreadsOption,
)
from dflash_cli.terminal.parameters import ESSENTIALS, MEASURING
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_cli.generation.loaded_pair import PairSession
    from dflash_cli.tuning.speed import BatchSpeed, Speed, SpeedRequest

SPEED_COLUMNS = ("batch", "plain tokens/s", "drafting tokens/s", "speedup", "tokens a step")
STEP_COLUMNS = ("batch", "plain ms", "drafting ms", "draft", "verify", "rest")
LEGEND = """decoding only, while all requests of a batch are at work
tokens a step: committed for each request by a step that drafts; ms: of a step
draft, verify, rest: parts of the drafting ms, found by leaving out the draft's work, then the target's"""

BatchesOption = Annotated[
    str,
    typer.Option(
        "--batches", metavar="B,...", help="Numbers of requests at a time to measure.", rich_help_panel=ESSENTIALS
    ),
]
RoundsOption = Annotated[
    int,
    typer.Option(
        "--rounds",
        min=1,
        metavar="N",
        help="Rounds to time, each with the next prompts. One more comes first, which compiles.",
        rich_help_panel=MEASURING,
    ),
]
MinSpeedupOption = Annotated[
    float | None,
    typer.Option(
        "--min-speedup",
        metavar="X",
        help="Exit with 3 if drafting is not X times as fast as plain decoding at every batch size.",
        rich_help_panel=MEASURING,
    ),
]


def bench(
    engine: EngineOptions,
    draft: OptionalDraftArg = None,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    dataset: DatasetOption = None,
    dataset_format: DatasetFormatOption = None,
    batches: BatchesOption = "1,4,16",
    max_new_tokens: MaxNewTokensOption = 128,
    chat: ChatOption = None,
    rounds: RoundsOption = 4,
    min_speedup: MinSpeedupOption = None,
    chat_template_kwargs: TemplateOption = None,
    causality: CausalityOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how much faster a pair decodes with its draft than without.

    The gain depends on the text: give --prompts like those the draft is to serve. Without, the bundled prompts are
    used: chats (mix-64), or for the bundled target pieces of Python.
    """
    if engine.num_speculative_tokens == 0:
        raise UsageError("-k 0 runs without a draft, so there is nothing to compare")
    sizes, config = _parse_batches(batches), engine.config()
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.prompt_sets import read_prompts

    given = read_prompts(prompts, dataset, dataset_format)
    announce_loading(draft, target, device=config.device)
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.loaded_pair import open_session
    from dflash_cli.tuning.speed import check_speedup, smallest, speed_request

    session = open_session(
        draft, target, smallest(config), causality=causality, template_options=chat_template_kwargs, threads=threads
    )
    choice = choose_prompts(session, given, chat=chat)
    request = speed_request(
        session, choice.rows, sizes, max_new_tokens=max_new_tokens, num_rounds=rounds, chat=choice.chat
    )
    speeds = _measure(session, request)
    if as_json:
        console.result_json(_to_json(session, request, speeds) | {"prompts": choice.source.to_json()})
    else:
        _print(speeds)
    if min_speedup is not None:
        check_speedup(speeds, min_speedup)


def _parse_batches(text: str) -> list[int]:
    """`1,4,16`, in the order given."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--batches {text}: expected numbers of requests, such as 1,4,16")
    return [int(part) for part in parts]


def _measure(session: "PairSession", request: "SpeedRequest") -> "list[BatchSpeed]":
    from dflash_cli.tuning.speed import measure_speeds

    speeds: list[BatchSpeed] = []
    pair = session.llm.pair
    with console.Meter(request.num_runs(pair), "rounds") as meter:
        for speed in measure_speeds(pair, request, meter.update):
            speeds.append(speed)
    return speeds


def _to_json(session: "PairSession", request: "SpeedRequest", speeds: "Sequence[BatchSpeed]") -> dict[str, Any]:
    return {
        "draft": session.references["draft"],
        "target": session.references["target"],
        "num_speculative_tokens": session.llm.num_draft_tokens,
        "max_new_tokens": request.max_new_tokens,
        "num_rounds": request.num_rounds,
        "num_prompts": len(request.prompts),
        "batches": [speed.to_json() for speed in speeds],
        "measured": session.describe(),
    }


def _print(speeds: "Sequence[BatchSpeed]") -> None:
    gains = ", ".join(f"{speed.speedup:.2f} at batch {speed.batch}" for speed in speeds)
    console.result(f"speedup by drafting: {gains}")
    console.result(LEGEND)
    console.result("")
    rows = [row for speed in speeds for row in _rows(speed)]
    console.table(SPEED_COLUMNS, [row[: len(SPEED_COLUMNS)] for row in rows])
    console.result("")
    console.table(STEP_COLUMNS, [(row[0], *row[len(SPEED_COLUMNS) :]) for row in rows])


def _rows(speed: "BatchSpeed") -> list[tuple[str, ...]]:
    """The row of a batch size and, where the engine has it, one with adaptive width below it."""
    parts = speed.parts
    times = [parts.draft_ms, parts.verify_ms, parts.rest_ms] if parts is not None else []
    rows = [_row(speed, str(speed.batch), speed.speculative, times)]
    if speed.adaptive is not None:
        rows.append(_row(speed, f"{speed.batch} adaptive", speed.adaptive, []))
    return rows


def _row(speed: "BatchSpeed", name: str, arm: "Speed", parts_ms: "Sequence[float]") -> tuple[str, ...]:
    plain = speed.plain
    figures = (
        f"{plain.tokens_per_second:.1f}", f"{arm.tokens_per_second:.1f}",
        f"{arm.tokens_per_second / plain.tokens_per_second:.2f}", f"{arm.tokens_per_step:.2f}",
        f"{plain.step_ms:.2f}", f"{arm.step_ms:.2f}",
    )  # fmt: skip
    shown = [f"{ms:.2f}" for ms in parts_ms] or ["-"] * 3
    return (name, *figures, *shown)
