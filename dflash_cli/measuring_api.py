"""The functions of the Python interface that run pairs, or ask servers that do, and measure; see `api`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.api import Reference
from dflash_cli.checkpoints.opening import Causality
from dflash_cli.checkpoints.references import Role, fetch_directory
from dflash_runtime.config import EngineConfig
from dflash_runtime.scheduling.request import SamplingParams

if TYPE_CHECKING:
    from dflash_cli.acceptance.acceptance_report import Evaluation
    from dflash_cli.generation.prompt_sets import PromptSet
    from dflash_cli.generation.prompts import Sample
    from dflash_cli.handoff.disaggregation_options import CarrierName
    from dflash_cli.probing.probe_options import ProbeOptions
    from dflash_cli.probing.server_probe import Probed
    from dflash_cli.tuning.speed import BatchSpeed
    from dflash_cli.tuning.tuner import Tuning

Prompts = Reference | Sequence[str | Sequence[int]]
"""A JSON Lines file, or texts and lists of token ids."""


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
    disaggregated: bool = False,
    connector: "CarrierName | None" = None,
    prefill_draft: str | None = None,
    handoff_timeout: float = 60.0,
    force_mismatch: bool = False,
) -> "Evaluation":
    """Measure the acceptance of a pair, as `dflash eval-acceptance` does.

    Without `prompts` or a `dataset`, on the bundled ones: chats (mix-64), or for the bundled target pieces of Python.
    Where `chat` is None, chats go through the target's template, if it has one, and texts do not. What is typed for
    `dataset`, `thinking`, `context_lengths` and `exact_match` is what they take; `Evaluation.conditions` and
    `Evaluation.exact_match` have what came of it.

    `confidence` and `num_resamples` are those of the bootstrap behind the intervals. Answers are written to `journal`
    as they end, and with `resume` those that are in it are not asked for again. `workers` is what `--workers` takes.

    With `disaggregated`, prompts are prefilled in another process, and one engine is asked the same afterwards:
    `Evaluation.disaggregation` is both side by side, its `fault` what is wrong with the hand-off, None where it holds,
    and its `check()` raises where it does not. What is typed for `connector`, `prefill_draft`, `handoff_timeout` and
    `force_mismatch` is what they take.

    `Evaluation.total.counts.acceptance_len` is the acceptance length, `Evaluation.total.interval` its interval, and
    `Evaluation.failures` are the prompts that could not be measured, which are in neither. Whole blocks are verified,
    whatever the config says of adaptive width: acceptance would be capped.

    Raises:
        UsageError, RequestError: a pair or prompts that cannot be served; and whatever loading raises.
        HandoffMismatch: what the other process prefills does not fit, and `force_mismatch` is not given.
    """
    from dflash_cli.acceptance.measure import EvaluationRequest, measure
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.answers import Tally
    from dflash_cli.generation.conditions import make_conditions, parse_context_lengths, parse_thinking
    from dflash_cli.generation.loaded_pair import open_pair
    from dflash_cli.handoff.disaggregation import hold_against_one_engine
    from dflash_cli.handoff.disaggregation_options import DisaggregationOptions

    apart = DisaggregationOptions(
        disaggregated=disaggregated,
        connector=connector,
        prefill_draft=prefill_draft,
        handoff_timeout=handoff_timeout,
        force_mismatch=force_mismatch,
    )
    spread = None if workers is None else str(workers)
    apart.check(spread)
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
    with apart.open(pair, config, workers=spread) as answering:
        tally = Tally(answering.num_draft_tokens)
        evaluation = measure(answering, request, tally=tally)
        return hold_against_one_engine(evaluation, answering, request, tally)


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
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.loaded_pair import open_session
    from dflash_cli.tuning.speed import measure_speeds, smallest, speed_request

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
    from dflash_cli.acceptance.measure import EvaluationRequest
    from dflash_cli.acceptance.prompt_choice import choose_prompts
    from dflash_cli.generation.loaded_pair import open_session
    from dflash_cli.tuning.speed import smallest
    from dflash_cli.tuning.tuner import TuningRequest
    from dflash_cli.tuning.tuner import tune as run
    from dflash_cli.tuning.what_if import parse_what_ifs

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
    from dflash_cli.probing.probe_options import ProbeOptions, ProbePrompts, open_probe
    from dflash_cli.probing.served_faults import known_faults
    from dflash_cli.probing.server_probe import probe

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
