"""`dflash diagnose`: why few of a draft's tokens are accepted, in one sentence."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.options import (
    DeviceMapOption,
    DraftArg,
    JsonOption,
    PromptsOption,
    TargetOption,
    TargetRuntimeOption,
    ThreadsOption,
)
from dflash_cli.terminal.parameters import ENGINE
from dflash_runtime.errors import CheckpointError, UnknownFormat, UnsupportedError

if TYPE_CHECKING:
    from dflash_cli.checkpoints.opening import DraftCheckpoint

FOUND = 3

NumPromptsOption = Annotated[
    int | None,
    typer.Option(
        "--num-prompts",
        min=4,
        metavar="N",
        help="Prompts to make up, or to draw from --prompts; a cause is tested on new ones. Default: 32, or the file.",
    ),
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=8, metavar="N", help="Generate N tokens for each prompt.")
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="Device to run on: auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE
    ),
]


def diagnose(
    draft: DraftArg,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 96,
    device: DeviceOption = "auto",
    target_runtime: TargetRuntimeOption = "auto",
    device_map: DeviceMapOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out why few of a draft's tokens are accepted.

    Checks headers, weights and the fit with the target, then runs the pair with the draft's config as it is and with
    one setting changed at a time. Prints one sentence with the cause and the next step; exits with 3 if it finds a
    cause.
    """
    from dflash_cli.generation.announcements import announce_loading

    announce_loading(draft, target, device=device)
    from dflash_cli.checkpoints.opening import open_target
    from dflash_cli.checkpoints.pair_references import complete_pair
    from dflash_cli.checkpoints.references import fetch_directory
    from dflash_cli.diagnosis.likeliest_cause import diagnose_report
    from dflash_cli.diagnosis.pair_validation import validate_running
    from dflash_cli.diagnosis.reading_progress import ReadingProgress
    from dflash_cli.diagnosis.run_settings import run_settings
    from dflash_cli.generation.threads import use_threads
    from dflash_cli.rules.validator import ValidationRequest

    pair = complete_pair(draft, target, find=fetch_directory)
    location, target_location = pair.draft_location, pair.find_target(fetch_directory)
    assert location is not None
    assert pair.target is not None
    opened = _open_draft(location)
    target_source = open_target(target_location)
    checkpoints = [target_source.checkpoint, *([opened.checkpoint] if opened is not None else [])]
    use_threads(threads, device, checkpoints)
    with ReadingProgress() as progress:
        run = run_settings(
            target_location,
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            device=device,
            observe=progress,
            target_runtime=target_runtime,
            device_map=device_map,
        )
        report = validate_running(
            ValidationRequest(
                draft=location,
                draft_reference=draft,
                target=target_location,
                target_reference=pair.target,
                level="weights",
            ),
            run,
        )
    for note in report.notes if report.search is not None else ():  # without one, they are the sentence
        console.warn(note)
    most = opened.config.num_draft_tokens if opened is not None else 0
    found = diagnose_report(report, draft=draft, target=pair.target, num_draft_tokens=most)
    if as_json:
        console.result_json({**found.to_json(), "report": report.to_json()})
    else:
        console.result(found.sentence)
    if found.has_cause:
        raise typer.Exit(FOUND)


def _open_draft(location: Path) -> "DraftCheckpoint | None":
    """The draft; None if its config cannot be read, in which case the findings of the rules say why."""
    from dflash_cli.checkpoints.opening import open_draft

    try:
        return open_draft(location)
    except UnknownFormat:
        raise
    except (CheckpointError, UnsupportedError):
        return None
