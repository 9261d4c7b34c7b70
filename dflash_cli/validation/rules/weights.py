"""Rules on the weights themselves, for `--level weights`. torch is imported when one of them runs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.row_matches import find_misplaced
from dflash_cli.checkpoints.target_copies import find_difference
from dflash_cli.validation.rule import Problem, check
from dflash_cli.validation.rules.tensors import FLOATS, WEIGHTS
from dflash_cli.validation.subject import Subject
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, EMBEDDING, HEAD, TARGET_TO_DRAFT
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import is_int

FIX_REEXPORT_WEIGHTS = (
    "export the draft again from the training run, then check it: dflash validate {draft} --level weights"
)

if TYPE_CHECKING:
    import torch

NORM_LIMIT = 1e-6
FLOAT16_MAX = 65504.0
OFFSET_MEAN = 0.5
OFFSET_NEGATIVE = 0.1
"""A norm whose mean is nearer to 0 than that, with such a share of negative values, holds offsets from 1."""

ZERO_SHARE = 1 / 8
MIN_VALUES = 16384
DISTINCT_8_BITS = 128
"""Sizes of values that a sign and 7 bits tell apart."""

HEADROOM = 1 / 8
"""Share of float16's range above which a product of a few such values leaves it."""


@check(
    "N13",
    level="weights",
    effect="everything drafted with it is noise, or NaN",
    fix=FIX_REEXPORT_WEIGHTS,
    source="vllm-project/vllm#55294; speculators 0.9 NaN initialisation",
    outcome="drops",
    stops_runtime=True,
)
def values_are_sane(subject: Subject) -> Iterator[Problem]:
    """Weights are finite, no tensor is all zeros, and no norm weight is near zero."""
    import torch

    zero_biases = []
    for name, tensor in _floats(subject):
        location = f"{WEIGHTS}:{name}"
        finite = torch.isfinite(tensor)
        if not bool(finite.all()):
            yield Problem(location, f"NaN or infinite values: {int((~finite).sum())}")
        elif not bool(tensor.any()):
            if name.endswith(".bias"):
                zero_biases.append(name)
            else:
                yield Problem(location, "every value is zero")
        elif "norm" in name and float(tensor.abs().max()) < NORM_LIMIT:
            yield Problem(location, f"every value is below {NORM_LIMIT:g}", severity="warning")
    if zero_biases:
        others = f", and in {len(zero_biases) - 1} other biases" if len(zero_biases) > 1 else ""
        yield Problem(f"{WEIGHTS}:{zero_biases[0]}", f"every value is zero{others}", severity="warning")


@check(
    "N14",
    "warning",
    level="weights",
    effect="the tapped layer has no effect, although engines capture its output",
    fix="export the draft again, or test neighbouring layers: dflash validate {draft} --target {target} --level run",
    source="speculators converter slices fc by taps",
)
def every_tap_is_used(subject: Subject) -> Iterator[Problem]:
    """Every tapped layer has columns in fc.weight that are not all zero."""
    taps, weight = subject.taps, _load(subject, "fc.weight")
    if taps is None or weight is None or weight.dim() != 2 or weight.shape[1] % len(taps):
        return
    for tap, columns in zip(taps, weight.chunk(len(taps), dim=1), strict=True):
        if not bool(columns.any()):
            yield Problem(f"{WEIGHTS}:fc.weight", f"the columns of layer {tap} are all zero")


@check(
    "N17",
    "warning",
    level="weights",
    effect="one layer was written twice, or never trained",
    fix=FIX_REEXPORT_WEIGHTS,
    source="copying faults in exporters",
)
def layers_differ(subject: Subject) -> Iterator[Problem]:
    """Every layer has matrices of its own, none equal to another layer's bit for bit."""
    seen: dict[tuple[str, bytes], str] = {}
    for name, tensor in _floats(subject):
        parts = name.split(".")
        if parts[0] != "layers" or len(parts) < 3 or tensor.dim() < 2:
            continue
        key = (".".join(parts[2:]), _digest(tensor))
        if key in seen:
            yield Problem(f"{WEIGHTS}:{name}", f"the same values as {seen[key]}")
        seen.setdefault(key, name)


