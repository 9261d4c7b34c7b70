"""Carry out a planned conversion: write the result beside the destination, verify it, and rename it.

Tensor bytes are copied and never decoded. `conversion.json` in the result lists every key, tensor and file.
"""

import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.gguf_writer import write_gguf
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.checkpoints.safetensors_writer import BUFFER_BYTES, write_all, write_tensors
from dflash_cli.conversion.byte_progress import Progress, silent
from dflash_cli.conversion.destination import protect_inputs
from dflash_cli.conversion.logits import verify_logits
from dflash_cli.conversion.manifest import HashedConfigs, HashedFile, HashedWeights, Manifest
from dflash_cli.conversion.plan import ConversionPlan
from dflash_cli.conversion.renaming import RenamingPlan
from dflash_cli.conversion.result_plan import ResultPlan
from dflash_cli.conversion.side_files import CARD, MANIFEST_FILE, provenance
from dflash_cli.conversion.spec import Verification
from dflash_cli.conversion.staging import staged
from dflash_cli.conversion.verify import verify_roundtrip
from dflash_runtime.checkpoint.stored.digests import hash_file
from dflash_runtime.checkpoint.stored.files import INDEX_FILE
from dflash_runtime.documents import fields_of, to_json
from dflash_runtime.read_files import reading

HASH_THREADS = 4

SLACK_BYTES = 1024 * 1024
"""Bytes reserved for the config, the manifest and the headers."""


def convert_draft(
    plan: ResultPlan,
    destination: Path,
    *,
    verification: Verification = "roundtrip",
    progress: Progress = silent,
    force: bool = False,
) -> Manifest:
    """Carry out a plan and return its manifest. The destination is complete or unchanged afterwards.

    With `force` a draft at the destination is replaced.

    Raises:
        UsageError: the destination cannot be written, or contains the source or the target.
        GateFailed: the result does not read back as planned.
        CapacityError: not enough disk space.
    """
    protect_inputs(destination, plan)
    seconds: dict[str, float] = {}
    source = plan.draft.checkpoint
    with _ended_by_sigterm(), _stage(plan, destination, force=force) as stage:
        with _timed(seconds, "copy_s"):
            _write_plan(plan, stage, progress)
        with _timed(seconds, "verify_s"):
            logits = None
            if isinstance(plan, RenamingPlan):
                plan.verify(stage, progress)
            elif isinstance(plan, ConversionPlan) and verification != "none":
                verify_roundtrip(plan, stage, progress)
                if verification == "logits":
                    logits = verify_logits(
                        plan.draft, open_draft(stage), plan.target, is_rounded=plan.spec.quantize is not None
                    )
        with _timed(seconds, "hash_s"):
            weights = _hash_weights(source.weight_files, [stage / name for name in plan.files], progress)
            of_result = next(iter(plan.files)) if plan.format.one_file else "config.json"
            paths = (source.config_path, stage / of_result)
            configs = HashedConfigs(*(HashedFile(path.stat().st_size, hash_file(path)) for path in paths))
        facts = fields_of(plan.facts)
        manifest = Manifest(
            **facts, verified=verification, logits=logits, weights=weights, configs=configs, timings=seconds
        )
        _write_json(stage / MANIFEST_FILE, manifest)
    return manifest


def _stage(plan: ResultPlan, destination: Path, *, force: bool) -> AbstractContextManager[Path]:
    """The hidden directory for the result, after checking the disk space."""
    side_bytes = [item.stat().st_size for item in plan.side_files]
    weight_bytes = [sum(tensor.num_bytes for tensor in tensors) for tensors in plan.files.values()]
    needed = sum(weight_bytes) + sum(side_bytes) + SLACK_BYTES
    return staged(destination, needed, largest_file_bytes=max([0, *weight_bytes, *side_bytes]), force=force)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - started, 6)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
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


def _write_plan(plan: ResultPlan, stage: Path, progress: Progress) -> None:
    """Write the side files, the weights and at last the config."""
    total = plan.num_bytes
    _copy_side_files(plan, stage)

    def advance(count: int) -> None:
        progress("copy", count, total)

    for name, tensors in plan.files.items():
        if plan.format.one_file:
            write_gguf(stage / name, plan.config_json, tensors, advance, tokenizer=plan.spec.tokenizer)
        else:
            write_tensors(stage / name, tensors, advance)
    if plan.format.one_file:
        return
    if len(plan.files) > 1:
        weight_map = {info.name: name for name, tensors in plan.files.items() for info in tensors}
        _write_json(stage / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(stage / "config.json", plan.config_json, is_config=True)


def _copy_side_files(plan: ResultPlan, stage: Path) -> None:
    for item in plan.side_files:
        with (stage / item.name).open("xb", buffering=0) as copy, reading(item) as source:
            while piece := source.read(BUFFER_BYTES):
                write_all(copy.fileno(), piece)
        if item.name == CARD:
            with (stage / CARD).open("a", encoding="utf-8") as card:
                card.write(provenance(plan.draft, plan.format))


def _write_json(path: Path, document: Any, *, is_config: bool = False) -> None:
    """Write a JSON document with indentation. A config may carry NaN and Infinity."""
    text = json.dumps(to_json(document), indent=2, ensure_ascii=False, allow_nan=is_config)
    path.write_text(text + "\n", encoding="utf-8")


def _hash_weights(source: list[Path], result: list[Path], progress: Progress) -> HashedWeights:
    """Size and SHA-256 of each file. Several files are hashed at once, because one thread reads slower than a disk."""
    sizes = {file: file.stat().st_size for file in (*source, *result)}
    is_interrupted = threading.Event()

    def observe(num_bytes: int) -> None:
        if is_interrupted.is_set():
            raise InterruptedError
        progress("hash", num_bytes, sum(sizes.values()))

    with ThreadPoolExecutor(min(HASH_THREADS, len(sizes))) as pool:
        try:
            digests = dict(zip(sizes, pool.map(lambda file: hash_file(file, observe), sizes), strict=True))
        except BaseException:
            is_interrupted.set()  # otherwise Ctrl-C waits until every file is read
            raise
    hashed = {file: HashedFile(size, digests[file]) for file, size in sizes.items()}
    return HashedWeights(
        source={file.name: hashed[file] for file in source}, result={file.name: hashed[file] for file in result}
    )
