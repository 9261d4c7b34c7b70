"""Round matrices of a draft to FP8 (e4m3), in the form of compressed-tensors that engines load.

Each block of 128 x 128 numbers has one scale, its largest number / 448. Readers round activations with a scale per row
and 128 columns. By default q, k, v and the head stay as they are: engines have multiplied k and v of the context
outside their quantised layers (vllm-project/vllm#51581). vLLM 0.33.0 calls these layers. SGLang 0.5.23 has a plain `fc`
in every draft, so its dialect keeps `fc`.
Source: vLLM 0.33.0 model_executor/models/qwen3_dflash.py (`_build_context_kv_buffers`), SGLang 0.5.23 models/dflash.py.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_runtime.checkpoint.layout import HEAD
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.quantised.fp8_format import fp8_matrices
from dflash_runtime.checkpoint.quantised.scaled_weights import E4M3
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import UnsupportedError, UsageError
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_kernels.fp8.fp8_weight import Fp8Weight

BLOCK = 128
CHUNK_ROWS = 4 * BLOCK
"""Rows that are rounded at once, so that memory does not grow with the matrix."""

SCALE_END = "_scale"

ROUNDED = re.compile(r"fc\.weight|layers\.\d+\.(self_attn\.o|mlp\.(gate|up|down))_proj\.weight")
ATTENTION_INPUTS = re.compile(r"layers\.\d+\.self_attn\.[qkv]_proj\.weight")

KEPT = (r"re:(.*\.)?(q|k|v|qkv)_proj$", r"re:.*lm_head$", r"re:.*embed_tokens$")
"""Modules that stay plain. They are patterns: vLLM counts a draft's layers from the target's on, and SGLang
names modules without a prefix."""

FC, KEPT_FC = "fc.weight", r"re:(.*\.)?fc$"

FLOATS = ("BF16", "F16", "F32")
FAMILIES = ("dflash",)
"""Draft families that the runtime multiplies in FP8."""


def quantization_config(*, has_all: bool, has_fc: bool = True) -> dict[str, Any]:
    """Return the `quantization_config` of a draft with matrices in FP8. Without `has_fc`, `fc` is plain."""
    eight = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight, "strategy": "block", "block_structure": [BLOCK, BLOCK], "dynamic": False},
        "input_activations": {**eight, "strategy": "group", "group_size": BLOCK, "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "ignore": [*(KEPT[-1:] if has_all else KEPT), *([] if has_fc else [KEPT_FC])],
        "config_groups": {"group_0": group},
    }  # fmt: skip


def in_fp8(
    draft: DraftCheckpoint, tensors: Sequence[WrittenTensor], target: TargetSource | None, *, has_all: bool,
    has_fc: bool = True,
) -> list[WrittenTensor]:  # fmt: skip
    """Return the tensors of a result, with its matrices in FP8 and their scales.

    With `has_all`, q, k, v and the head are in FP8 too. A draft without a head gets the target's. Without `has_fc`,
    `fc` stays plain.

    Raises:
        UnsupportedError: the draft is quantised already or is of another family, or the target's head is neither plain
            nor in FP8.
        UsageError: the head is the target's, and no target is given.
    """
    if draft.quantization is not None:
        text = f"quantised weights ({draft.quantization}), which are not rounded again"
        raise UnsupportedError(text, id="already-quantised", path=draft.checkpoint.path, found=draft.quantization)
    if draft.config.family not in FAMILIES:
        text = f"--quantize writes drafts of the family {', '.join(FAMILIES)}, and this is {draft.config.family}"
        raise UnsupportedError(text, id="family-not-quantised", field="family", found=draft.config.family)
    found: list[WrittenTensor] = []
    for tensor in tensors:
        is_rounded = (ROUNDED.fullmatch(tensor.name) and (has_fc or tensor.name != FC)) or (
            has_all and (ATTENTION_INPUTS.fullmatch(tensor.name) or tensor.name == HEAD)
        )
        found += _rounded(draft, tensor, tensor.name) if is_rounded else [tensor]
    if has_all and not any(tensor.name == HEAD for tensor in tensors):
        found += _head_of(target, tensors[0].file)
    return found


def cut_blocks(config: DraftConfig, *, has_all: bool) -> list[Notice]:
    """Return a warning if engines refuse the result: a block of rows lies in two of the matrices that they fuse.

    Source: validate_fp8_block_shape in vLLM 0.33.0 and SGLang 0.5.23 layers/quantization.
    """
    rows = {"gate": config.intermediate_size}
    if has_all:
        rows |= {"q": config.num_heads * config.head_dim, "k": config.num_kv_heads * config.head_dim}
    cut = [f"{name} has {count}" for name, count in rows.items() if count % BLOCK]
    if not cut:
        return []
    text = f"vLLM and SGLang refuse the result: they need whole blocks of {BLOCK} rows, and {', '.join(cut)}"
    return [Notice(text, id="fp8-blocks-cut", field="--quantize")]


def _rounded(draft: DraftCheckpoint, tensor: WrittenTensor, name: str) -> list[WrittenTensor]:
    """Return a matrix of the draft in FP8, and its scales."""
    if isinstance(tensor, MadeTensor):
        raise _not_rounded(name, tensor.dtype, hint="convert without --normalise-taps first")
    if tensor.dtype not in FLOATS:
        raise _not_rounded(name, tensor.dtype)
    return _made(name, tensor, lambda: draft.checkpoint.load(name))


def _not_rounded(name: str, dtype: str, hint: str | None = None) -> UnsupportedError:
    text = f"{name} is {dtype} and cannot be rounded to FP8"
    return UnsupportedError(text, id="tensor-not-rounded", field=name, found=dtype, hint=hint)


def _head_of(target: TargetSource | None, file: Path) -> list[WrittenTensor]:
    """Return the target's head in FP8. It is written beside the tensors of `file`."""
    if target is None:
        text = "--quantize-all: the head is the target's, and no target is given"
        raise UsageError(text, id="head-needs-target", field="--quantize-all", hint="pass --target TARGET")
    checkpoint, stored = target.checkpoint, target.checkpoint.tensors
    name = HEAD if HEAD in stored else next(item for item in stored if item.endswith("embed_tokens.weight"))
    if stored[name].dtype not in FLOATS and name not in fp8_matrices(checkpoint, [name]):
        raise _not_rounded(name, stored[name].dtype, hint="pass the target with plain weights")

    def load() -> "Tensor":
        from dflash_runtime.models.weights import load_plain

        return load_plain(checkpoint, name)

    return _made(HEAD, replace(stored[name], file=file), load)


def _made(name: str, tensor: WrittenTensor, load: Any) -> list[WrittenTensor]:
    height, width = tensor.shape
    grid = (-(-height // BLOCK), -(-width // BLOCK))

    def values() -> Iterator[bytes]:
        for made in _chunks(load()):
            yield _bytes(made.values)

    def scales() -> Iterator[bytes]:
        for made in _chunks(load()):
            yield _bytes(made.scales)

    return [
        MadeTensor(name, E4M3, (height, width), tensor.file, values),
        MadeTensor(name + SCALE_END, "F32", grid, tensor.file, scales),
    ]


def _chunks(matrix: "Tensor") -> "Iterator[Fp8Weight]":
    from dflash_kernels.fp8.fp8_weight import to_fp8

    for rows in matrix.split(CHUNK_ROWS):
        yield to_fp8(rows, (BLOCK, BLOCK))


def _bytes(tensor: "Tensor") -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
