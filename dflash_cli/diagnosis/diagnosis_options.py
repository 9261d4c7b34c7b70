"""The options of a run under alternative readings, for `validate --level run` and `diagnose`. Imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal.options import DeviceOptions, PromptOptions
from dflash_cli.terminal.requests import ESSENTIALS, Option

if TYPE_CHECKING:
    from dflash_cli.diagnosis.pair_validation import RunReport
    from dflash_cli.rules.validator import ValidationPlan


@dataclass(frozen=True, kw_only=True)
class DiagnosisOptions(DeviceOptions, PromptOptions):
    """The prompts and the device of a run under alternative readings."""

    num_prompts: Annotated[
        int | None,
        Option(
            min=4, group=ESSENTIALS,
            help="Prompts to make from random ids, or to sample from the given prompts; a cause is tested on new ones. "
            "Default: 32, or all given prompts.",
        ),
    ] = None  # fmt: skip
    max_new_tokens: Annotated[
        int, Option(short="-n", min=8, group=ESSENTIALS, help="Generate at most N tokens per prompt.")
    ] = 128


def run_validation(request: DiagnosisOptions, plan: "ValidationPlan") -> "RunReport":
    """The report of the run level, with progress.

    Raises:
        UsageError: the plan has no target, or too few prompts.
    """
    from pathlib import Path

    from dflash_cli.checkpoints.references import open_checkpoint
    from dflash_cli.diagnosis.pair_validation import validate_running
    from dflash_cli.diagnosis.reading_progress import ReadingProgress
    from dflash_cli.diagnosis.run_settings import run_settings
    from dflash_cli.generation.announcements import announce_loading
    from dflash_cli.generation.threads import use_threads

    assert isinstance(plan.target, Path)
    announce_loading(plan.draft_reference, plan.target_reference, device=request.device)
    use_threads(request.threads, request.device, [open_checkpoint(plan.target), open_checkpoint(plan.draft)])
    with ReadingProgress() as progress:
        return validate_running(plan, run_settings(plan.target, request, observe=progress))