@check(
    "N18",
    "warning",
    level="weights",
    effect="if the draft is served in float16, its activations overflow",
    fix="serve it in bfloat16: dflash serve-command {draft} --target {target} --engine vllm",
    source="vllm-project/vllm#55250; InternLM/lmdeploy#4991",
)
def values_fit_float16(subject: Subject) -> Iterator[Problem]:
    """Weights stay well below float16's largest value."""
    for name, tensor in _floats(subject):
        largest = float(tensor.abs().max().double())
        if FLOAT16_MAX * HEADROOM < largest < float("inf"):
            yield Problem(f"{WEIGHTS}:{name}", f"reaches {largest:g}; float16 ends at {FLOAT16_MAX:g}")


@check(
    "N19",
    "warning",
    level="weights",
    effect="the tensor was never trained, or was lost on the way",
    fix=FIX_REEXPORT_WEIGHTS,
    source="initial values of torch.nn modules",
)
def values_vary(subject: Subject) -> Iterator[Problem]:
    """The values of every tensor vary.

    One value throughout is what a norm holds before training.
    """
    for name, tensor in _floats(subject):
        first = tensor.flatten()[0]
        if tensor.numel() > 1 and bool(first) and bool((tensor == first).all()):
            yield Problem(f"{WEIGHTS}:{name}", f"every value is {float(first):g}")


@check(
    "N31",
    level="weights",
    effect="nearly every norm multiplies by values near 0, so everything drafted is noise",
    fix="add 1 to the weights of all norms when you export, then check it: dflash validate {draft} --level weights",
    source="huggingface/transformers Gemma norms multiply by 1 + w; this layout multiplies by w",
    outcome="drops",
)
def norms_are_not_offsets(subject: Subject) -> Iterator[Problem]:
    """The weights of norms are what is multiplied by, not what is to be added to 1.

    Offsets lie around 0 with both signs; weights that were trained from 1 are hardly ever negative.
    """
    shifted, total = [], 0
    for name, tensor in _floats(subject):
        if not name.endswith("norm.weight") or tensor.dim() != 1:
            continue
        total += 1
        values = tensor.float()
        if abs(float(values.mean())) < OFFSET_MEAN and float((values < 0).float().mean()) > OFFSET_NEGATIVE:
            shifted.append(name)
    if shifted and 3 * len(shifted) >= total:
        yield Problem(
            f"{WEIGHTS}:{shifted[0]}", f"values around 0 with both signs in {len(shifted)} of {total} norms: 1 + w?"
        )


@check(
    "N32",
    "warning",
    level="weights",
    effect="part of the matrix does nothing: it was lost on the way, or cut to another size",
    fix=FIX_REEXPORT_WEIGHTS,
    source="copying faults in exporters; speculators converter slices fc by taps",
    outcome="drops",
)
def matrices_are_whole(subject: Subject) -> Iterator[Problem]:
    """No matrix has an eighth or more of its rows or columns all zero."""
    for name, tensor in _floats(subject):
        if tensor.dim() != 2 or not bool(tensor.any()):
            continue
        for kind, dim in (("rows", 1), ("columns", 0)):
            zeros = int((~tensor.bool().any(dim=dim)).sum())
            count = tensor.shape[1 - dim]
            if zeros >= max(1, count * ZERO_SHARE):
                yield Problem(f"{WEIGHTS}:{name}", f"{zeros} of {count} {kind} are all zero")


