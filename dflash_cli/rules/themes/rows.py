"""Rules on the id map and on the draft's copies of the target's head and embedding. They import torch when they run."""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.opening import DraftCheckpoint, open_draft
from dflash_cli.checkpoints.row_matches import find_misplaced
from dflash_cli.checkpoints.target_copies import find_difference
from dflash_cli.rules.rule import FIX_OTHER_TARGET, FIX_REEXPORT_WEIGHTS, Problem, check_weights
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import is_int

if TYPE_CHECKING:
    import torch


@check_weights(
    "M05",
    effect="the map (d2t) and the mask (t2d) describe different vocabularies",
    fix=FIX_REEXPORT_WEIGHTS,
    source="speculators 0.9.0 train/vocab_mapping.py",
    outcome="drops",
    is_about_training=True,
)
def mask_counts_the_vocabulary(subject: Subject) -> Iterator[Problem]:
    """t2d marks exactly draft_vocab_size ids."""
    mask = subject.load(TARGET_TO_DRAFT)
    reduced = subject.stated.value("draft_vocab_size")
    if mask is not None and is_int(reduced) and int(mask.sum()) != reduced:
        yield Problem(f"{WEIGHTS}:{TARGET_TO_DRAFT}", f"marks {int(mask.sum())} ids, but draft_vocab_size is {reduced}")


@check_weights(
    "M06",
    effect="rows of the draft's head are proposed as other tokens",
    fix=FIX_REEXPORT_WEIGHTS,
    source="speculators 0.9.0 train/vocab_mapping.py; vLLM 0.33.0 qwen3_dflash.py",
    outcome="drops",
    stops_runtime=True,
    is_about_training=True,
)
def map_is_a_map(subject: Subject) -> Iterator[Problem]:
    """The ids j + d2t[j] are in the target's vocabulary and equal the ids that t2d marks, in any order.

    d2t holds offsets. Some files hold absolute ids instead: their values ascend, and adding j exceeds the vocabulary.
    """
    import torch

    offsets, vocab = _offsets(subject), subject.stated.body.get("vocab_size")
    if offsets is None or not is_int(vocab) or not len(offsets):
        return
    location = f"{WEIGHTS}:{DRAFT_TO_TARGET}"
    ids = torch.arange(len(offsets)) + offsets
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        ascending = bool((offsets[1:] > offsets[:-1]).all()) and int(offsets.max()) < vocab
        guess = "; the values ascend, so they look like ids rather than offsets" if ascending else ""
        yield Problem(location, f"maps to {int(ids.min())}..{int(ids.max())}, outside the target's {vocab} ids{guess}")
        return
    mask = subject.load(TARGET_TO_DRAFT)
    marked = mask.bool().nonzero().flatten() if mask is not None and mask.dim() == 1 else None
    if marked is not None and not torch.equal(marked, ids.sort().values):
        effect = "rows of the draft's head stand for other tokens"
        yield Problem(location, "maps to other ids than t2d marks", effect=effect)


@check_weights(
    "M13",
    "info",
    effect="the map is right only if the rows of the draft's head are in the same order",
    fix="measure the acceptance: dflash validate {draft} --target {target} --level run",
    source="speculators 0.9.0 train/vocab_mapping.py writes ascending ids; vLLM 0.33.0 qwen3_dflash.py maps any order",
)
def map_ascends(subject: Subject) -> Iterator[Problem]:
    """The ids j + d2t[j] ascend, as trainers write them."""
    offsets = _offsets(subject)
    ids = [] if offsets is None else _ids(offsets)
    falls = sum(after < before for before, after in pairwise(ids))
    if falls:
        yield Problem(f"{WEIGHTS}:{DRAFT_TO_TARGET}", f"ids that do not ascend: {falls}")


@check_weights(
    "M07",
    "warning",
    effect="the map is right only if the draft's vocabulary is the first part of the target's",
    fix=FIX_REEXPORT_WEIGHTS,
    source="vLLM 0.33.0 qwen3_dflash.py fills a missing map with zeros",
    outcome="drops",
)
def map_is_not_empty(subject: Subject) -> Iterator[Problem]:
    """The id map of a reduced vocabulary has an offset other than zero."""
    offsets, vocab = _offsets(subject), subject.stated.body.get("vocab_size")
    if offsets is not None and len(offsets) and len(offsets) != vocab and not bool(offsets.any()):
        yield Problem(f"{WEIGHTS}:{DRAFT_TO_TARGET}", f"all zeros: the head is mapped to the first {len(offsets)} ids")


@check_weights(
    "M08",
    "info",
    effect="one row of the head is spent on a token that no text contains",
    fix="leave the mask token out when you export again, then check it: dflash validate {draft} --level weights",
    source="speculators 0.9.0 train/vocab_mapping.py",
)
def mask_is_not_proposed(subject: Subject) -> Iterator[Problem]:
    """The reduced vocabulary excludes the mask token."""
    mask_id, offsets = subject.stated.value("mask_token_id"), _offsets(subject)
    if is_int(mask_id) and offsets is not None and mask_id in _ids(offsets):
        yield Problem(f"{WEIGHTS}:{DRAFT_TO_TARGET}", f"the draft can propose its mask token {mask_id}")


