"""Convert a draft from one dialect to the other: read, plan, write beside the destination, verify, rename into place.

Tensor bytes are copied and never decoded. `conversion.json` in the result says what became of every key and tensor.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from dflash_cli import __version__
from dflash_cli.checkpoints.opening import Causality, open_draft
from dflash_cli.conversion.logits import verify_logits
from dflash_cli.conversion.plan import Plan, Wish, make_plan
from dflash_cli.conversion.side_files import MANIFEST_FILE
from dflash_cli.conversion.verify import verify_roundtrip
from dflash_cli.conversion.write import (
    Observe,
    check_destination,
    ended_by_sigterm,
    hash_files,
    staged,
    write_json,
    write_plan,
)

__all__ = ["Plan", "Verification", "Wish", "check_destination", "convert_draft", "describe", "plan_conversion"]

Verification = Literal["none", "roundtrip", "logits"]
SLACK_BYTES = 1024 * 1024
"""Room for the config, the manifest and the header beside the weights."""


def plan_conversion(source: Path, wish: Wish, *, causality: Causality | None = None) -> Plan:
    """Read a draft and decide its conversion; writes nothing. `causality` overrules the source's config.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError, UsageError: see `conversion.plan.make_plan`.
    """
    return make_plan(open_draft(source, causality=causality), wish)


def convert_draft(
    plan: Plan, destination: Path, *, verification: Verification = "roundtrip", observe: Observe | None = None
) -> dict[str, Any]:
    """Carry out a plan and return its manifest. Whatever happens, no half-written destination is left.

    Raises:
        UsageError: the destination cannot be written.
        GateFailed: the result does not read back as planned.
        CapacityError: no room on the disk.
    """
    watch = observe if observe is not None else _ignore
    seconds: dict[str, float] = {}
    with ended_by_sigterm(), staged(destination, _needed_bytes(plan)) as stage:
        started = time.perf_counter()
        write_plan(plan, stage, watch)
        seconds["copy_s"] = _since(started)
        started = time.perf_counter()
        proof = _verify(plan, stage, verification, watch)
        seconds["verify_s"] = _since(started)
        started = time.perf_counter()
        weights = {
            "source": hash_files(plan.draft.checkpoint.weight_files, watch),
            "result": hash_files([stage / name for name in plan.files], watch),
        }
        seconds["hash_s"] = _since(started)
        configs = {
            side: hash_files([path], _ignore)["config.json"]
            for side, path in (("source", plan.draft.checkpoint.config_path), ("result", stage / "config.json"))
        }
        known = {**describe(plan), "verified": verification, **proof}
        manifest = {**known, "weights": weights, "configs": configs, "timings": seconds}
        write_json(stage / MANIFEST_FILE, {"schema_version": 1, **manifest})
    return manifest


def _verify(plan: Plan, stage: Path, verification: Verification, watch: Observe) -> dict[str, Any]:
    """What the manifest says of the verification."""
    if verification == "none":
        return {}
    verify_roundtrip(plan, stage, watch)
    if verification == "roundtrip":
        return {}
    return {"logits": asdict(verify_logits(plan.draft, open_draft(stage), plan.target))}


def describe(plan: Plan) -> dict[str, Any]:
    """The part of the manifest that is known before anything is written."""
    keys, tensors = plan.key_fates, plan.tensor_fates
    return {
        "tool": "dflash",
        "version": __version__,
        "source": str(plan.draft.checkpoint.path),
        "source_dialect": plan.draft.detection.format.name,
        "destination_dialect": plan.format.name,
        "num_bytes": plan.num_bytes,
        "warnings": list(plan.warnings),
        "config": [fate.document() for fate in keys],
        "tensors": [fate.document() for fate in tensors],
        "files": [fate.document() for fate in plan.file_fates],
    }


def _needed_bytes(plan: Plan) -> int:
    companions = sum(item.source.stat().st_size for item in plan.companions)
    return plan.num_bytes + companions + SLACK_BYTES


def _since(started: float) -> float:
    return round(time.perf_counter() - started, 6)


def _ignore(stage: str, count: int, total: int) -> None:
    pass
