"""Rules on the weights themselves, for `--level weights`. torch is imported when one of them runs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_cli.checks.base import Problem, Severity, Subject, check, is_int
from dflash_cli.checks.tensors import FLOATS, WEIGHTS
from dflash_cli.conversion.proof import find_difference
from dflash_cli.loading import open_draft, open_target
from dflash_runtime.checkpoint import Checkpoint
from dflash_runtime.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT

if TYPE_CHECKING:
    import torch

NORM_LIMIT = 1e-6


@check("N13", needs_weights=True)
def values_are_sane(subject: Subject) -> Iterator[Problem]:
    """No NaN or infinity, no tensor of zeros only, no norm weight near zero."""
    import torch

    floats = [name for name, info in (subject.tensors or {}).items() if info.dtype in FLOATS and info.num_elements]
    for name, tensor in Checkpoint(subject.path).load_many(floats):
        place = f"{WEIGHTS}:{name}"
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            yield Problem(place, f"{int((~finite).sum())} values are NaN or infinite")
        elif not bool(tensor.any()):
            severity: Severity = "warning" if name.endswith(".bias") else "error"
            yield Problem(place, "every value is zero", severity=severity)
        elif "norm" in name and float(tensor.abs().max()) < NORM_LIMIT:
            yield Problem(place, f"no value reaches {NORM_LIMIT:g}", severity="warning")


@check("N14", "warning", needs_weights=True)
def every_tap_is_used(subject: Subject) -> Iterator[Problem]:
    """No tapped layer's columns of fc are all zero."""
    taps = subject.taps
    info = (subject.tensors or {}).get("fc.weight")
    if taps is None or info is None or len(info.shape) != 2 or info.shape[1] % len(taps):
        return
    weight = Checkpoint(subject.path).load("fc.weight")
    for tap, columns in zip(taps, weight.chunk(len(taps), dim=1), strict=True):
        if not bool(columns.any()):
            yield Problem(f"{WEIGHTS}:fc.weight", f"the columns of layer {tap} are all zero: the tap has no effect")


@check("M05", needs_weights=True)
def mask_counts_the_vocabulary(subject: Subject) -> Iterator[Problem]:
    """t2d selects draft_vocab_size ids."""
    mask = _load(subject, TARGET_TO_DRAFT)
    reduced = subject.config.get("draft_vocab_size")
    if mask is not None and is_int(reduced) and int(mask.sum()) != reduced:
        yield Problem(f"{WEIGHTS}:{TARGET_TO_DRAFT}", f"selects {int(mask.sum())} ids, draft_vocab_size is {reduced}")


@check("M06", needs_weights=True)
def map_is_a_map(subject: Subject) -> Iterator[Problem]:
    """j + d2t[j] ascends inside the target's vocabulary and names the ids that t2d marks."""
    import torch

    offsets, vocab = _load(subject, DRAFT_TO_TARGET), subject.body.get("vocab_size")
    if offsets is None or not is_int(vocab) or offsets.dim() != 1:
        return
    place = f"{WEIGHTS}:{DRAFT_TO_TARGET}"
    ids = torch.arange(len(offsets)) + offsets
    steps = ids[1:] > ids[:-1]
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        ascending = bool((offsets[1:] > offsets[:-1]).all()) and int(offsets.max()) < vocab
        guess = "; the values themselves ascend: they look like ids, where offsets are expected" if ascending else ""
        yield Problem(place, f"maps to {int(ids.min())}..{int(ids.max())}, outside the target's {vocab} ids{guess}")
    elif not bool(steps.all()):
        yield Problem(place, f"{int((~steps).sum())} ids do not ascend")
    else:
        mask = _load(subject, TARGET_TO_DRAFT)
        marked = mask.bool().nonzero().flatten() if mask is not None else None
        if marked is not None and not torch.equal(marked, ids):
            yield Problem(place, "names other ids than t2d marks", effect="the head's rows belong to other tokens")


@check("M07", needs_weights=True)
def map_is_not_empty(subject: Subject) -> Iterator[Problem]:
    """A reduced vocabulary is not simply the first ids."""
    offsets, vocab = _load(subject, DRAFT_TO_TARGET), subject.body.get("vocab_size")
    if offsets is not None and len(offsets) and len(offsets) != vocab and not bool(offsets.any()):
        yield Problem(
            f"{WEIGHTS}:{DRAFT_TO_TARGET}",
            f"all zeros: the head is mapped to the first {len(offsets)} ids",
            effect="right only if the vocabulary was cut like that",
        )


@check("M09", "warning", needs_weights=True)
def stop_tokens_can_be_drafted(subject: Subject) -> Iterator[Problem]:
    """The target's stop tokens are in the reduced vocabulary."""
    import torch

    offsets = _load(subject, DRAFT_TO_TARGET)
    if subject.target is None or offsets is None or offsets.dim() != 1:
        return
    ids = set((torch.arange(len(offsets)) + offsets).tolist())
    missing = [token for token in subject.target.eos_token_ids if token not in ids]
    if missing:
        yield Problem(
            f"{WEIGHTS}:{DRAFT_TO_TARGET}",
            f"leaves out the stop token {', '.join(map(str, missing))}",
            effect="the end of a text is never drafted",
        )


@check("M10", "warning", needs_weights=True)
def copies_are_the_targets(subject: Subject) -> Iterator[Problem]:
    """Head and embedding hold the target's rows, which speculators keeps frozen from 0.5 to 0.9."""
    if subject.target_path is None or subject.reading is None:
        return
    draft, target = open_draft(subject.path), open_target(subject.target_path)
    for name in (HEAD, EMBEDDING):
        difference = find_difference(draft, name, target) if name in (subject.tensors or {}) else None
        if difference is not None:
            yield Problem(
                f"{WEIGHTS}:{name}",
                difference,
                effect="trained for another target, or a head that was trained on",
            )


def _load(subject: Subject, name: str) -> "torch.Tensor | None":
    if name not in (subject.tensors or {}):
        return None
    return Checkpoint(subject.path).load(name)
