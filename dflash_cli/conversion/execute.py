"""Carry out a planned conversion: write beside the destination, verify, rename.

Tensor bytes are copied and never decoded. `conversion.json` in the result says what became of every key and tensor.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion.byte_progress import Progress, silent
from dflash_cli.conversion.destination import protect_inputs
from dflash_cli.conversion.logits import verify_logits
from dflash_cli.conversion.plan import ConversionPlan
from dflash_cli.conversion.request import Verification
from dflash_cli.conversion.side_files import MANIFEST_FILE
from dflash_cli.conversion.staging import staged
from dflash_cli.conversion.verify import verify_roundtrip
from dflash_cli.conversion.write import describe_files, ended_by_sigterm, write_json, write_plan
from dflash_cli.terminal import console

SLACK_BYTES = 1024 * 1024
"""Room for the config, the manifest and the header beside the weights."""


def convert_draft(
    plan: ConversionPlan,
    destination: Path,
    *,
    verification: Verification = "roundtrip",
    progress: Progress = silent,
    force: bool = False,
) -> dict[str, Any]:
    """Carry out a plan and return its manifest. Whatever happens, no half-written destination is left.

    With `force` a draft that stands at the destination is replaced.

    Raises:
        UsageError: the destination cannot be written, or holds what the plan reads.
        GateFailed: the result does not read back as planned.
        CapacityError: no room on the disk.
    """
    protect_inputs(destination, plan)
    seconds: dict[str, float] = {}
    with ended_by_sigterm(), _stage(plan, destination, force=force) as stage:
        with _timed(seconds, "copy_s"):
            write_plan(plan, stage, progress)
        with _timed(seconds, "verify_s"):
            logits = _verify(plan, stage, verification, progress)
        with _timed(seconds, "hash_s"):
            hashes = _hash(plan, stage, progress)
        manifest = {**plan.to_json(), "verified": verification, **logits, **hashes, "timings": seconds}
        write_json(stage / MANIFEST_FILE, {"schema_version": console.SCHEMA_VERSION, "kind": "conversion", **manifest})
    return manifest


def _verify(plan: ConversionPlan, stage: Path, verification: Verification, progress: Progress) -> dict[str, Any]:
    """Verify the written result; returns what the manifest states about it."""
    if verification == "none":
        return {}
    verify_roundtrip(plan, stage, progress)
    if verification == "roundtrip":
        return {}
    return {"logits": asdict(verify_logits(plan.draft, open_draft(stage), plan.target))}


def _hash(plan: ConversionPlan, stage: Path, progress: Progress) -> dict[str, Any]:
    """Sizes and digests of the weights and the configs on both sides."""
    checkpoint = plan.draft.checkpoint
    return {
        "weights": {
            "source": describe_files(checkpoint.weight_files, progress),
            "result": describe_files([stage / name for name in plan.files], progress),
        },
        "configs": {
            "source": describe_files([checkpoint.config_path], silent)["config.json"],
            "result": describe_files([stage / "config.json"], silent)["config.json"],
        },
    }


def _stage(plan: ConversionPlan, destination: Path, *, force: bool) -> AbstractContextManager[Path]:
    """Where the result is written, once it is known that there is room for it."""
    side_bytes = [item.source.stat().st_size for item in plan.side_files]
    weight_bytes = [sum(tensor.num_bytes for tensor in tensors) for tensors in plan.files.values()]
    needed = sum(weight_bytes) + sum(side_bytes) + SLACK_BYTES
    return staged(destination, needed, largest_file_bytes=max([0, *weight_bytes, *side_bytes]), force=force)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - started, 6)
