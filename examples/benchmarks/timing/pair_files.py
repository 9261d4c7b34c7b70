"""Write a random pair as checkpoints, so that other engines read the weights that our engine runs."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_kernels.suite import REFERENCE
from dflash_runtime.models.placement import Placement
from timing.pairs import Shape, drawn_weights, hf_config, hf_draft_config, run_dtype

SHARD_BYTES = 4 * 2**30


def write_pair(shape: Shape, folder: Path, device: torch.device) -> None:
    """Write `folder/target` and `folder/draft`, with the weights of `build_pair` on the same device.

    A pair that is there already stays.
    """
    if (folder / "shape.txt").exists():
        if (folder / "shape.txt").read_text() != repr(shape):
            raise FileExistsError(f"{folder}: found the pair of another shape; name another folder")
        return
    target, draft = drawn_weights(shape, Placement(device, run_dtype(device), REFERENCE, 0))
    for name, config, weights in (("target", hf_config(shape), target), ("draft", hf_draft_config(shape), draft)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
        parts: list[str] = []
        part: dict[str, Tensor] = {}
        index: dict[str, str] = {}
        for key, tensor in weights:
            if part and sum(item.nbytes for item in part.values()) + tensor.nbytes > SHARD_BYTES:
                parts.append(_write(folder / name, len(parts), part))
                part = {}
            part[key] = tensor.cpu()
            index[key] = f"model-{len(parts)}.safetensors"
        _write(folder / name, len(parts), part)
        (folder / name / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "shape.txt").write_text(repr(shape))
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _write(folder: Path, number: int, tensors: dict[str, Tensor]) -> str:
    name = f"model-{number}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return name
