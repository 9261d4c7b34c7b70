"""Messages of commands that run a pair: loading, and advice if acceptance is low."""

import shlex
from collections.abc import Mapping, Sequence

from dflash_cli.generation.prompt_source import Failure
from dflash_cli.terminal import console
from dflash_runtime.metrics import AcceptanceCounts
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams

SHOWN_FAILURES = 5
ENOUGH_STEPS = 20
"""With fewer steps, acceptance is never called low."""


def announce_loading(references: Mapping[str, str | None], *, plain: bool = False, device: str = "auto") -> None:
    """Print which models are loaded next. Importing torch alone takes seconds, so the line comes before the import.

    Every refusal that needs no torch comes before this line.
    """
    where = "" if device == "auto" else f" on {device}"
    roles = ("target",) if plain else ("draft", "target")
    names = [f"{role} {references[role]}" for role in roles if references[role] is not None]
    console.status(f"loading {' and '.join(names)}{where} ...")


def is_low(counts: AcceptanceCounts) -> bool:
    """Return whether acceptance is low over enough steps, relative to the number of verified draft tokens."""
    length, num_verified = counts.acceptance_len, counts.draft_tokens_per_step
    return (
        length is not None
        and num_verified is not None
        and counts.num_drafts >= ENOUGH_STEPS
        and is_low_length(length, num_verified)
    )


def is_low_length(length: float, num_drafted: float) -> bool:
    """Return whether an acceptance length is so low that the draft, or the way it is read, is probably wrong.

    Low is less than a quarter of the block, or less than 1.5 tokens per step; with one draft token, less than 1.25.
    """
    return length < max((num_drafted + 1) / 4, min(1.5, 1 + num_drafted / 4))


def suggest_diagnosis(counts: AcceptanceCounts, references: Mapping[str, str | None]) -> None:
    """Print the command that finds the cause, if acceptance is low."""
    draft, target = references.get("draft"), references.get("target")
    if draft is None or target is None or not is_low(counts):
        return
    command = f"dflash diagnose {shlex.quote(draft)} --target {shlex.quote(target)}"
    console.note(Notice(f"acceptance is low; to find the cause: {command}", id="low-acceptance"))


def tell_failed_prompts(failures: Sequence[Failure], *, is_allowed: bool, num_prompts: int | None = None) -> None:
    """Print the first prompts that failed, as a warning if they may fail, otherwise as an error."""
    say = console.warn if is_allowed else console.error
    of_all = plural(len(failures), "prompt") if num_prompts is None else f"{len(failures)} of {num_prompts} prompts"
    say(Notice(f"{of_all} failed; the result leaves out failed prompts:", id="prompts-failed"))
    for failure in failures[:SHOWN_FAILURES]:
        console.error_text(f"    {failure.error}")
    if len(failures) > SHOWN_FAILURES:
        console.error_text(f"    and {len(failures) - SHOWN_FAILURES} more, listed by --json")


def note_cut_answers(outputs: Sequence[RequestOutput], params: SamplingParams, max_model_len: int) -> None:
    """Print how many answers the model length cut before the requested number of tokens."""
    num_cut = sum(
        output.finish_reason is FinishReason.LENGTH and len(output.token_ids) < params.max_new_tokens
        for output in outputs
    )
    if num_cut:
        which = "1 answer ends" if num_cut == 1 else f"{num_cut} answers end"
        text = (
            f"{which} before -n {params.max_new_tokens}: prompt and answer together have at most {max_model_len} tokens"
        )
        console.note(Notice(text, id="answers-cut"))
