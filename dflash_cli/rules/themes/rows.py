"""Rules on which of the target's ids the rows of a draft stand for: what the id map holds, whose rows the copies are.

torch is imported when one of them runs.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.opening import DraftCheckpoint, open_draft
from dflash_cli.checkpoints.row_matches import find_misplaced
from dflash_cli.checkpoints.target_copies import find_difference
from dflash_cli.rules.rule import FIX_REEXPORT_WEIGHTS, Problem, check
from dflash_cli.rules.subject import Subject
from dflash_cli.rules.themes.tensors import WEIGHTS
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import is_int

if TYPE_CHECKING:
    import torch


@check(
    "M05",
    level="weights",
    effect="the map (d2t) and the mask (t2d) describe different vocabularies",
    fix=FIX_REEXPORT_WEIGHTS,
    source="speculators 0.9.0 train/vocab_mapping.py",
    outcome="drops",
)
def mask_counts_the_vocabulary(subject: Subject) -> Iterator[Problem]:
    """t2d marks exactly draft_vocab_size ids."""
    mask = subject.load(TARGET_TO_DRAFT)
    reduced = subject.stated.value("draft_vocab_size")
    if mask is not None and is_int(reduced) and int(mask.sum()) != reduced:
        yield Problem(f"{WEIGHTS}:{TARGET_TO_DRAFT}", f"marks {int(mask.sum())} ids, but draft_vocab_size is {reduced}")


@check(
    "M06",
    level="weights",
    effect="rows of the draft's head are proposed as other tokens",
    fix=FIX_REEXPORT_WEIGHTS,
    source="speculators 0.9.0 train/vocab_mapping.py; vLLM 0.33.0 qwen3_dflash.py",
    outcome="drops",
    stops_runtime=True,
)
def map_is_a_map(subject: Subject) -> Iterator[Problem]:
    """The ids j + d2t[j] ascend, lie in the target's vocabulary, and are those t2d marks.

    d2t holds offsets. Some files hold absolute ids instead: there the values themselves ascend, and adding j leaves the
    vocabulary.
    """
    import torch

    offsets, vocab = _offsets(subject), subject.stated.body.get("vocab_size")
    if offsets is None or not is_int(vocab) or not len(offsets):
        return
    location = f"{WEIGHTS}:{DRAFT_TO_TARGET}"
    ids = torch.arange(len(offsets)) + offsets
    steps = ids[1:] > ids[:-1]
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        ascending = bool((offsets[1:] > offsets[:-1]).all()) and int(offsets.max()) < vocab
        guess = "; the values themselves ascend, so they look like ids rather than offsets" if ascending else ""
        yield Problem(location, f"maps to {int(ids.min())}..{int(ids.max())}, outside the target's {vocab} ids{guess}")
    elif not bool(steps.all()):
        yield Problem(location, f"ids that do not ascend: {int((~steps).sum())}")
    else:
        mask = subject.load(TARGET_TO_DRAFT)
        marked = mask.bool().nonzero().flatten() if mask is not None and mask.dim() == 1 else None
        if marked is not None and not torch.equal(marked, ids):
            yield Problem(
                location, "maps to other ids than t2d marks", effect="rows of the draft's head belong to other tokens"
            )


@check(
    "M07",
    "warning",
    level="weights",
    effect="the map is right only if the vocabulary was cut to its first ids",
    fix=FIX_REEXPORT_WEIGHTS,
    source="vLLM 0.33.0 qwen3_dflash.py fills a missing map with zeros",
    outcome="drops",
)
def map_is_not_empty(subject: Subject) -> Iterator[Problem]:
    """The id map of a reduced vocabulary holds offsets other than zero."""
    offsets, vocab = _offsets(subject), subject.stated.body.get("vocab_size")
    if offsets is not None and len(offsets) and len(offsets) != vocab and not bool(offsets.any()):
        yield Problem(f"{WEIGHTS}:{DRAFT_TO_TARGET}", f"all zeros: the head is mapped to the first {len(offsets)} ids")


@check(
    "M08",
    "info",
    level="weights",
    effect="a row of the head is spent on a token that is never wanted",
    fix="leave the mask token out when you export again, then check it: dflash validate {draft} --level weights",
    source="speculators 0.9.0 train/vocab_mapping.py",
)
def mask_is_not_proposed(subject: Subject) -> Iterator[Problem]:
    """The reduced vocabulary leaves out the mask token."""
    mask_id, offsets = subject.stated.value("mask_token_id"), _offsets(subject)
    if is_int(mask_id) and offsets is not None and mask_id in _ids(offsets):
        yield Problem(f"{WEIGHTS}:{DRAFT_TO_TARGET}", f"the draft can propose its mask token {mask_id}")


@check(
    "M09",
    "warning",
    level="weights",
    effect="the end of a text is never drafted",
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


@check(
    "M10",
    "warning",
    level="weights",
    effect="the draft was trained for another target, or its head was trained further",
    fix=(
        "check the draft against the target it was trained for: dflash validate {draft} --target ORG/REPO --level "
        "weights"
    ),
    source="speculators keeps head and embedding frozen from 0.5 to 0.9; sgl-project/SpecForge#800",
)
def copies_are_the_targets(subject: Subject) -> Iterator[Problem]:
    """The draft's copies of head and embedding equal the target's rows."""
    for name, _, _, difference in _changed_copies(subject):
        yield Problem(f"{WEIGHTS}:{name}", difference)


@check(
    "M12",
    level="weights",
    effect="what the draft proposes with these rows comes out as other tokens",
    fix=FIX_REEXPORT_WEIGHTS,
    source="speculators 0.9.0 train/vocab_mapping.py; vLLM 0.33.0 qwen3_dflash.py maps by position",
    outcome="drops",
)
def rows_are_in_their_places(subject: Subject) -> Iterator[Problem]:
    """No row of the draft's head or embedding is the target's row of another id.

    Training changes a row; only a fault of order makes it equal another.
    """
    for name, draft, target, _ in _changed_copies(subject):
        found = find_misplaced(draft, name, target)
        if found is not None:
            yield Problem(
                f"{WEIGHTS}:{name}",
                f"{found.count} of {found.num_rows} rows are the target's rows of other ids: row {found.row} stands "
                f"for id {found.expected_id} and holds that of id {found.found_id}",
            )


@check(
    "M11",
    level="weights",
    effect="two rows of the head compete for one token, and another token has none",
    fix=FIX_REEXPORT_WEIGHTS,
    source="vLLM 0.33.0 qwen3_dflash.py scatters logits by the map",
    outcome="drops",
)
def map_names_each_id_once(subject: Subject) -> Iterator[Problem]:
    """Every id of the draft maps to a target id of its own."""
    offsets = _offsets(subject)
    if offsets is None:
        return
    ids = _ids(offsets)
    repeats = len(ids) - len(set(ids))
    if repeats:
        yield Problem(f"{WEIGHTS}:{DRAFT_TO_TARGET}", f"repeated target ids: {repeats}")


def _changed_copies(subject: Subject) -> list[tuple[str, DraftCheckpoint, TargetSource, str]]:
    """The copies that differ from the target's rows, and where; compared once, since that reads all of both."""
    if "changed_copies" not in subject.known:
        compared = [(*copy, find_difference(copy[1], copy[0], copy[2])) for copy in _copies(subject)]
        subject.known["changed_copies"] = [item for item in compared if item[-1] is not None]
    found: list[tuple[str, DraftCheckpoint, TargetSource, str]] = subject.known["changed_copies"]
    return found


