"""The Python interface: functions that do what the commands do, and return values instead of printing text.

Here are those on checkpoints; `measuring_api` has those that measure. `generate` has none: `LLM` is that, with
`open_draft`, `open_target` and its own `check_lossless`.

A reference is what the commands take too: a directory, `org/repo`, `org/repo@revision`, `tiny` or `tiny:reduced`.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints import opening
from dflash_cli.checkpoints.opening import Causality, DraftCheckpoint
from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory, is_bundled
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_cli.conversion.request import Verification
    from dflash_cli.rules.report import Report
    from dflash_cli.rules.rule import Level

Reference = str | Path


def open_draft(reference: Reference, *, causality: Causality | None = None) -> DraftCheckpoint:
    """Read a draft of any known dialect, its config and headers, not its weights. `causality` overrules the config.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: see `dflash_runtime.errors`.
    """
    return opening.open_draft(fetch_directory(str(reference), Role.DRAFT), causality=causality)


def open_target(reference: Reference) -> TargetSource:
    """Read a target's config and headers, not its weights.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: see `dflash_runtime.errors`.
    """
    return opening.open_target(fetch_directory(str(reference), Role.TARGET))


def validate_draft(
    draft: Reference,
    target: Reference | None = None,
    *,
    engines: Sequence[str] = (),
    level: "Level" = "headers",
    ignored: Collection[str] = (),
    num_speculative_tokens: int | None = None,
    prompts: Reference | Sequence[Sequence[int]] | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int = 96,
    device: str = "auto",
    target_runtime: str = "auto",
    device_map: str | None = None,
) -> "Report":
    """Check a draft, alone or against a target, as `dflash validate` does.

    Without a target, the one that the draft names. `engines` are names with or without a release, such as `vllm@0.33`.
    Rules whose ids are `ignored` are skipped. `num_speculative_tokens` is what the engines will be told to draft.
    The `run` level takes `prompts`, a JSON Lines file or lists of token ids, or makes its own, `num_prompts` of them.
    `Report.fails()` says whether the draft passes, `Report.fails(strict=True)` whether it does without a warning.

    Raises:
        CheckpointNotFound: the draft or the target is not there.
        CheckpointError, UnsupportedError: the target cannot be read.
        UsageError: the run level without a target, an engine of no known name, or an id of no rule.
    """
    from dflash_cli.diagnosis.run_settings import run_settings
    from dflash_cli.engines.serving_engine import parse_engines
    from dflash_cli.rules.rule import ignored_ids
    from dflash_cli.rules.validator import ValidationRequest
    from dflash_cli.rules.validator import validate_draft as validate

    pair = complete_pair(str(draft), None if target is None else str(target), find=fetch_directory)
    assert pair.draft_location is not None
    location = None if pair.target is None else pair.find_target(fetch_directory)
    request = ValidationRequest(
        draft=pair.draft_location,
        draft_reference=str(draft),
        target=location,
        target_reference=pair.target,
        engines=parse_engines(",".join(engines) or None),
        level="headers" if level == "headers" else "weights",
        ignored=ignored_ids(ignored),
        num_speculative_tokens=num_speculative_tokens,
    )
    if level == "run":
        if location is None:
            raise UsageError("--level run needs a target", id="run-without-target", hint="name a target")
        from dflash_cli.diagnosis.pair_validation import validate_running

        run = run_settings(
            location,
            prompts=str(prompts) if isinstance(prompts, str | Path) else prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            device=device,
            observe=_say_nothing,
            target_runtime=target_runtime,
            device_map=device_map,
        )
        return validate_running(request, run)
    return validate(request)


def convert_draft(
    source: Reference,
    destination: Reference,
    *,
    to: str,
    target: Reference | None = None,
    verifier: str | None = None,
    causality: Causality | None = None,
    allow_lossy: bool = False,
    normalise_taps: bool = False,
    max_shard_bytes: int | None = None,
    verify: "Verification" = "roundtrip",
    force: bool = False,
) -> dict[str, Any]:
    """Write a draft in the dialect `to`, as `dflash convert` does, and return the manifest.

    The manifest lists what became of every key, tensor and file. `verifier` is the name stored for the target. If the
    conversion fails, no half-written destination is left.

    Raises:
        UsageError: the destination exists and `force` is not given, or the dialect needs a name for the target.
        LossyConversion: something would be lost, and `allow_lossy` is not given.
        CheckpointNotFound, CheckpointError, UnsupportedError, GateFailed, CapacityError: see `dflash_runtime.errors`.
    """
    from dflash_cli.conversion.destination import check_destination
    from dflash_cli.conversion.execute import convert_draft as convert
    from dflash_cli.conversion.plan import plan_conversion
    from dflash_cli.conversion.request import ConversionRequest

    result = Path(destination)
    check_destination(result, force=force)
    if target is None and is_bundled(str(source)):
        target = TINY
    request = ConversionRequest(
        to=to,
        target=None if target is None else open_target(target),
        target_reference=None if target is None else str(target),
        verifier=verifier,
        allow_lossy=allow_lossy,
        normalise_taps=normalise_taps,
        max_shard_bytes=max_shard_bytes,
    )
    plan = plan_conversion(open_draft(source, causality=causality), request)
    return convert(plan, result, verification=verify, force=force)


def _say_nothing(name: str, index: int, total: int) -> None:
    pass
