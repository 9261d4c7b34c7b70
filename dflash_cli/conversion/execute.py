"""Carry out a planned conversion: write the result beside the destination, verify it, and rename it.

Tensor bytes are copied and never decoded. `conversion.json` in the result lists every key, tensor and file.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.conversion.byte_progress import Progress, silent
from dflash_cli.conversion.destination import protect_inputs
from dflash_cli.conversion.logits import LogitComparison, verify_logits
from dflash_cli.conversion.manifest import HashedConfigs, HashedWeights, Manifest
from dflash_cli.conversion.plan import ConversionPlan
from dflash_cli.conversion.side_files import MANIFEST_FILE
from dflash_cli.conversion.spec import Verification
from dflash_cli.conversion.staging import staged
from dflash_cli.conversion.verify import verify_roundtrip
from dflash_cli.conversion.write import ended_by_sigterm, hash_files, write_json, write_plan
from dflash_runtime.documents import fields_of

SLACK_BYTES = 1024 * 1024
"""Bytes reserved for the config, the manifest and the headers."""


def convert_draft(
    plan: ConversionPlan,
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
    with ended_by_sigterm(), _stage(plan, destination, force=force) as stage:
        with _timed(seconds, "copy_s"):
            write_plan(plan, stage, progress)
        with _timed(seconds, "verify_s"):
            logits = _verify(plan, stage, verification, progress)
        with _timed(seconds, "hash_s"):
            weights, configs = _hash_weights(plan, stage, progress), _hash_configs(plan, stage)
        manifest = Manifest(
            **fields_of(plan.facts),
            verified=verification,
            logits=logits,
            weights=weights,
            configs=configs,
            timings=seconds,
        )
        write_json(stage / MANIFEST_FILE, manifest)
    return manifest


def _verify(
    plan: ConversionPlan, stage: Path, verification: Verification, progress: Progress
) -> LogitComparison | None:
    """Verify the written result. Return the comparison of logits, None if they were not compared."""
    if verification == "none":
        return None
    verify_roundtrip(plan, stage, progress)
    return None if verification == "roundtrip" else verify_logits(plan.draft, open_draft(stage), plan.target)


def _hash_weights(plan: ConversionPlan, stage: Path, progress: Progress) -> HashedWeights:
    return HashedWeights(
        source=hash_files(plan.draft.checkpoint.weight_files, progress),
        result=hash_files([stage / name for name in plan.files], progress),
    )


def _hash_configs(plan: ConversionPlan, stage: Path) -> HashedConfigs:
    source, result = plan.draft.checkpoint.config_path, stage / "config.json"
    return HashedConfigs(
        source=hash_files([source], silent)[source.name], result=hash_files([result], silent)[result.name]
    )


def _stage(plan: ConversionPlan, destination: Path, *, force: bool) -> AbstractContextManager[Path]:
    """The hidden directory for the result, after checking the disk space."""
    side_bytes = [item.source.stat().st_size for item in plan.side_files]
    weight_bytes = [sum(tensor.num_bytes for tensor in tensors) for tensors in plan.files.values()]
    needed = sum(weight_bytes) + sum(side_bytes) + SLACK_BYTES
    return staged(destination, needed, largest_file_bytes=max([0, *weight_bytes, *side_bytes]), force=force)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[name] = round(time.perf_counter() - started, 6)