def _copies(subject: Subject) -> Iterator[tuple[str, DraftCheckpoint, TargetSource]]:
    """Head and embedding where the draft has its own, with the two checkpoints, if the target's weights are here.

    Whose rows a head holds is known by the id map only, so with a map that is broken the head is left out.
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
    """Whether a map is called for and missing, or does not say of every row of the head which id it stands for."""
    offsets, reduced = _offsets(subject), subject.parsed is not None and subject.parsed.config.has_reduced_vocab
    head = (subject.tensors or {}).get(HEAD)
    if reduced and head is not None and (offsets is None or len(offsets) != head.shape[0]):
        return True
    rules = (mask_counts_the_vocabulary, map_is_a_map, map_is_not_empty)
    return any(next(iter(rule(subject)), None) is not None for rule in rules)


def _has_weights(target: TargetSource) -> bool:
    """Whether the target's weights can be read; of a target on the hub there may be only headers, or only a config."""
    try:
        return all(info.file.is_file() for info in target.checkpoint.tensors.values())
    except CheckpointError:
        return False


def _offsets(subject: Subject) -> "torch.Tensor | None":
    """The id map d2t, None unless it is a list of integers; M03 and M04 report it otherwise."""
    tensor = subject.load(DRAFT_TO_TARGET)
    return None if tensor is None or tensor.dim() != 1 or tensor.is_floating_point() else tensor


def _ids(offsets: "torch.Tensor") -> list[int]:
    return [index + offset for index, offset in enumerate(offsets.tolist())]
