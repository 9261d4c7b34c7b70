"""The checks of tensor parallelism that engines share: whether N divides a size, and whether parts are whole blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from dflash_cli.engines.split_model import COLUMN_CUT, KEY_VALUE, ROW_CUT, ScaledMatrix, SplitModel
from dflash_cli.rules.rule import Outcome

MisfitKind = Literal["heads", "kv-heads", "width", "experts", "vocabulary", "columns", "rows", "expert-block"]
Errors = Mapping[MisfitKind, str]
"""Kind of a misfit -> the engine's error, with `{found}`, `{gpus}` and `{unit}`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A size that N GPUs do not divide.

    key      the key of the config, or the module of a packed matrix
    found    the size of the whole model, or of one GPU's part of a packed matrix
    unit     the size must be a multiple of it
    why      the fault in words
    error    the engine's error
    outcome  "drops" if the engine loads the model, and computes another one
    """

    kind: MisfitKind
    key: str
    found: int
    unit: int
    why: str
    error: str = ""
    outcome: Outcome = "stops"

    @property
    def is_tensor(self) -> bool:
        """Whether `key` is a module."""
        return self.kind in ("columns", "rows", "expert-block")


@dataclass(frozen=True, slots=True)
class RowPart:
    """One GPU's part of the rows of a matrix: `rows` of the whole matrix's, which `num_parts` GPUs hold in turn."""

    module: str
    matrix: ScaledMatrix
    num_parts: int

    @property
    def rows(self) -> int:
        return self.matrix.rows // self.num_parts


def size_misfits(model: SplitModel, num_gpus: int) -> Iterator[Misfit]:
    """Heads, widths and experts that the GPUs do not divide. KV heads may also divide the number of GPUs."""
    if model.num_heads is not None and model.num_heads % num_gpus:
        yield _misfit("heads", "num_attention_heads", model.num_heads, num_gpus)
    for key, count in model.kv_heads.items():
        if count % num_gpus and num_gpus % count:
            yield _misfit("kv-heads", key, count, num_gpus, "a multiple or a divisor")
    for key, width in model.widths.items():
        if width % num_gpus:
            yield _misfit("width", key, width, num_gpus)
    if model.num_experts is not None and model.num_experts < num_gpus:
        why = f"{model.num_experts} experts, fewer than {num_gpus} GPUs"
        yield Misfit(kind="experts", key="num_experts", found=model.num_experts, unit=num_gpus, why=why)


def _misfit(kind: MisfitKind, key: str, found: int, num_gpus: int, expected: str = "a multiple") -> Misfit:
    why = f"{found}, expected {expected} of {num_gpus}, the number of GPUs"
    return Misfit(kind=kind, key=key, found=found, unit=num_gpus, why=why)


def matrix_misfits(
    model: SplitModel, num_gpus: int, rows_of: Callable[[list[RowPart]], Iterator[Misfit]]
) -> Iterator[Misfit]:
    """Packed matrices that N cuts inside a block or group. `rows_of` judges the parts of a fused matrix."""
    parents: dict[str, dict[str, ScaledMatrix]] = {}
    for module, matrix in model.matrices.items():
        parent, _, last = module.rpartition(".")
        parents.setdefault(parent, {})[last] = matrix
    for parent, members in parents.items():
        if ".experts." in f".{parent}.":
            yield from _expert_misfits(parent, members, num_gpus)
            continue
        for last in COLUMN_CUT:
            if last in members and not members[last].columns % num_gpus:
                yield from _column_misfits(f"{parent}.{last}", members[last], num_gpus)
        for names in ROW_CUT[len(model.kv_heads) > 1 :]:  # the number of KV heads in these matrices is not known
            parts = [
                RowPart(f"{parent}.{last}", members[last], _num_parts(last, model, num_gpus))
                for last in names
                if last in members
            ]
            if parts and not any(part.matrix.rows % part.num_parts for part in parts):
                yield from rows_of(parts)


def _num_parts(last: str, model: SplitModel, num_gpus: int) -> int:
    return min(num_gpus, *model.kv_heads.values()) if last in KEY_VALUE and model.kv_heads else num_gpus


def _column_misfits(module: str, matrix: ScaledMatrix, num_gpus: int) -> Iterator[Misfit]:
    columns, unit = matrix.columns // num_gpus, matrix.block[1]
    if columns % unit:
        why = f"each GPU gets {columns} columns, expected a multiple of {unit}, which share a scale"
        yield Misfit(kind="columns", key=module, found=columns, unit=unit, why=why)


def whole_rows(parts: list[RowPart]) -> Iterator[Misfit]:
    """The first part of a fused matrix that has incomplete blocks.

    Source: vLLM validate_fp8_block_shape, SGLang Fp8LinearMethod.validate_block_quant_shapes.
    """
    found = next(filter(None, map(row_misfit, parts)), None)
    if found is not None:
        yield found


def row_misfit(part: RowPart) -> Misfit | None:
    """The misfit if a GPU's rows end inside a block."""
    unit = part.matrix.block[0]
    why = f"each GPU gets {part.rows} rows, expected a multiple of {unit}, which share a scale"
    return Misfit(kind="rows", key=part.module, found=part.rows, unit=unit, why=why) if part.rows % unit else None


def _expert_misfits(parent: str, members: Mapping[str, ScaledMatrix], num_gpus: int) -> Iterator[Misfit]:
    """An expert's width on one GPU must be whole blocks in both directions. Source: validate_fp8_block_shape_moe."""
    for last, matrix in members.items():
        width = matrix.columns if last in COLUMN_CUT else matrix.rows
        unit = next((unit for unit in matrix.block if width // num_gpus % unit), None)
        if matrix.block[0] > 1 and unit is not None and not width % num_gpus:
            found = width // num_gpus
            why = f"each GPU gets {found} of an expert's width, expected a multiple of {unit}, which share a scale"
            yield Misfit(kind="expert-block", key=f"{parent}.{last}", found=found, unit=unit, why=why)


def with_errors(misfits: Iterable[Misfit], errors: Errors, num_gpus: int) -> Iterator[Misfit]:
    """The misfits with the engine's errors."""
    for item in misfits:
        error = item.error or errors.get(item.kind, "AssertionError").format(
            found=item.found, gpus=num_gpus, unit=item.unit
        )
        yield replace(item, error=error)
