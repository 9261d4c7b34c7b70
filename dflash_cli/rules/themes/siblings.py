"""Looks at single tensors beside the same tensor of other layers, for `--level weights`. They import torch.

Sound drafts may differ as well, so these findings are remarks. `diagnose` names them if acceptance is low.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import TYPE_CHECKING

from dflash_cli.rules.rule import FIX_REEXPORT_WEIGHTS, Problem, check_weights
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_cli.rules.themes.tensors import FLOATS
from dflash_cli.rules.themes.unpacked import num_levels
from dflash_runtime.checkpoint.layout import MARKOV, SELECTOR

if TYPE_CHECKING:
    import torch

MIN_SIBLINGS = 2
SMALL = 0.1
"""A row or column is nearly zero below this share of the median norm."""

MEDIUM, SPREAD = 0.4, 1.5
"""Sizes are spread if this many times as many rows or columns are below MEDIUM as below SMALL."""

SMALL_SHARE = 1 / 16
UNLIKE_SIZE = 3.0
"""Ratio of root mean squares from which a tensor is unlike its siblings, if these agree within ALIKE_SIZE."""

ALIKE_SIZE = 2.0
OUTLIER = 12.0
"""Ratio of the largest value of a norm to its median, where the siblings' ratio is at most a quarter of it."""

NOISE_EDGE = 1.15
"""Largest singular value, as a share of the value that noise of this size has. Trained matrices exceed it by far."""

TRAINED_EDGE = 1.5
CLIPPED_SHARE, MIN_CLIPPED = 0.01, 16
ONE_PER_LINE = 1.5
"""Largest values per row or column that has one, up to which rows or columns were divided by their largest value."""

MAX_ROWS = 4096

Measure = Callable[["torch.Tensor"], float]


@check_weights(
    "N34",
    "info",
    effect="a part of the matrix does nearly nothing",
    fix=FIX_REEXPORT_WEIGHTS,
    source="copying faults in exporters; heads and channels that were pruned or masked",
    outcome="drops",
    fact="small lines",
    follows_from=("zeros", "one value", "zero lines", "few values", "grid"),
)
def rows_are_alike(subject: Subject) -> Iterator[Problem]:
    """Few rows and columns of a matrix are nearly zero, or its siblings have as many.

    If as many are small and not nearly zero, the sizes are spread, as by scales of channels. Then nothing was lost.
    """
    for kind, dim in (("rows", 1), ("columns", 0)):

        def small(matrix: "torch.Tensor", dim: int = dim) -> float:
            sizes = matrix.float().norm(dim=dim) / matrix.float().norm(dim=dim).median()
            few, between = (float((sizes < limit).float().mean()) for limit in (SMALL, MEDIUM))
            return few if between < SPREAD * few else 0.0

        for name, own, others in _beside(subject, small, dim=2):
            if kind == "rows" and _has_row_per_token(name):
                continue
            if own >= SMALL_SHARE and (not others or median(others) < own / 4):
                yield Problem(f"{WEIGHTS}:{name}", f"{own:.0%} of the {kind} are nearly zero")


@check_weights(
    "N35",
    "info",
    effect="one channel of the norm outweighs all others",
    fix=FIX_REEXPORT_WEIGHTS,
    source="damaged exports",
    outcome="drops",
    fact="outlier",
    follows_from=("offsets",),
)
def norms_have_no_outlier(subject: Subject) -> Iterator[Problem]:
    """No value of a norm is far larger than its other values, unless its siblings have such values."""

    def ratio(norm: "torch.Tensor") -> float:
        sizes = norm.float().abs()
        return float(sizes.max() / sizes.median().clamp(min=1e-9))

    for name, own, others in _beside(subject, ratio, dim=1):
        if "norm" in name and own > OUTLIER and (not others or max(others) < own / 4):
            yield Problem(f"{WEIGHTS}:{name}", f"its largest value is {own:.0f} times its median")


