"""The sizes at which SGLang stops with tensor parallelism, without DP attention.

Source: SGLang 0.5.23, run on N ranks for drafts (models/dflash.py, layers/linear.py, layers/quantization), and read for
targets (models/ and layers/moe/fused_moe_triton/layer.py).
"""

from collections.abc import Iterator
from dataclasses import replace

from dflash_cli.engines.split_model import ROW_CUT, SplitModel
from dflash_cli.engines.splitting import (
    Errors,
    Misfit,
    RowPart,
    matrix_misfits,
    size_misfits,
    whole_rows,
    with_errors,
)

ERRORS: Errors = {
    "heads": "AssertionError: total_num_heads={found}, tp_size={gpus}",
    "kv-heads": "AssertionError: total_num_kv_heads={found}, tp_size={gpus}",
    "experts": "Tensor parallel size {gpus} is greater than the number of experts {found}.",
    "columns": "Weight input_size_per_partition = {found} is not divisible by {unit}",
    "rows": "Weight output_partition_size = {found} is not divisible by {unit}",
    "expert-block": "The output_size of gate's and up's weight = {found} is not divisible by {unit}",
}
MARLIN_ROWS, MARLIN_COLUMNS = 64, 128
"""The kernel of AWQ needs multiples of these. Source: layers/quantization/marlin_utils.py:161."""


def sglang_misfits(model: SplitModel, num_gpus: int) -> Iterator[Misfit]:
    """Every size at which SGLang stops, or for which it loads too few scales. It pads vocabularies as needed."""
    found = (*size_misfits(model, num_gpus), *_matrix_misfits(model, num_gpus))
    yield from with_errors(found, ERRORS, num_gpus)


def _matrix_misfits(model: SplitModel, num_gpus: int) -> Iterator[Misfit]:
    for item in matrix_misfits(model, num_gpus, _marlin_rows if model.method == "awq" else whole_rows):
        if model.method == "gptq":  # which is not checked while loading
            yield replace(item, outcome="drops", error="a GPU's part has fewer scales than groups, without a message")
        else:
            yield item
    if model.method == "awq":
        yield from _marlin_columns(model, num_gpus)


def _marlin_rows(parts: list[RowPart]) -> Iterator[Misfit]:
    rows = sum(part.rows for part in parts)
    if rows % MARLIN_ROWS:
        why = f"each GPU gets {rows} rows of the fused matrix, expected a multiple of {MARLIN_ROWS}"
        yield Misfit(kind="rows", key=parts[0].module, found=rows, unit=MARLIN_ROWS, why=why)


def _marlin_columns(model: SplitModel, num_gpus: int) -> Iterator[Misfit]:
    rows_cut = {name for names in ROW_CUT for name in names}
    for module, matrix in model.matrices.items():
        columns = matrix.columns // num_gpus
        if module.rpartition(".")[2] in rows_cut or ".experts." in module or columns % matrix.block[1]:
            continue
        if columns % MARLIN_COLUMNS:
            why = f"each GPU gets {columns} columns, expected a multiple of {MARLIN_COLUMNS}"
            yield Misfit(kind="columns", key=module, found=columns, unit=MARLIN_COLUMNS, why=why)
