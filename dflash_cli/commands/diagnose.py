"""`dflash diagnose`: why a draft accepts little, in one sentence."""

from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli import console
from dflash_cli.command_line.parameters import ENGINE
from dflash_cli.options import DraftArg, JsonOption, PromptsOption, TargetOption, ThreadsOption
from dflash_runtime.errors import CheckpointError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_cli.checkpoints.opening import DraftCheckpoint
    from dflash_cli.validation.validator import Report
    from dflash_runtime.checkpoint.pair import TargetSource

FOUND = 3

NumPromptsOption = Annotated[
    int,
    typer.Option("--num-prompts", min=4, metavar="N", help="How many prompts to make where --prompts is not given."),
]
MaxNewTokensOption = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=8, metavar="N", help="Tokens to generate a prompt.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE)
]


def diagnose(
    draft: DraftArg,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = 32,
    max_new_tokens: MaxNewTokensOption = 96,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out why a draft accepts little: headers, weights, fit with the target, and other readings of its config.

    Ends in one sentence with the cause and the next step; exit 3 where there is a cause.
    """
    from dflash_cli.generation.announcements import announce_loading

    announce_loading(draft, target, device=device)
    from dflash_cli.checkpoints.opening import open_target
    from dflash_cli.checkpoints.references import Role, resolve
    from dflash_cli.generation.threads import use_threads
    from dflash_cli.validation.diagnosis import diagnose_report

    opened = _open_draft(draft)
    reference = _target(draft, target, opened)
    source = open_target(resolve(reference, Role.TARGET))
    use_threads(threads, device, [source.checkpoint, *([opened.checkpoint] if opened is not None else [])])
    report = _validate(draft, reference, _read_prompts(prompts, source), (num_prompts, max_new_tokens), device)
    most = opened.config.num_draft_tokens if opened is not None else 0
    found = diagnose_report(report, draft=draft, target=reference, num_draft_tokens=most)
    if as_json:
        console.result_json({**found.to_json(), "report": report.document()})
    else:
        console.result(found.sentence)
    if found.has_cause:
        raise typer.Exit(FOUND)


def _open_draft(draft: str) -> "DraftCheckpoint | None":
    """The draft; None where its config cannot be read, which the rules then explain."""
    from dflash_cli.checkpoints.opening import open_draft
    from dflash_cli.checkpoints.references import Role, resolve

    try:
        return open_draft(resolve(draft, Role.DRAFT))
    except (CheckpointError, UnsupportedError):
        return None


def _target(draft: str, target: str | None, opened: "DraftCheckpoint | None") -> str:
    """The target that is given, or the one the draft names."""
    from dflash_cli.checkpoints.references import TINY, is_bundled

    if target is not None:
        return target
    if is_bundled(draft):
        return TINY
    verifier = opened.config.verifier if opened is not None else None
    if verifier is None or not verifier.name_or_path:
        raise UsageError(f"{draft} names no target of its own", hint="add --target TARGET")
    return verifier.name_or_path


def _validate(
    draft: str, target: str, prompts: "Sequence[Sequence[int]] | None", sizes: tuple[int, int], device: str
) -> "Report":
    """The run level of `dflash validate`, with progress."""
    from dflash_cli.checkpoints.references import Role, resolve
    from dflash_cli.validation.progress import ReadingProgress
    from dflash_cli.validation.readings import Effort
    from dflash_cli.validation.validator import Question, RunPlan, validate_draft
    from dflash_runtime.config import EngineConfig

    with ReadingProgress() as progress:
        effort = Effort(num_prompts=sizes[0], max_new_tokens=sizes[1])
        run = RunPlan(EngineConfig(device=device, max_num_requests=32), effort, progress, lambda: prompts)
        return validate_draft(
            Question(
                draft=resolve(draft, Role.DRAFT),
                reference=draft,
                target=resolve(target, Role.TARGET),
                target_reference=target,
                level="run",
                run=run,
            )
        )


def _read_prompts(prompts: str | None, target: "TargetSource") -> "Sequence[Sequence[int]] | None":
    if prompts is None:
        return None
    from dflash_cli.generation.prompts import Conversation, gather_rows
    from dflash_cli.generation.tokenizer import find_tokenizer

    rows = gather_rows([], prompts)
    has_text = any(row.kind != "prompt_token_ids" for row in rows)
    tokenizer = find_tokenizer(target.checkpoint.path) if has_text else None
    return [Conversation(row).next_prompt(tokenizer, chat=False) for row in rows]
