"""The Python interface: functions that do what the commands do, and return values instead of printing text.

A reference is what the commands take too: a directory, `org/repo`, `org/repo@revision`, `tiny` or `tiny:reduced`.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints import opening
from dflash_cli.checkpoints.opening import Causality, DraftCheckpoint
from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory, is_bundled, tiny_directory
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import EngineConfig
from dflash_runtime.scheduling.request import SamplingParams

if TYPE_CHECKING:
    from dflash_cli.conversion.request import Verification
    from dflash_cli.evaluation.acceptance_report import Evaluation
    from dflash_cli.generation.prompts import PromptRow
    from dflash_cli.validation.report import Report
    from dflash_cli.validation.rule import Level

Reference = str | Path
Prompts = Reference | Sequence[str | Sequence[int]]
"""A JSON Lines file, or texts and lists of token ids."""


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
    prompts: Sequence[Sequence[int]] | None = None,
    device: str = "auto",
) -> "Report":
    """Check a draft, alone or against a target, as `dflash validate` does.

    Without a target, the one that the draft names. `engines` are names with or without a release, such as `vllm@0.33`.
    The `run` level takes `prompts` of token ids, or makes its own. `Report.fails()` says whether the draft passes.

    Raises:
        CheckpointNotFound: the draft or the target is not there.
        CheckpointError, UnsupportedError: the target cannot be read.
        UsageError: the run level without a target, or an engine of no known name.
    """
    from dflash_cli.engines.serving_engine import parse_engines
    from dflash_cli.validation.readings import SearchBudget
    from dflash_cli.validation.run_settings import MAX_NUM_REQUESTS, RunSettings
    from dflash_cli.validation.validator import ValidationRequest
    from dflash_cli.validation.validator import validate_draft as validate

    pair = complete_pair(str(draft), None if target is None else str(target), find=fetch_directory)
    assert pair.draft_location is not None
    config = EngineConfig(device=device, max_num_requests=MAX_NUM_REQUESTS)
    return validate(
        ValidationRequest(
            draft=pair.draft_location,
            draft_reference=str(draft),
            target=None if pair.target is None else pair.find_target(fetch_directory),
            target_reference=pair.target,
            engines=parse_engines(",".join(engines) or None),
            level=level,
            run=RunSettings(config, SearchBudget(), _say_nothing, lambda: prompts) if level == "run" else None,
        )
    )


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


def evaluate(
    draft: Reference,
    target: Reference | None = None,
    *,
    prompts: Prompts | None = None,
    params: SamplingParams | None = None,
    chat: bool = False,
    config: EngineConfig | None = None,
    causality: Causality | None = None,
) -> "Evaluation":
    """Measure the acceptance of a pair, as `dflash eval-acceptance` does. Without `prompts`, on the bundled ones.

    `Evaluation.total.counts.acceptance_len` is the acceptance length, `Evaluation.total.interval` its interval, and
    `Evaluation.failures` are the prompts that could not be measured, which are in neither. Whole blocks are verified,
    whatever the config says of adaptive width: acceptance would be capped.

    Raises:
        UsageError, RequestError: a pair or prompts that cannot be served; and whatever loading raises.
    """
    from dflash_cli.evaluation.acceptance_report import PromptSource
    from dflash_cli.evaluation.measure import EvaluationRequest, measure
    from dflash_cli.generation.loaded_pair import open_session

    config = replace(config or EngineConfig(), adaptive_width=False)
    session = open_session(str(draft), None if target is None else str(target), config, causality=causality)
    rows = _rows(prompts)
    is_tiny = is_bundled(str(draft)) and (target is None or is_bundled(str(target)))
    source = PromptSource(
        name="bundled" if prompts is None else str(prompts) if isinstance(prompts, str | Path) else "given",
        num_available=len(rows),
        is_bundled=prompts is None,
        is_foreign=prompts is None and not is_tiny,
    )
    request = EvaluationRequest(
        rows=rows, params=params or SamplingParams(max_new_tokens=128), source=source, chat=chat
    )
    return measure(session, request)


def _rows(prompts: Prompts | None) -> "list[PromptRow]":
    from dflash_cli.generation.prompts import PromptRow, gather_rows

    if prompts is None or isinstance(prompts, str | Path):
        path = None if prompts is None else str(prompts)
        return gather_rows([], path, default=tiny_directory() / "prompts.jsonl")
    return [
        PromptRow(index=index, kind="prompt", value=item)
        if isinstance(item, str)
        else PromptRow(index=index, kind="prompt_token_ids", value=list(item))
        for index, item in enumerate(prompts)
    ]


def _say_nothing(name: str, index: int, total: int) -> None:
    pass
