"""Write a planned checkpoint into a directory, and hash the files that were read and written."""

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.safetensors_writer import write_tensors
from dflash_cli.conversion.byte_progress import Progress
from dflash_cli.conversion.manifest import HashedFile
from dflash_cli.conversion.plan import ConversionPlan
from dflash_cli.conversion.side_files import SideFile, provenance
from dflash_runtime.checkpoint.digests import hash_file
from dflash_runtime.checkpoint.files import INDEX_FILE
from dflash_runtime.documents import to_json


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM in the block into KeyboardInterrupt, so that the unfinished result is removed."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # keep the caller's own handler
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def write_plan(plan: ConversionPlan, stage: Path, progress: Progress) -> None:
    """Write the weights, the side files and at last the config."""
    total = plan.num_bytes
    for name, tensors in plan.files.items():
        write_tensors(stage / name, tensors, lambda count: progress("copy", count, total))
    if len(plan.files) > 1:
        weight_map = {info.name: name for name, tensors in plan.files.items() for info in tensors}
        write_json(stage / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    for side_file in plan.side_files:
        _write_side_file(side_file, plan, stage / side_file.name)
    write_json(stage / "config.json", plan.config_json)


def _write_side_file(side_file: SideFile, plan: ConversionPlan, path: Path) -> None:
    shutil.copyfile(side_file.source, path)
    if side_file.how == "card":
        with path.open("a", encoding="utf-8") as card:
            card.write(provenance(plan.draft, plan.format))


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document with indentation."""
    text = json.dumps(to_json(document), indent=2, ensure_ascii=False, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def hash_files(files: list[Path], progress: Progress) -> dict[str, HashedFile]:
    """Size and SHA-256 of each file."""
    sizes = {file: file.stat().st_size for file in files}

    def observe(num_bytes: int) -> None:
        progress("hash", num_bytes, sum(sizes.values()))

    return {file.name: HashedFile(size, hash_file(file, observe)) for file, size in sizes.items()}