@check_weights(
    "M09",
    "warning",
    effect="the draft never proposes to end a text",
    fix="export again with the stop tokens, then check it: dflash validate {draft} --target {target} --level weights",
    source="speculators 0.9.0 train/vocab_mapping.py keeps frequent tokens only",
)
def stop_tokens_can_be_drafted(subject: Subject) -> Iterator[Problem]:
    """The reduced vocabulary contains the target's stop tokens."""
    offsets = _offsets(subject)
    if subject.target is None or offsets is None:
        return
    ids = set(_ids(offsets))
    missing = [token for token in subject.target.eos_token_ids if token not in ids]
    if missing:
        yield Problem(f"{WEIGHTS}:{DRAFT_TO_TARGET}", f"leaves out the stop token {', '.join(map(str, missing))}")


@check_weights(
    "M10",
    "warning",
    effect="the draft was trained for another target, or its head was trained further",
    fix=f"{FIX_OTHER_TARGET} --level weights",
    source="speculators keeps head and embedding frozen from 0.5 to 0.9; sgl-project/SpecForge#800",
)
def copies_are_the_targets(subject: Subject) -> Iterator[Problem]:
    """The draft's copies of head and embedding equal the target's rows."""
    for name, _, _, difference in _changed_copies(subject):
        yield Problem(f"{WEIGHTS}:{name}", difference)


@check_weights(
    "M12",
    effect="tokens that the draft proposes with these rows come out as other tokens",
    fix=FIX_REEXPORT_WEIGHTS,
    source="speculators 0.9.0 train/vocab_mapping.py; vLLM 0.33.0 qwen3_dflash.py maps by position",
    outcome="drops",
)
def rows_are_in_their_places(subject: Subject) -> Iterator[Problem]:
    """No row of the draft's head or embedding equals the target's row of another id.

    Training changes a row. Only a wrong order makes it equal to another row.
    """
    for name, draft, target, _ in _changed_copies(subject):
        found = find_misplaced(draft, name, target)
        if found is not None:
            yield Problem(
                f"{WEIGHTS}:{name}",
                f"{found.count} of {found.num_rows} rows are the target's rows of other ids: row {found.row} is for id "
                f"{found.expected_id} and holds the row of id {found.found_id}",
            )


@check_weights(
    "M11",
    effect="two rows of the head compete for one token, and another token is never proposed",
    fix=FIX_REEXPORT_WEIGHTS,
    source="vLLM 0.33.0 qwen3_dflash.py scatters logits by the map",
    outcome="drops",
)
def map_names_each_id_once(subject: Subject) -> Iterator[Problem]:
    """No two ids of the draft map to the same target id."""
    offsets = _offsets(subject)
    if offsets is None:
        return
    ids = _ids(offsets)
    repeats = len(ids) - len(set(ids))
    if repeats:
        yield Problem(f"{WEIGHTS}:{DRAFT_TO_TARGET}", f"repeated target ids: {repeats}")


def _changed_copies(subject: Subject) -> list[tuple[str, DraftCheckpoint, TargetSource, str]]:
    """The copies that differ from the target's rows, and the difference. All rows are read, but only once."""
    if "changed_copies" not in subject.known:
        compared = [(*copy, find_difference(copy[1], copy[0], copy[2])) for copy in _copies(subject)]
        subject.known["changed_copies"] = [item for item in compared if item[-1] is not None]
    found: list[tuple[str, DraftCheckpoint, TargetSource, str]] = subject.known["changed_copies"]
    return found


def _copies(subject: Subject) -> Iterator[tuple[str, DraftCheckpoint, TargetSource]]:
    """The draft's head and embedding with the two checkpoints, if the target's weights can be read.

    Only the id map tells which rows a head holds, so the head is left out if the map is broken.
    """
    checkpoint, target = subject.checkpoint, subject.target_source
    if checkpoint is None or not subject.is_served or target is None or not _has_weights(target):
        return
    draft = open_draft(checkpoint)
    if draft.config.has_own_width:
        return
    for name in (HEAD, EMBEDDING):
        if name in checkpoint.tensors and not (name == HEAD and _is_map_broken(subject)):
            yield name, draft, target


def _is_map_broken(subject: Subject) -> bool:
    """Whether the id map is missing although needed, has another length than the head, or breaks another rule."""
    offsets, reduced = _offsets(subject), subject.parsed is not None and subject.parsed.config.has_reduced_vocab
    head = (subject.tensors or {}).get(HEAD)
    if reduced and head is not None and (offsets is None or len(offsets) != head.shape[0]):
        return True
    rules = (mask_counts_the_vocabulary, map_is_a_map, map_is_not_empty)
    return any(next(iter(rule(subject)), None) is not None for rule in rules)


def _has_weights(target: TargetSource) -> bool:
    """Whether the target's weights can be read. Of a target on the hub, often only headers or the config are local."""
    try:
        return all(info.file.is_file() for info in target.checkpoint.tensors.values())
    except CheckpointError:
        return False


def _offsets(subject: Subject) -> "torch.Tensor | None":
    """The id map d2t; None unless it is a list of integers, which M03 and M04 report."""
    tensor = subject.load(DRAFT_TO_TARGET)
    return None if tensor is None or tensor.dim() != 1 or tensor.is_floating_point() else tensor


def _ids(offsets: "torch.Tensor") -> list[int]:
    return [index + offset for index, offset in enumerate(offsets.tolist())]