@check_weights(
    "N36",
    "info",
    effect="the layer counts too much or too little, if the tensor was scaled",
    fix=FIX_REEXPORT_WEIGHTS,
    source="exporters that fold scales into weights, or fold them twice",
    fact="size",
    follows_from=("zeros", "one value", "offsets", "clipped", "one sign", "format", "grid"),
)
def sizes_are_alike(subject: Subject) -> Iterator[Problem]:
    """No tensor is several times larger or smaller than the same tensor of all other layers.

    Of few layers, sizes do not tell which were scaled. So this is a cause only together with a reading of the tensor.
    """

    def size(tensor: "torch.Tensor") -> float:
        return float(tensor.float().square().mean().sqrt())

    for name, own, others in _beside(subject, size):
        if len(others) < MIN_SIBLINGS or not own or not min(others) or max(others) > ALIKE_SIZE * min(others):
            continue
        ratio = own / median(others)
        if not 1 / UNLIKE_SIZE < ratio < UNLIKE_SIZE:
            yield Problem(f"{WEIGHTS}:{name}", f"its values are {ratio:.3g} times as large as in other layers")


@check_weights(
    "N37",
    "info",
    effect="the matrix is like noise: it was never trained, or its values were lost, mixed or replaced",
    fix=FIX_REEXPORT_WEIGHTS,
    source="Marchenko and Pastur 1967: the singular values of random matrices",
    outcome="drops",
    fact="noise",
    follows_from=("zeros", "one value", "copy", "grid"),
)
def matrices_have_structure(subject: Subject) -> Iterator[Problem]:
    """The largest singular value of a matrix exceeds the value of noise if all siblings exceed it.

    Trained matrices of one layer may look like noise too, so one other layer is not enough for a comparison.
    """

    def edge(matrix: "torch.Tensor") -> float:
        import torch

        piece = matrix[:MAX_ROWS].float()
        piece = piece - piece.mean()
        vector = torch.ones(piece.shape[1], device=piece.device)
        for _ in range(12):
            vector = torch.nn.functional.normalize(piece.T @ (piece @ vector), dim=0)
        noise = float(piece.std()) * float(piece.shape[0] ** 0.5 + piece.shape[1] ** 0.5)
        return float((piece @ vector).norm()) / max(noise, 1e-12)

    found = list(_beside(subject, edge, dim=2))
    for name, own, others in found:
        if name.startswith("layers.") and len(others) < MIN_SIBLINGS:
            continue
        usual = min(others) if others else median(value for _, value, _ in found)
        if own < NOISE_EDGE and usual > TRAINED_EDGE:
            yield Problem(f"{WEIGHTS}:{name}", f"its largest singular value is {own:.2f} times the value of noise")


@check_weights(
    "N38",
    "info",
    effect="large values were cut off or rounded to one size, so the matrix lost a part of its effect",
    fix=FIX_REEXPORT_WEIGHTS,
    source="exports that clip values to the range of a smaller number format",
    outcome="drops",
    fact="clipped",
    follows_from=("one value", "few values", "format", "grid"),
)
def values_are_not_clipped(subject: Subject) -> Iterator[Problem]:
    """Few values of a matrix are equal to its largest value, by size.

    One such value in each row or column comes from scales that were not applied (N41).
    """

    def clipped(matrix: "torch.Tensor") -> float:
        sizes = matrix.float().abs()
        largest = sizes == sizes.max()
        lines = max(int(largest.any(dim=dim).sum()) for dim in (0, 1))
        return float(largest.float().mean()) if int(largest.sum()) > ONE_PER_LINE * lines else 0.0

    for name, own, _ in _beside(subject, clipped, dim=2):
        if CLIPPED_SHARE < own < 1 and own * (subject.tensors or {})[name].num_elements >= MIN_CLIPPED:
            yield Problem(f"{WEIGHTS}:{name}", f"{own:.0%} of the values have the largest size")


