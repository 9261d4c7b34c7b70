"""Write a copy of a target with a low-rank update merged into its attention, as after merging a LoRA adapter.

    python examples/merged_target.py TARGET OUT --strength 0.02

The update is random, so the copy stands for a fine-tuned target: same shapes and tokenizer, other logits. With your own
fine-tuned target, this script is not needed.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.references import Role, fetch_directory

PROJECTIONS = ("q_proj.weight", "v_proj.weight", "o_proj.weight")
RANK = 4


def merge(target: Path, out: Path, strength: float, seed: int = 0) -> int:
    """Copy a target and add an update to its projections. Returns the number of changed tensors.

    The norm of an update is `strength` times the norm of its matrix.
    """
    shutil.copytree(target, out)
    generator = torch.Generator().manual_seed(seed)
    num_changed = 0
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        for name, weight in tensors.items():
            if name.endswith(PROJECTIONS):
                tensors[name] = _with_update(weight, strength, generator)
                num_changed += 1
        save_file(tensors, path, metadata={"format": "pt"})
    return num_changed


def _with_update(weight: torch.Tensor, strength: float, generator: torch.Generator) -> torch.Tensor:
    up = torch.randn(weight.shape[0], RANK, generator=generator)
    down = torch.randn(RANK, weight.shape[1], generator=generator)
    update = up @ down
    merged: torch.Tensor = weight.float() + update * (strength * weight.float().norm() / update.norm())
    return merged.to(weight.dtype)


def main() -> None:
    """Read the arguments and write the copy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a directory, a hub repository, or tiny")
    parser.add_argument("out", type=Path, help="the directory to write, which must not exist")
    parser.add_argument("--strength", type=float, default=0.02, help="size of the update, relative to each matrix")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    target = fetch_directory(arguments.target, Role.TARGET)
    num_changed = merge(target, arguments.out, arguments.strength, arguments.seed)
    print(f"{arguments.out}: {num_changed} matrices changed by {100 * arguments.strength:g}%")


if __name__ == "__main__":
    main()
