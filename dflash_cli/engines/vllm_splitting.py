"""The sizes at which vLLM stops with tensor parallelism.

The draft runs on the GPUs of its target: vLLM checks its heads with `draft_tensor_parallel_size`, and cuts its layers
by the target's number. Source: vLLM 0.24.0, 0.28.0 and 0.33.0, run on N ranks: config/model.py
verify_with_parallel_config, layers/linear.py, layers/vocab_parallel_embedding.py, layers/quantization,
models/qwen3_dflash.py, and the models of targets.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from math import ceil, gcd

from dflash_cli.engines.split_model import SplitModel
from dflash_cli.engines.splitting import (
    Errors,
    Misfit,
    RowPart,
    matrix_misfits,
    row_misfit,
    size_misfits,
    whole_rows,
    with_errors,
)

VOCABULARY_STEP = 64
"""vLLM adds rows to a vocabulary up to a multiple of this. Source: layers/vocab_parallel_embedding.py."""
WITHOUT_REPLICAS = frozenset({"gpt_oss"})
"""Model types with at least one KV head per GPU. Source: models/gpt_oss.py:156."""
MACHETE_COLUMNS = 64
"""vLLM's kernel of GPTQ for capability 9.0 takes such parts, and checks no groups."""
REFINES_EXPERTS = (0, 29)
"""The first release that makes FP8 blocks of experts smaller, so that each GPU's part has whole blocks."""
SMALLEST_BLOCK = 32
OTHER_SCALES = "rows are multiplied by scales of other rows, without a message"
FEWER_SCALES = "on a GPU of capability 9.0, its part has fewer scales than groups; on other GPUs it stops"
ERRORS: Errors = {
    "heads": "Total number of attention heads ({found}) must be divisible by tensor parallel size ({gpus}).",
    "experts": "Tensor parallel size {gpus} is greater than the number of experts {found}.",
    "vocabulary": "{found} is not divisible by {gpus}",
    "columns": "Weight input_size_per_partition = {found} is not divisible by {unit}",
    "rows": "Weight output_partition_size = {found} is not divisible by weight quantization block_n = {unit}.",
    "expert-block": "The output_size of gate's and up's weight = {found} is not divisible by {unit}",
}


def vllm_misfits(model: SplitModel, num_gpus: int, release: tuple[int, ...]) -> Iterator[Misfit]:
    """Every size at which a release of vLLM stops, or for which it reads scales of other blocks."""
    sizes = (*_size_misfits(model, num_gpus), *_matrix_misfits(model, num_gpus, release))
    yield from with_errors(sizes, ERRORS, num_gpus)


def _size_misfits(model: SplitModel, num_gpus: int) -> Iterator[Misfit]:
    yield from size_misfits(model, num_gpus)
    for key, rows in model.vocabularies.items():
        padded = ceil(rows / VOCABULARY_STEP) * VOCABULARY_STEP
        if padded % num_gpus:
            why = f"{rows}, padded to {padded}, expected a multiple of {num_gpus}, the number of GPUs"
            yield Misfit(kind="vocabulary", key=key, found=padded, unit=num_gpus, why=why)
    has_replicas = model.is_draft or model.model_type not in WITHOUT_REPLICAS
    for key, found in () if has_replicas else model.replicated(num_gpus).items():
        why = f"{found}, expected at least {num_gpus}, the number of GPUs"
        error = "ZeroDivisionError: integer modulo by zero"
        yield Misfit(kind="kv-heads", key=key, found=found, unit=num_gpus, why=why, error=error)


def _matrix_misfits(model: SplitModel, num_gpus: int, release: tuple[int, ...]) -> Iterator[Misfit]:
    for item in matrix_misfits(model, num_gpus, _shared if model.method == "fp8" else whole_rows):
        if item.kind == "expert-block" and release >= REFINES_EXPERTS and _is_refined(item, model):
            continue
        is_unchecked = model.method == "gptq" and not item.found % MACHETE_COLUMNS
        yield replace(item, outcome="drops", error=FEWER_SCALES) if is_unchecked else item


def _is_refined(item: Misfit, model: SplitModel) -> bool:
    """Whether vLLM makes the blocks of experts smaller. Source: fused_moe/oracle/fp8.py refine_fp8_moe_block_shape."""
    matrix = model.matrices[item.key]
    return model.method == "fp8" and gcd(*matrix.block, item.found, matrix.rows, matrix.columns) >= SMALLEST_BLOCK


def _shared(parts: list[RowPart]) -> Iterator[Misfit]:
    """Parts of a fused matrix may share a block, if loading finds enough scales. Rows then get scales of other rows.

    Source: layers/linear.py _maybe_allow_fp8_block_shape_mismatch and adjust_block_scale_shard, parameter.py:168, 192.
    """
    found = sorted(_shared_blocks(parts), key=lambda item: item.outcome != "stops")
    yield from found[:1]


def _shared_blocks(parts: list[RowPart]) -> Iterator[Misfit]:
    block = parts[0].matrix.block[0]
    *begins, end = accumulate((part.rows for part in parts), initial=0)
    for begin, part in zip(begins, parts, strict=True):
        is_cut = part.num_parts > 1 and part.rows % block
        if not begin % block and not is_cut:
            continue
        misfit = row_misfit(part) or row_misfit(parts[0])
        assert misfit is not None
        first, size, stored = ceil(begin / block), ceil(part.rows / block), ceil(part.matrix.rows / block)
        if first + size > ceil(end / block) or part.num_parts * size > stored:
            yield replace(misfit, error="RuntimeError: start + length exceeds dimension size")
        else:
            yield replace(misfit, outcome="drops", error=OTHER_SCALES)
