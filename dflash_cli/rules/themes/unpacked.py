"""Looks at values that were unpacked from a smaller number format in the wrong way, for `--level weights`.

Sound drafts may look like this too, so these findings are remarks. `diagnose` names them if acceptance is low.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dflash_cli.rules.rule import FIX_REEXPORT_WEIGHTS, Problem, check_weights
from dflash_cli.rules.subject import WEIGHTS, Subject

if TYPE_CHECKING:
    import torch

PLAIN = ("BF16", "F16", "F32")
LARGEST = {448.0: "float8 e4m3", 240.0: "float8 e4m3fnuz", 57344.0: "float8 e5m2", 127.0: "int8", 128.0: "int8"}
"""The largest values of small number formats."""

ONE_SIDED = 0.98
"""Share of the values of a row from which they have one sign. About half of trained values are negative."""

MOST_ROWS, MIN_SIGNED = 0.5, 0.5
"""Share of the rows that are one-sided, and share of the values of a row that are not zero, at least."""

ROUNDING = 1e-5
MOST_PER_ROW = 2
"""Largest values per row on average from which the matrix was clipped (N38)."""

FEW_ROWS, FEW_SIZES = 8, 3
MOST_LEVELS = 9
"""Sizes of values, zero included, that 4 bits hold at most. As many trained values have more different sizes."""

COARSE_LEVELS = 5
"""Levels of a matrix with one scale, or one per row, that are surely too few: 3 bits hold four, and zero."""

SAMPLE, MIN_SAMPLE, MIN_GROUP, GRID_SHARE = 1 << 16, 128, 32, 0.98
FIRST_PIECES, FIRST_COLUMNS = 128, 16
"""Pieces, and columns of each, that are enough to see that most matrices are on no grid."""

SAME_LARGEST = 0.9
"""Share of the rows with the same largest size. Rows of trained matrices differ."""


@check_weights(
    "N40",
    "info",
    effect=(
        "each row adds a constant times the sum of its inputs, as if signs were lost or a constant, like a zero point, "
        "was added"
    ),
    fix=FIX_REEXPORT_WEIGHTS,
    source="asymmetric integer formats store values from a zero point on",
    outcome="drops",
    fact="one sign",
    follows_from=("one value", "grid"),
)
def rows_have_both_signs(subject: Subject) -> Iterator[Problem]:
    """Most rows of every matrix have positive and negative values. Rows that are mostly zero say nothing."""
    for name, matrix in _matrices(subject):
        if is_one_sided(matrix.float()):
            yield Problem(f"{WEIGHTS}:{name}", "most rows have values of one sign only")


@check_weights(
    "N41",
    "info",
    effect=(
        "the matrix or its rows have another size than in training, if the scales of a packed format were not applied"
    ),
    fix=FIX_REEXPORT_WEIGHTS,
    source="float8 and integer formats store values divided by scales of tensors or rows",
    outcome="drops",
    fact="format",
    follows_from=("one value", "grid"),
)
def scales_were_applied(subject: Subject) -> Iterator[Problem]:
    """No matrix fills the range of a small number format, and its rows have different largest values.

    On a coarse grid, rows have the same largest value in any case. There it counts only if all values are codes of 4
    bits: halves and whole numbers.
    """
    for name, matrix in _matrices(subject):
        sizes = matrix.float().abs()
        largest = float(sizes.max())
        form = next((form for value, form in LARGEST.items() if abs(largest / value - 1) < ROUNDING), None)
        if form is not None:
            yield Problem(f"{WEIGHTS}:{name}", f"its largest value is {largest:g}, as in {form}")
            continue
        of_rows = sizes.amax(dim=1)
        share = float((of_rows == largest).float().mean())
        is_clipped = int((sizes == largest).sum()) > MOST_PER_ROW * len(of_rows)
        if (is_clipped or num_levels(matrix) is not None) and not are_codes(matrix):
            continue
        if len(of_rows) >= FEW_ROWS and share > SAME_LARGEST and len(sizes.unique()) > FEW_SIZES:
            yield Problem(f"{WEIGHTS}:{name}", f"{share:.0%} of the rows have the same largest value, {largest:g}")


@check_weights(
    "N42",
    "info",
    effect="small values became zero and the others moved to a level",
    fix="export again from the weights of training, then check it: dflash validate {draft} --level weights",
    source="round-to-nearest formats of 2 and 3 bits; sgl-project/sglang#39087 (a quantised draft accepts less)",
    outcome="drops",
    fact="grid",
)
def values_are_not_coarse(subject: Subject) -> Iterator[Problem]:
    """The sizes of a matrix or of its rows lie on more than five levels.

    Four bits in groups cost sound drafts hardly any tokens, so such a grid is not reported, nor is a single level.
    """
    for name, matrix in _matrices(subject):
        count = num_levels(matrix, of_groups=False)
        if count is not None and count <= COARSE_LEVELS and not are_codes(matrix):
            yield Problem(f"{WEIGHTS}:{name}", f"the sizes of its values lie on a grid of {count} levels")


def are_codes(matrix: "torch.Tensor") -> bool:
    """Whether every value of a matrix is a multiple of one half."""
    doubled = 2 * matrix.float()
    return bool((doubled == doubled.round()).all())


def num_levels(matrix: "torch.Tensor", *, of_groups: bool = True) -> int | None:
    """The number of different sizes of values in a matrix on a coarse grid; None if it is on none.

    A grid has one scale, a scale per row, or per group of columns (`of_groups`). Zero is a level.
    """
    sample = matrix[: max(1, SAMPLE // max(1, matrix.shape[1]))].float().abs()
    if sample.numel() < MIN_SAMPLE:
        return None
    pieces = [sample.reshape(1, -1), sample, *(_groups(sample) if of_groups else ())]
    found = (_levels(piece) for piece in pieces if piece.shape[1] >= MIN_GROUP)
    return next((count for count in found if 1 < count <= MOST_LEVELS), None)


def _groups(sizes: "torch.Tensor") -> "list[torch.Tensor]":
    return [sizes.reshape(-1, size) for size in (128, 64, 32) if sizes.shape[1] % size == 0]


def _levels(pieces: "torch.Tensor") -> int:
    """The levels that nearly every piece has at most. Pieces that are mostly zero say nothing.

    More than MOST_LEVELS levels are not counted to the end: the first columns of some pieces show them.
    """
    import torch

    # A piece with more levels than MOST_LEVELS and zero is telling. Usually this check decides, in a third of the time.
    first = _count_levels(pieces[:FIRST_PIECES, :FIRST_COLUMNS])
    if int((first > MOST_LEVELS + 1).sum()) >= _num_most(len(pieces)):
        return MOST_LEVELS + 1
    is_telling = (pieces > 0).sum(dim=1) > MOST_LEVELS
    num_telling = int(is_telling.sum())
    if not num_telling:
        return 0
    if int((first > MOST_LEVELS)[is_telling[:FIRST_PIECES]].sum()) >= _num_most(num_telling):
        return MOST_LEVELS + 1
    counts = _count_levels(pieces[is_telling])
    return int(torch.quantile(counts.float(), GRID_SHARE, interpolation="higher"))


def _num_most(num_pieces: int) -> int:
    """How many pieces with more levels outvote the others."""
    return num_pieces - int(GRID_SHARE * (num_pieces - 1))


def _count_levels(pieces: "torch.Tensor") -> "torch.Tensor":
    """The number of different values in each piece."""
    ordered = pieces.sort(dim=1).values
    return 1 + (ordered[:, 1:] != ordered[:, :-1]).sum(dim=1)


def is_one_sided(matrix: "torch.Tensor") -> bool:
    """Whether most rows of a matrix have values of one sign only."""
    if matrix.dim() != 2 or min(matrix.shape) < 2:
        return False
    negative, signed = (matrix < 0).float().mean(dim=1), (matrix != 0).float().mean(dim=1)
    share = negative / signed.clamp(min=1e-9)
    found = (signed >= MIN_SIGNED) & ((share > ONE_SIDED) | (share < 1 - ONE_SIDED))
    return float(found.float().mean()) > MOST_ROWS


def _matrices(subject: Subject) -> "Iterator[tuple[str, torch.Tensor]]":
    """Matrices of plain numbers without a tensor of scales beside them, except copies of the target's tensors."""
    tensors = subject.tensors or {}
    scaled = {name.rpartition(".weight_scale")[0] for name in tensors if ".weight_scale" in name}
    names = [
        name
        for name, info in tensors.items()
        if info.dtype in PLAIN and len(info.shape) == 2 and min(info.shape) > 1
        and name not in {"embed_tokens.weight", "lm_head.weight"} and name.removesuffix(".weight") not in scaled
    ]  # fmt: skip
    yield from subject.checkpoint.load_many(names) if subject.checkpoint is not None else ()
