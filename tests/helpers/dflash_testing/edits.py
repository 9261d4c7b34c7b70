"""Changes of a saved checkpoint: keys of its config, and tensors of its only file."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


@contextmanager
def edited_config(folder: Path) -> Iterator[dict[str, Any]]:
    """The config, which is saved with its changes at the end of the block."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    yield config
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of the config."""
    with edited_config(folder) as config:
        config.update(changes)


def falsify(draft: Path, path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a draft with another config."""
    shutil.copytree(draft, path)
    with edited_config(path) as config:
        change(config)
    return path


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Put tensors into a checkpoint. None takes a tensor out."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file, {"format": "pt"})
