"""The Python interface: functions that do what the commands do, and return values instead of printing text.

`generate` has none: `LLM` is that, with `open_draft`, `open_target` and its own `check_lossless`.

A reference is what the commands take too: a directory, `org/repo`, `org/repo@revision`, `tiny` or `tiny:reduced`.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints import opening
from dflash_cli.checkpoints.opening import Causality, DraftCheckpoint
from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory, is_bundled
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import EngineConfig
from dflash_runtime.scheduling.request import SamplingParams

if TYPE_CHECKING:
    from dflash_cli.conversion.request import Verification
    from dflash_cli.evaluation.acceptance_report import Evaluation
    from dflash_cli.evaluation.probing.probe_options import ProbeOptions
    from dflash_cli.evaluation.probing.server_probe import Probed
    from dflash_cli.evaluation.speed import BatchSpeed
    from dflash_cli.evaluation.tuning.tuner import Tuning
    from dflash_cli.generation.prompt_sets import PromptSet
    from dflash_cli.generation.prompts import Sample
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
    from dflash_cli.engines.serving_engine import parse_engines
    from dflash_cli.validation.rule import ignored_ids
    from dflash_cli.validation.run_settings import run_settings
    from dflash_cli.validation.validator import ValidationRequest
    from dflash_cli.validation.validator import validate_draft as validate

    pair = complete_pair(str(draft), None if target is None else str(target), find=fetch_directory)
    assert pair.draft_location is not None
    location = None if pair.target is None else pair.find_target(fetch_directory)
    request = ValidationRequest(
        draft=pair.draft_location,
        draft_reference=str(draft),
        target=location,
        target_reference=pair.target,
        engines=parse_engines(",".join(engines) or None),
        level=level,
        ignored=ignored_ids(ignored),
        num_speculative_tokens=num_speculative_tokens,
    )
    if level == "run" and location is not None:
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
        request = replace(request, run=run)
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


def evaluate(
    draft: Reference,
    target: Reference | None = None,
    *,
    prompts: Prompts | None = None,
    dataset: str | None = None,
    dataset_format: str | None = None,
    num_prompts: int | None = None,
    sample: "Sample" = "stratified",
    thinking: str | None = None,
    context_lengths: str | None = None,
    exact_match: str = "draft",
    params: SamplingParams | None = None,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    causality: Causality | None = None,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    journal: Path | None = None,
    resume: bool = False,
    workers: int | str | None = None,
) -> "Evaluation":
    """Measure the acceptance of a pair, as `dflash eval-acceptance` does.

    Without `prompts` or a `dataset`, on the bundled ones: chats (mix-64), or for the bundled target pieces of Python.
    Where `chat` is None, chats go through the target's template, if it has one, and texts do not. What is typed for
    `dataset`, `thinking`, `context_lengths` and `exact_match` is what they take; `Evaluation.conditions` and
    `Evaluation.exact_match` have what came of it.

    `confidence` and `num_resamples` are those of the bootstrap behind the intervals. Answers are written to `journal`
    as they end, and with `resume` those that are in it are not asked for again. `workers` is what `--workers` takes.

    `Evaluation.total.counts.acceptance_len` is the acceptance length, `Evaluation.total.interval` its interval, and
    `Evaluation.failures` are the prompts that could not be measured, which are in neither. Whole blocks are verified,
    whatever the config says of adaptive width: acceptance would be capped.

    Raises:
        UsageError, RequestError: a pair or prompts that cannot be served; and whatever loading raises.
    """
    from dflash_cli.evaluation.measure import EvaluationRequest, measure
    from dflash_cli.evaluation.prompt_choice import choose_prompts
    from dflash_cli.generation.conditions import make_conditions, parse_context_lengths, parse_thinking
    from dflash_cli.generation.loaded_pair import open_pair
    from dflash_cli.generation.workers.open_crew import open_answering

    config = replace(config or EngineConfig(), adaptive_width=False)
    params, options = params or SamplingParams(max_new_tokens=128), _to_text(chat_template_kwargs)
    given = _prompt_set(prompts, dataset, dataset_format, num_prompts)
    conditions = make_conditions(
        parse_thinking(thinking),
        parse_context_lengths(context_lengths),
        with_plain=exact_match == "both",
        template_options=options,
    )
    pair = open_pair(
        str(draft),
        None if target is None else str(target),
        needs_draft=config.num_draft_tokens != 0,
        causality=causality,
        template_options=options,
    )
    choice = choose_prompts(
        pair, given, chat=chat, count=num_prompts, sample=sample, seed=params.seed or 0, conditions=conditions
    )
    request = EvaluationRequest(
        rows=choice.rows,
        params=params,
        source=choice.source,
        chat=choice.chat,
        conditions=conditions,
        scores=exact_match != "none",
        confidence=confidence,
        num_resamples=num_resamples,
        journal=journal,
        resume=resume,
    )
    with open_answering(pair, config, None if workers is None else str(workers)) as answering:
        return measure(answering, request)


def measure_speed(
    draft: Reference,
    target: Reference | None = None,
    *,
    prompts: Prompts | None = None,
    dataset: str | None = None,
    dataset_format: str | None = None,
    batches: Sequence[int] = (1, 4, 16),
    max_new_tokens: int = 128,
    num_rounds: int = 4,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    causality: Causality | None = None,
) -> "list[BatchSpeed]":
    """How much faster a pair decodes with its draft than without, at each batch size, as `dflash bench` measures it.

    Raises:
        UsageError, RequestError: a pair or prompts that cannot be served, or answers too short to measure; and whatever
            loading raises.
    """
    from dflash_cli.evaluation.prompt_choice import choose_prompts
    from dflash_cli.evaluation.speed import measure_speeds, smallest, speed_request
    from dflash_cli.generation.loaded_pair import open_session

    session = open_session(
        str(draft),
        None if target is None else str(target),
        smallest(config or EngineConfig()),
        causality=causality,
        template_options=_to_text(chat_template_kwargs),
    )
    choice = choose_prompts(session, _prompt_set(prompts, dataset, dataset_format), chat=chat)
    request = speed_request(
        session, choice.rows, batches, max_new_tokens=max_new_tokens, num_rounds=num_rounds, chat=choice.chat
    )
    return list(measure_speeds(session.llm.pair, request))


def tune(
    draft: Reference,
    target: Reference | None = None,
    *,
    prompts: Prompts | None = None,
    dataset: str | None = None,
    dataset_format: str | None = None,
    num_prompts: int | None = None,
    params: SamplingParams | None = None,
    numbers: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    num_rounds: int = 4,
    step_times: Path | None = None,
    what_ifs: str | None = None,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    config: EngineConfig | None = None,
    causality: Causality | None = None,
    confidence: float = 0.95,
    num_resamples: int = 10_000,
    folder: Path | None = None,
    resume: bool = False,
) -> "Tuning":
    """Find out how many tokens to draft at each batch size, as `dflash tune` does.

    `numbers` are those to try, by default 1, 3, 7, ... and the trained one; `step_times` is a file of times that were
    measured elsewhere; `what_ifs` is what `--what-if` takes. Answers and step times are kept in `folder`, which exists,
    and with `resume` those that are in it are not measured again.

    `Tuning.choices` has for each batch size every candidate's speed-up, the best first, and whether drafting pays.

    Raises:
        UsageError, RequestError: what does not suit the pair, or prompts that cannot be served; and whatever loading
            raises.
    """
    from dflash_cli.evaluation.measure import EvaluationRequest
    from dflash_cli.evaluation.prompt_choice import choose_prompts
    from dflash_cli.evaluation.speed import smallest
    from dflash_cli.evaluation.tuning.tuner import TuningRequest
    from dflash_cli.evaluation.tuning.tuner import tune as run
    from dflash_cli.evaluation.tuning.what_if import parse_what_ifs
    from dflash_cli.generation.loaded_pair import open_session

    config = replace(config or EngineConfig(), adaptive_width=False)
    params = params or SamplingParams(max_new_tokens=128)
    given = _prompt_set(prompts, dataset, dataset_format, num_prompts)
    session = open_session(
        str(draft),
        None if target is None else str(target),
        smallest(config),
        causality=causality,
        template_options=_to_text(chat_template_kwargs),
    )
    choice = choose_prompts(session, given, chat=chat, count=num_prompts, seed=params.seed or 0)
    evaluation = EvaluationRequest(
        rows=choice.rows,
        params=params,
        source=choice.source,
        chat=choice.chat,
        confidence=confidence,
        num_resamples=num_resamples,
        resume=resume,
    )
    request = TuningRequest(
        evaluation=evaluation,
        config=config,
        numbers=numbers,
        batches=batches,
        num_rounds=num_rounds,
        step_times=step_times,
        what_ifs=parse_what_ifs(what_ifs) if what_ifs is not None else (),
        folder=folder,
    )
    return run(session, request)


def probe_server(
    url: str,
    options: "ProbeOptions | None" = None,
    *,
    prompts: Prompts | None = None,
    dataset: str | None = None,
    dataset_format: str | None = None,
    num_prompts: int | None = None,
    max_new_tokens: int = 128,
    chat: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    journal: Path | None = None,
    resume: bool = False,
    force: bool = False,
) -> "Probed":
    """Ask a running server whether its draft is engaged and at what length, as `dflash probe` does.

    `options` say how it is reached and what it is held against. `Probed.runs` are the runs by concurrency, and
    `Probed.attribution` says whose a low number is.

    Raises:
        ServerUnreachable, UnsupportedError: the server does not answer, or says nothing of acceptance.
        UsageError: the result it is held against has none of the prompts; and whatever reading prompts raises.
    """
    from dflash_cli.engines.served_faults import known_faults
    from dflash_cli.evaluation.probing.probe_options import ProbeOptions, ProbePrompts, open_probe
    from dflash_cli.evaluation.probing.server_probe import probe

    options = options or ProbeOptions()
    asked = ProbePrompts(
        given=_prompt_set(prompts, dataset, dataset_format, num_prompts),
        num_prompts=num_prompts,
        max_new_tokens=max_new_tokens,
        chat=chat,
        template_options=_to_text(chat_template_kwargs),
        target_path=None if options.target is None else fetch_directory(options.target, Role.TARGET),
        journal=journal,
        resume=resume,
        force=force,
    )
    with open_probe(url, options, asked) as request:
        return probe(replace(request, known_faults=known_faults(options, request.server)))


def _to_text(options: Mapping[str, Any] | None) -> str | None:
    return None if options is None else json.dumps(options)


def _prompt_set(
    prompts: Prompts | None, dataset: str | None, dataset_format: str | None, count: int | None = None
) -> "PromptSet | None":
    from dflash_cli.generation.prompt_sets import PromptSet, read_prompts
    from dflash_cli.generation.prompts import PromptRow

    if prompts is None or isinstance(prompts, str | Path):
        return read_prompts(None if prompts is None else str(prompts), dataset, dataset_format, count=count)
    rows = [
        PromptRow(index=index, kind="prompt", value=item)
        if isinstance(item, str)
        else PromptRow(index=index, kind="prompt_token_ids", value=list(item))
        for index, item in enumerate(prompts)
    ]
    return PromptSet(name="given", rows=rows)


def _say_nothing(name: str, index: int, total: int) -> None:
    pass
