"""A random pair as checkpoints on disk, which our engine and other engines read."""

import fcntl
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import target_shapes
from dflash_runtime.models.weights import Weights, load_weights
from timing.arguments import run_dtype
from timing.pairs import RandomPair, drawn_weights
from timing.report import release, say
from timing.shape_configs import family_of, hf_config, hf_draft_config
from timing.shapes import Shape

SHARD_BYTES = 4 * 2**30
PAIR_HELP = "folder of the pair that our arms and vLLM read, which stays; it is written if it is empty"


@contextmanager
def written_pair(shape: Shape, folder: Path | None, device: torch.device) -> Iterator[Path]:
    """The folder of a written pair: the named one, or a temporary one that is removed at the end."""
    with tempfile.TemporaryDirectory() as home:
        files = folder or Path(home)
        write_pair(shape, files, device)
        yield files


def read_pair(shape: Shape, folder: Path, max_model_len: int, device: torch.device) -> RandomPair:
    """The pair of a folder, opened and loaded as commands of `dflash` do, with the default engine config."""
    target, draft = open_target(folder / "target"), open_draft(folder / "draft")
    started = time.perf_counter()
    dtype = str(run_dtype(device)).removeprefix("torch.")
    config = EngineConfig(device=str(device), dtype=dtype, max_model_len=max_model_len, max_num_requests=1)
    pair = load_pair(target, draft, config)
    say(f"read the pair in {folder} in {time.perf_counter() - started:.0f} s")
    assert pair.draft_weights is not None

    def target_weights() -> Weights:
        arrange = getattr(family_of(shape), "arrange", None)
        return load_weights(target.checkpoint, target_shapes(target), pair.placement, arrange=arrange)

    return RandomPair(shape, replace(pair, config=EngineConfig()), target_weights, pair.draft_weights)


def write_pair(shape: Shape, folder: Path, device: torch.device) -> None:
    """Write `folder/target` and `folder/draft`, with the weights of `build_pair` on the same device.

    A pair that is there already stays. Of two processes with the same folder, the second waits for the first.

    Raises:
        FileExistsError: the folder has the pair of another shape.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "shape.txt").exists():
            _write_models(shape, folder, device)
        elif (folder / "shape.txt").read_text() != repr(shape):
            raise FileExistsError(f"{folder}: found the pair of another shape; name another folder")


def _write_models(shape: Shape, folder: Path, device: torch.device) -> None:
    started = time.perf_counter()
    target, draft = drawn_weights(shape, Placement(device, run_dtype(device), REFERENCE, 0))
    for name, config, weights in (("target", hf_config(shape), target), ("draft", hf_draft_config(shape), draft)):
        (folder / name).mkdir(exist_ok=True)
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
    say(f"wrote the pair to {folder} in {time.perf_counter() - started:.0f} s")
    release()


def _write(folder: Path, number: int, tensors: dict[str, Tensor]) -> str:
    name = f"model-{number}.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    return name