@check_weights(
    "N39",
    "info",
    effect="the repeated lines add nothing of their own: one was written over another, or both are their mean",
    fix=FIX_REEXPORT_WEIGHTS,
    source="exporters that write one shard of tensor parallelism twice; averages of permuted heads",
    outcome="drops",
    fact="repeated lines",
    follows_from=("zeros", "one value", "unused tap", "grid"),
)
def lines_differ(subject: Subject) -> Iterator[Problem]:
    """Few rows and columns of a matrix occur twice."""
    for kind, dim in (("rows", 0), ("columns", 1)):

        def repeated(matrix: "torch.Tensor", dim: int = dim) -> float:
            lines = matrix.float() if dim == 0 else matrix.float().T
            sums = lines.double() @ lines.new_ones(lines.shape[1]).double().cumsum(0)
            return 1 - len(sums[sums != 0].unique()) / max(1, int((sums != 0).sum()))

        for name, own, others in _beside(subject, repeated, dim=2):
            if kind == "rows" and _has_row_per_token(name):
                continue
            is_usual = bool(others) and median(others) >= own and (kind == "columns" or _may_repeat(name))
            if own >= SMALL_SHARE and not is_usual:
                yield Problem(f"{WEIGHTS}:{name}", f"{own:.0%} of the {kind} repeat another")


@check_weights(
    "N43",
    "info",
    effect="the matrix lost a part of its effect, unless it was trained with these zeros",
    fix=FIX_REEXPORT_WEIGHTS,
    source="tools that prune weights, and copies that lack a part",
    outcome="drops",
    fact="many zeros",
    follows_from=("zeros", "unused tap", "zero lines", "few values", "grid"),
)
def few_values_are_zero(subject: Subject) -> Iterator[Problem]:
    """Few values of a matrix are zero."""
    for name, own, _ in _beside(subject, lambda matrix: float((matrix == 0).float().mean()), dim=2):
        if own >= SMALL_SHARE:
            yield Problem(f"{WEIGHTS}:{name}", f"{own:.0%} of the values are zero")


def _beside(subject: Subject, measure: Measure, dim: int | None = None) -> Iterator[tuple[str, float, list[float]]]:
    """Each tensor's measure, and the measures of the same tensor in other layers. Skips tensors of one row.

    With `dim` 2, matrices on a coarse grid are left out: rounding also makes zeros, equal rows and equal sizes.
    """
    names = [
        name
        for name, info in (subject.tensors or {}).items()
        if info.dtype in FLOATS and info.num_elements > 1 and not _is_copy(name)
        and (dim is None or (dim == len(info.shape) and (dim == 1 or min(info.shape) > 1)))
    ]  # fmt: skip
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for name, tensor in subject.checkpoint.load_many(names) if subject.checkpoint is not None else ():
        parts = name.split(".")
        kind = ".".join(parts[2:]) if parts[0] == "layers" else name
        if dim != 2 or num_levels(tensor) is None:
            found = measure(tensor)
            if math.isfinite(found):  # otherwise rule N13 speaks
                groups[kind][name] = found
    for group in groups.values():
        for name, own in group.items():
            yield name, own, [value for other, value in group.items() if other != name]


def _has_row_per_token(name: str) -> bool:
    """Whether training leaves the rows of rare tokens as they were."""
    return name.startswith((MARKOV, SELECTOR)) and name.endswith(("codebook", "markov_w1.weight", "markov_w2.weight"))


def _may_repeat(name: str) -> bool:
    """Whether sound drafts may repeat rows: KV heads are repeated for readers that know no groups of query heads."""
    return name.endswith(("k_proj.weight", "v_proj.weight"))


def _is_copy(name: str) -> bool:
    """Whether the tensor is a copy of the target's embedding or head."""
    return name in {"embed_tokens.weight", "lm_head.weight"}
