"""The pair of a candidate, and its acceptance."""

import gc
from dataclasses import replace

import torch

from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.measure import EvaluationPlan, measure
from dflash_cli.generation.loaded_pair import PairSession
from dflash_cli.tuning.candidates import Candidate
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.setup.settings import resolve_limits
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import RequestError, UsageError, error_of
from dflash_runtime.llm import LLM


def resize(pair: LoadedPair, candidate: Candidate, config: EngineConfig) -> LoadedPair:
    """Return the pair with a candidate's block, and the batch size and KV pages of `config`."""
    assert pair.draft is not None, "a pair that was loaded with a draft"
    number = None if candidate.way == "narrowed" else candidate.num_speculative_tokens
    restored = replace(
        pair.config, num_draft_tokens=number, num_tree_nodes=candidate.num_nodes or None,
        max_num_requests=config.max_num_requests, num_pages=config.num_pages,
    )  # fmt: skip
    limits = resolve_limits(restored, pair.target.config, pair.draft.config, pair.placement.kernels)
    resized = replace(pair, config=restored, limits=limits)
    return resized.with_lookup(candidate.way) if candidate.is_lookup else resized


def measure_candidate(
    session: PairSession,
    candidate: Candidate,
    request: EvaluationPlan,
    config: EngineConfig,
    *,
    pair: LoadedPair | None = None,
    progress: AcceptanceProgress | None = None,
) -> Evaluation:
    """Return a candidate's acceptance on all prompts, with a new KV cache. `pair` replaces the session's pair.

    Raises:
        RequestError: a prompt cannot be served. All candidates must run on the same prompts.
        UsageError: no answer has a verify step.
        DFlashError: a prompt fails for another reason, such as NaN in the weights.
    """
    if session.llm.device.type == "cuda":
        gc.collect()  # free the previous candidate's KV cache: the GPU may not have memory for both
        torch.cuda.empty_cache()
    params = replace(request.params, verify_width=candidate.verify_width)
    own = replace(session, llm=LLM(resize(pair or session.llm.pair, candidate, config)))
    own.check_params(params)
    own.warm_up(params, len(request.rows))
    found = measure(own, replace(request, params=params), progress=progress)
    if found.failed:
        first = max(found.failed, key=lambda failure: failure.exit_code)
        kind = error_of(first.exit_code)
        told = "correct or remove this prompt: all candidates run on the same prompts"
        raise kind(
            f"{candidate.name}: {first.error}",
            id="candidate-prompt-failed",
            field=candidate.name,
            hint=told if kind is RequestError else None,
        )
    if not found.total.counts.num_drafts:
        raise UsageError(
            f"{candidate.name}: every answer ended before its first verify step, so nothing was measured",
            id="no-steps",
            field="--max-new-tokens",
            found=request.params.max_new_tokens,
            expected="answers with verify steps; the prompt's own pass gives the first token",
            hint="raise --max-new-tokens, or give other prompts",
        )
    return found
