"""Messages of commands that run a pair: that it is being loaded, and what to do if acceptance is low."""

import shlex
from collections.abc import Mapping, Sequence

from dflash_cli.checkpoints.references import TINY, is_bundled
from dflash_cli.terminal import console
from dflash_runtime.metrics import AcceptanceCounts
from dflash_runtime.scheduling.request import FinishReason, RequestOutput, SamplingParams

ENOUGH_STEPS = 20
"""Fewer steps say too little about a draft to call its acceptance low."""


def announce_loading(draft: str | None, target: str | None, *, plain: bool = False, device: str = "auto") -> None:
    """Say at once what is about to be loaded, since importing torch alone takes seconds."""
    where = "" if device == "auto" else f" on {device}"
    if plain:
        console.status(f"loading target {target or TINY}{where} ...")
    else:
        console.status(f"loading draft {draft or TINY} and {_target(draft, target)}{where} ...")


def is_low(counts: AcceptanceCounts) -> bool:
    """Whether acceptance is low, over enough steps to say so. Where part of the block was verified, it is of that."""
    length, num_verified = counts.acceptance_len, counts.draft_tokens_per_step
    return (
        length is not None
        and num_verified is not None
        and counts.num_drafts >= ENOUGH_STEPS
        and is_low_length(length, num_verified)
    )


def is_low_length(length: float, num_drafted: float) -> bool:
    """Whether an acceptance length is so low that something is probably wrong with the draft, or with how it is read.

    Low is less than a quarter of the block, or less than 1.5 tokens per step; with one drafted token, less than 1.25.
    """
    return length < max((num_drafted + 1) / 4, min(1.5, 1 + num_drafted / 4))


def suggest_diagnosis(counts: AcceptanceCounts, references: Mapping[str, str | None]) -> None:
    """After low acceptance, the command that looks for the cause."""
    draft, target = references.get("draft"), references.get("target")
    if draft is None or target is None or not is_low(counts):
        return
    console.note(
        f"acceptance is low; to find out why: dflash diagnose {shlex.quote(draft)} --target {shlex.quote(target)}"
    )


def note_cut_answers(outputs: Sequence[RequestOutput], params: SamplingParams, max_model_len: int) -> None:
    """Say where answers end before they are as long as was asked for, because the model reads no more."""
    num_cut = sum(
        output.finish_reason is FinishReason.LENGTH and len(output.token_ids) < params.max_new_tokens
        for output in outputs
    )
    if num_cut:
        which = "1 answer ends" if num_cut == 1 else f"{num_cut} answers end"
        console.note(
            f"{which} before -n {params.max_new_tokens}: prompt and answer have {max_model_len} tokens at most"
        )


def _target(draft: str | None, target: str | None) -> str:
    if target is None and (draft is None or is_bundled(draft)):
        return f"target {TINY}"
    return "its target" if target is None else f"target {target}"
