"""Rules on the values of the weights, for `--level weights`. torch is imported when one of them runs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dflash_cli.rules.rule import FIX_REEXPORT_WEIGHTS, Problem, check
from dflash_cli.rules.subject import Subject
from dflash_cli.rules.themes.tensors import FLOATS, WEIGHTS

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
            effect = "hardly anything passes this norm, unless the weights after it make up for it"
            yield Problem(location, f"every value is below {NORM_LIMIT:g}", effect, severity="warning")
    if zero_biases:
        others = f", and in {len(zero_biases) - 1} other biases" if len(zero_biases) > 1 else ""
        effect = "none by itself; a bias that was trained is hardly ever zero throughout"
        yield Problem(f"{WEIGHTS}:{zero_biases[0]}", f"every value is zero{others}", effect, severity="warning")


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
    taps, weight = subject.stated.taps, subject.load("fc.weight")
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


def _floats(subject: Subject) -> "Iterator[tuple[str, torch.Tensor]]":
    """Every tensor that is not empty and whose elements are unpacked floats."""
    names = [name for name, info in (subject.tensors or {}).items() if info.dtype in FLOATS and info.num_elements]
    if subject.checkpoint is not None:
        yield from subject.checkpoint.load_many(names)


def _digest(tensor: "torch.Tensor") -> bytes:
    import hashlib

    import torch

    rows: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(rows).digest()
