"""Random gpt-oss models with MXFP4 experts: the file has packed numbers, and the model of transformers plain ones."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_testing.edits import edit_config

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The value of each number of four bits."""


def plain_numbers(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks [E, N, K / 32, 16] and scales [E, N, K / 32] -> float32 [E, N, K]."""
    numbers = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], dim=-1).flatten(-2)
    return (numbers * (scales.float() - 127).exp2()[..., None]).flatten(-2)


def pack_experts(path: Path, model: Any) -> None:
    """Give a saved gpt-oss model random packed experts, and its model in memory the numbers that they stand for."""
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(path / "model.safetensors")
    for name, parameter in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, width, height = parameter.shape
        blocks = torch.randint(0, 256, (count, height, width // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(122, 125, (count, height, width // 32), generator=generator).to(torch.uint8)
        with torch.no_grad():
            parameter.copy_(plain_numbers(blocks, scales).transpose(1, 2))
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    edit_config(path, quantization_config=settings)
