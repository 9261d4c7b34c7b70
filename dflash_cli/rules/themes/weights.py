"""Rules on the values of the weights, for `--level weights`. Each imports torch when it runs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dflash_cli.rules.rule import FIX_REEXPORT_WEIGHTS, Problem, check_weights
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_cli.rules.themes.tensors import FLOATS
from dflash_cli.rules.themes.unpacked import num_levels
from dflash_runtime.checkpoint.quantised.scaled_weights import is_scale

if TYPE_CHECKING:
    import torch

NORM_LIMIT = 1e-6
FLOAT16_MAX = 65504.0
OFFSET_MEAN = 0.5
OFFSET_NEGATIVE = 0.1
"""A norm holds offsets from 1 if its mean is within OFFSET_MEAN of 0 and this share of its values is negative."""

ZERO_SHARE = 1 / 8
MIN_VALUES = 4096
DISTINCT_8_BITS = 128
"""The number of absolute values that 8 bits can hold: a sign and 7 bits."""

HEADROOM = 1 / 8
"""Share of float16's range. Products of a few larger values overflow."""


@check_weights(
    "N13",
    effect="the draft proposes noise, or computes NaN",
    fix=FIX_REEXPORT_WEIGHTS,
    source="vllm-project/vllm#55294; speculators 0.9 NaN initialisation",
    outcome="drops",
    stops_runtime=True,
    fact="zeros",
)
def values_are_sane(subject: Subject) -> Iterator[Problem]:
    """Weights are finite, no tensor is all zeros, scales are positive, and no norm weight is near zero."""
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
        elif is_scale(name) and not bool((tensor > 0).all()):
            yield Problem(location, f"a scale of {float(tensor.min()):g}, expected positive numbers")
        elif "norm" in name and float(tensor.abs().max()) < NORM_LIMIT:
            effect = "the norm passes almost nothing on, unless later weights make up for it"
            yield Problem(location, f"every value is below {NORM_LIMIT:g}", effect, severity="warning")
    if zero_biases:
        others = f", and in {len(zero_biases) - 1} other biases" if len(zero_biases) > 1 else ""
        effect = "none by itself, but a trained bias is almost never zero throughout"
        yield Problem(f"{WEIGHTS}:{zero_biases[0]}", f"every value is zero{others}", effect, severity="warning")


@check_weights(
    "N14",
    "warning",
    effect="the tapped layer has no effect, although engines capture its output",
    fix="export the draft again, or test neighbouring layers: dflash validate {draft} --target {target} --level run",
    source="speculators converter slices fc by taps",
    fact="unused tap",
    follows_from=("zeros",),
)
def every_tap_is_used(subject: Subject) -> Iterator[Problem]:
    """For every tapped layer, fc.weight has a column that is not all zero."""
    taps, weight = subject.stated.taps, subject.load("fc.weight")
    if taps is None or weight is None or weight.dim() != 2 or weight.shape[1] % len(taps):
        return
    for tap, columns in zip(taps, weight.chunk(len(taps), dim=1), strict=True):
        if not bool(columns.any()):
            yield Problem(f"{WEIGHTS}:fc.weight", f"the columns of layer {tap} are all zero")


@check_weights(
    "N17",
    "warning",
    effect="one of the layers lacks values of its own",
    fix=FIX_REEXPORT_WEIGHTS,
    source="copying faults in exporters",
    outcome="drops",
    fact="copy",
    follows_from=("zeros", "one value"),
)
def layers_differ(subject: Subject) -> Iterator[Problem]:
    """No two layers have the same matrix, bit for bit."""
    seen: dict[tuple[str, bytes], str] = {}
    for name, tensor in _floats(subject):
        parts = name.split(".")
        if parts[0] != "layers" or len(parts) < 3 or tensor.dim() < 2:
            continue
        first = seen.setdefault((".".join(parts[2:]), _digest(tensor)), name)
        if first != name:
            yield Problem(f"{WEIGHTS}:{name}", f"the same values as {first}")


@check_weights(
    "N18",
    "warning",
    effect="the activations overflow if an engine serves the draft in float16",
    fix="serve it in bfloat16: dflash serve-command {draft} --target {target} --engine vllm",
    source="vllm-project/vllm#55250; InternLM/lmdeploy#4991",
)
def values_fit_float16(subject: Subject) -> Iterator[Problem]:
    """Weights stay well below float16's largest value."""
    for name, tensor in _floats(subject):
        largest = float(tensor.abs().max().double())
        if FLOAT16_MAX * HEADROOM < largest < float("inf"):
            yield Problem(f"{WEIGHTS}:{name}", f"reaches {largest:g}; float16 ends at {FLOAT16_MAX:g}")


