"""The prompts of a search that the pair answers, and the error if they are too few."""

from collections.abc import Sequence

from dflash_runtime.errors import UsageError, error_of
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request_output import RequestOutput

MIN_PROMPTS = 4
"""The fewest prompts that choose a reading."""


def check_number(prompts: Sequence[object]) -> None:
    """Refuse too few prompts, before a pair is loaded.

    Raises:
        UsageError: states the number.
    """
    if len(prompts) < MIN_PROMPTS:
        raise UsageError(
            f"{plural(len(prompts), 'prompt')}, expected at least {MIN_PROMPTS} to choose a reading",
            id="too-few-prompts",
            field="--prompts",
            found=len(prompts),
            expected=f"at least {MIN_PROMPTS}",
            hint="add prompts, or leave out --prompts",
        )


def answered(outputs: Sequence[RequestOutput]) -> tuple[list[RequestOutput], tuple[str, ...]]:
    """The outputs of the prompts that succeed, and the reasons of the others. Readings are run on these prompts.

    Raises:
        UsageError: too few prompts succeed.
        DFlashError: too few succeed, and another fault than a prompt's is the reason. It has the id of that fault.
    """
    found = [output for output in outputs if output.error is None]
    failed = [output for output in outputs if output.error is not None]
    if failed and len(found) < MIN_PROMPTS:
        gravest = max(failed, key=lambda output: output.exit_code)
        text = f"{len(failed)} of {len(outputs)} prompts failed, expected at least {MIN_PROMPTS} to succeed; "
        kind = UsageError if gravest.exit_code == UsageError.exit_code else error_of(gravest.exit_code)
        raise kind(
            text + _reason(gravest),
            id="too-few-prompts" if kind is UsageError else str(gravest.error_id),
            field="--prompts",
            found=len(found),
            expected=f"at least {MIN_PROMPTS}",
        )
    return found, tuple(map(_reason, failed))


def _reason(output: RequestOutput) -> str:
    return f"prompt {output.index + 1}: {output.error}"