@check(
    "N33",
    "warning",
    level="weights",
    effect="the weights went through 8 bits on the way here; what they lost does not come back",
    fix="export again from the weights of training, then check it: dflash validate {draft} --level weights",
    source="sgl-project/sglang#39087 (a quantised draft accepts less)",
)
def values_have_their_precision(subject: Subject) -> Iterator[Problem]:
    """Matrices hold more distinct values than 8 bits can tell apart, and float32 ones use their low bits.

    A float32 file of bfloat16 values works as well as one of half its size, so that is a remark.
    """
    import torch

    low, wide = [], []
    for name, tensor in _floats(subject):
        if tensor.dim() != 2 or tensor.numel() < MIN_VALUES or not bool(tensor.any()):
            continue
        sample = tensor.flatten()[:: max(1, tensor.numel() // (8 * MIN_VALUES))]
        if len(sample.float().abs().unique()) <= DISTINCT_8_BITS:
            low.append(name)
        elif tensor.dtype == torch.float32 and not bool((sample.contiguous().view(torch.int32) & 0xFFFF).any()):
            wide.append(name)
    if low:
        yield Problem(f"{WEIGHTS}:{low[0]}", f"at most {DISTINCT_8_BITS} sizes of values in {len(low)} matrices")
    if wide:
        yield Problem(
            f"{WEIGHTS}:{wide[0]}",
            f"float32 that holds bfloat16 values, in {len(wide)} matrices",
            effect="the file is twice as large as it need be",
            fix="if that was not meant, export it in the type of training: dflash validate {draft} --level weights",
            severity="info",
        )


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
    mask = _load(subject, TARGET_TO_DRAFT)
    reduced = subject.config.get("draft_vocab_size")
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

    offsets, vocab = _offsets(subject), subject.body.get("vocab_size")
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
        mask = _load(subject, TARGET_TO_DRAFT)
        marked = mask.bool().nonzero().flatten() if mask is not None and mask.dim() == 1 else None
        if marked is not None and not torch.equal(marked, ids):
            yield Problem(
                location, "maps to other ids than t2d marks", effect="rows of the draft's head belong to other tokens"
            )


@check(
    "M07",
    level="weights",
    effect="the map is right only if the vocabulary was cut to its first ids",
    fix=FIX_REEXPORT_WEIGHTS,
    source="vLLM 0.33.0 qwen3_dflash.py fills a missing map with zeros",
    outcome="drops",
)
def map_is_not_empty(subject: Subject) -> Iterator[Problem]:
    """The id map of a reduced vocabulary holds offsets other than zero."""
    offsets, vocab = _offsets(subject), subject.body.get("vocab_size")
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
    mask_id, offsets = subject.stated("mask_token_id"), _offsets(subject)
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
    target, checkpoint = subject.target_source, subject.checkpoint
    if target is None or subject.parsed is None or checkpoint is None or not _has_weights(target):
        return
    draft = open_draft(checkpoint)
    for name in (HEAD, EMBEDDING):
        difference = find_difference(draft, name, target) if name in (subject.tensors or {}) else None
        if difference is not None:
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
    target, checkpoint = subject.target_source, subject.checkpoint
    if target is None or subject.parsed is None or checkpoint is None or not _has_weights(target):
        return
    draft = open_draft(checkpoint)
    for name in (HEAD, EMBEDDING):
        if name not in (subject.tensors or {}) or find_difference(draft, name, target) is None:
            continue
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


def _has_weights(target: TargetSource) -> bool:
    """Whether the target's weights can be read; of a target on the hub there may be only headers, or only a config."""
    try:
        return all(info.file.is_file() for info in target.checkpoint.tensors.values())
    except CheckpointError:
        return False


def _floats(subject: Subject) -> "Iterator[tuple[str, torch.Tensor]]":
    """Every tensor that is not empty and whose elements are unpacked floats."""
    names = [name for name, info in (subject.tensors or {}).items() if info.dtype in FLOATS and info.num_elements]
    if subject.checkpoint is not None:
        yield from subject.checkpoint.load_many(names)


def _load(subject: Subject, name: str) -> "torch.Tensor | None":
    if subject.checkpoint is None or name not in (subject.tensors or {}):
        return None
    return subject.checkpoint.load(name)


def _offsets(subject: Subject) -> "torch.Tensor | None":
    """The id map d2t, None unless it is a list of integers; M03 and M04 report it otherwise."""
    tensor = _load(subject, DRAFT_TO_TARGET)
    return None if tensor is None or tensor.dim() != 1 or tensor.is_floating_point() else tensor


def _ids(offsets: "torch.Tensor") -> list[int]:
    return [index + offset for index, offset in enumerate(offsets.tolist())]


def _digest(tensor: "torch.Tensor") -> bytes:
    import hashlib

    import torch

    rows: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(rows).digest()