@check_weights(
    "N19",
    "warning",
    effect="the tensor was never trained, its values were lost, or they were folded into a matrix beside it",
    fix=FIX_REEXPORT_WEIGHTS,
    source="initial values of torch.nn modules",
    outcome="drops",
    fact="one value",
)
def values_vary(subject: Subject) -> Iterator[Problem]:
    """The values of every tensor vary.

    Before training, every value of a norm is the same.
    """
    for name, tensor in _floats(subject):
        first = tensor.flatten()[0]
        if tensor.numel() > 1 and bool(first) and bool((tensor == first).all()):
            yield Problem(f"{WEIGHTS}:{name}", f"every value is {float(first):g}")


@check_weights(
    "N31",
    effect="nearly every norm multiplies by values near 0, so the draft proposes noise",
    fix="add 1 to the weights of all norms when you export, then check it: dflash validate {draft} --level weights",
    source="huggingface/transformers Gemma norms multiply by 1 + w; this layout multiplies by w",
    outcome="drops",
    fact="offsets",
)
def norms_are_not_offsets(subject: Subject) -> Iterator[Problem]:
    """Norm weights are factors, not offsets from 1.

    Offsets are around 0 with both signs. Factors are trained from 1 on and are almost never negative.
    """
    norms = [(name, tensor.float()) for name, tensor in _floats(subject, dim=1) if name.endswith("norm.weight")]
    shifted = [
        name
        for name, values in norms
        if abs(float(values.mean())) < OFFSET_MEAN and float((values < 0).float().mean()) > OFFSET_NEGATIVE
    ]
    if shifted and 3 * len(shifted) >= len(norms):
        message = f"values around 0 with both signs in {len(shifted)} of {len(norms)} norms, so probably offsets from 1"
        yield Problem(f"{WEIGHTS}:{shifted[0]}", message, also=tuple(f"{WEIGHTS}:{name}" for name in shifted[1:]))


@check_weights(
    "N32",
    "warning",
    effect="a part of the matrix does nothing: its values were lost, pruned or rounded to zero",
    fix=FIX_REEXPORT_WEIGHTS,
    source="copying faults in exporters; speculators converter slices fc by taps",
    outcome="drops",
    fact="zero lines",
    follows_from=("grid",),
)
def matrices_are_whole(subject: Subject) -> Iterator[Problem]:
    """In every matrix, less than an eighth of the rows and of the columns are all zero.

    Rounding to a coarse grid makes such rows too (N42), so matrices on a grid are left out.
    """
    for name, tensor in _floats(subject, dim=2):
        if not bool(tensor.any()) or num_levels(tensor) is not None:
            continue
        for kind, dim in (("rows", 1), ("columns", 0)):
            zeros = int((~tensor.bool().any(dim=dim)).sum())
            count = tensor.shape[1 - dim]
            if zeros >= max(1, count * ZERO_SHARE):
                yield Problem(f"{WEIGHTS}:{name}", f"{zeros} of {count} {kind} are all zero")


@check_weights(
    "N33",
    "warning",
    effect="the weights were once stored in 8 bits, and the lost precision does not come back",
    fix="export again from the weights of training, then check it: dflash validate {draft} --level weights",
    source="sgl-project/sglang#39087 (a quantised draft accepts less)",
    fact="few values",
)
def values_have_their_precision(subject: Subject) -> Iterator[Problem]:
    """Matrices hold more distinct values than 8 bits can, and float32 matrices use their low bits.

    A float32 file of bfloat16 values works, but is twice as large as necessary, so that finding is only an info.
    """
    import torch

    wide = []
    for name, tensor in _floats(subject, dim=2):
        if tensor.numel() < MIN_VALUES or not bool(tensor.any()):
            continue
        sample = tensor.flatten()[:: max(1, tensor.numel() // (8 * MIN_VALUES))]
        if len(sample.float().abs().unique()) <= DISTINCT_8_BITS:
            yield Problem(f"{WEIGHTS}:{name}", f"at most {DISTINCT_8_BITS} absolute values")
        elif tensor.dtype == torch.float32 and not bool((sample.contiguous().view(torch.int32) & 0xFFFF).any()):
            wide.append(name)
    if wide:
        yield Problem(
            f"{WEIGHTS}:{wide[0]}",
            f"float32 that holds bfloat16 values, in {len(wide)} matrices",
            effect="the file is twice as large as necessary",
            fix="if not intended, export it in the type of training: dflash validate {draft} --level weights",
            severity="info",
        )


def _floats(subject: Subject, dim: int | None = None) -> "Iterator[tuple[str, torch.Tensor]]":
    """Name and tensor of every float tensor that is not empty, of `dim` dimensions if it is given."""
    names = [
        name
        for name, info in (subject.tensors or {}).items()
        if info.dtype in FLOATS and info.num_elements and dim in (None, len(info.shape))
    ]
    if subject.checkpoint is not None:
        yield from subject.checkpoint.load_many(names)


def _digest(tensor: "torch.Tensor") -> bytes:
    import hashlib

    import torch

    rows: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(rows).digest()
