"""Small random models with quantised weights, packed by this module, and the same models with plain weights."""

import re
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_testing.edits import edit_config
from dflash_testing.hosted_models import make_model

BLOCK = 16

needs_accelerate = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
needs_compressed = pytest.mark.skipif(find_spec("compressed_tensors") is None, reason="not installed")
unpacks_wide = pytest.mark.skipif(
    Version(version("transformers")) < Version("5.23"), reason="dequantises experts to bfloat16, and is refused"
)


def quantise(
    path: Path, kind: str, pack: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]], config: Any,
    kept: str = r".*mlp\.gate\.weight", **changes: Any,
) -> Any:  # fmt: skip
    """Save a random model with the matrices of its layers packed, and return the model with the dequantised matrices.

    `pack` returns a matrix after dequantisation, and the tensors that store it, by the ends of their names. Matrices
    whose names match `kept` stay plain. `changes` are keys of the model's config.
    """
    from transformers import AutoModelForCausalLM

    make_model(path, kind, **changes)
    stored = load_file(path / "model.safetensors")
    plain = dict(stored)
    for name in [name for name in _matrices(stored) if not re.fullmatch(kept, name)]:
        plain[name], tensors = pack(stored.pop(name))
        stored |= {name.removesuffix("weight") + end: tensor for end, tensor in tensors.items()}
    save_file(plain, path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    edit_config(path, quantization_config=config)
    return model


def pack_blocks(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Pack into eight bits with a scale per block, as DeepSeek and Qwen publish weights. The last block may be cut."""
    height, width = matrix.shape
    rows, columns = -(-height // BLOCK), -(-width // BLOCK)
    whole = matrix.new_zeros(rows * BLOCK, columns * BLOCK)
    whole[:height, :width] = matrix
    scales = whole.view(rows, BLOCK, columns, BLOCK).abs().amax(dim=(1, 3)) / 448
    factors = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:height, :width]
    packed = (matrix / factors).to(torch.float8_e4m3fn)
    return packed.float() * factors, {"weight": packed, "weight_scale_inv": scales}


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head", "mlp.gate"],
}


def pack_rows(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Pack into eight bits with a scale per row, as compressed-tensors does."""
    scales = matrix.abs().amax(dim=1, keepdim=True) / 448
    packed = (matrix / scales).to(torch.float8_e4m3fn)
    return packed.float() * scales, {"weight": packed, "weight_scale": scales}


def pack_groups(matrix: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Pack into four bits with a scale per 16 numbers of a row, eight numbers to an integer (compressed-tensors)."""
    groups = matrix.view(len(matrix), -1, BLOCK)
    scales = groups.abs().amax(dim=2) / 7
    numbers = (groups / scales[..., None]).round()
    nibbles = (numbers + 8).to(torch.int64).view(len(matrix), -1, 8)
    packed = (nibbles << torch.arange(0, 32, 4)).sum(dim=2)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    shape = torch.tensor(matrix.shape)
    return (numbers * scales[..., None]).view_as(matrix), {
        "weight_packed": packed, "weight_scale": scales, "weight_shape": shape,
    }  # fmt: skip


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mlp.gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
}

GROUPED = {
    **COMPRESSED,
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": BLOCK, "symmetric": True,
                "dynamic": False,
            },
        }
    },
}  # fmt: skip


def _matrices(stored: dict[str, Tensor]) -> Iterable[str]:
    """Return the names of the matrices of layers."""
    return (name for name, tensor in stored.items() if ".layers." in name and tensor.dim() == 2)
