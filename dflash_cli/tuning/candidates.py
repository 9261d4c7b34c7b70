"""The numbers of drafted tokens that are tried, in two ways, and what each is accepted.

A draft that is asked for fewer tokens than it was trained for can be given a shorter block, as engines do, or its whole
block, of which the first rows are verified. Every row of a block without causality depends on how many follow, so the
drafts of the two differ. Neither follows from a run of whole blocks: what one step would have accepted of fewer drafts
does, but after it the next anchor is another.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress
from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.measure import EvaluationPlan, measure
from dflash_cli.generation.loaded_pair import PairSession
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.device.settings import resolve_limits
from dflash_runtime.errors import RequestError, UsageError
from dflash_runtime.llm import LLM

Way = Literal["whole", "resized", "narrowed"]
WAYS = "the trained block; a block of K + 1 rows; the trained block, with its first K + 1 rows verified"


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A number of drafted tokens, and in which way they are drafted."""

    num_speculative_tokens: int
    way: Annotated[Way, WAYS]

    @property
    def name(self) -> str:
        """`resized-3`, as files and documents have it."""
        return f"{self.way}-{self.num_speculative_tokens}"

    @property
    def verify_width(self) -> int | None:
        """Rows of the block that are verified, where that is not all of them."""
        return self.num_speculative_tokens + 1 if self.way == "narrowed" else None


def default_numbers(trained: int) -> list[int]:
    """1, 3, 7, ... and the trained K: blocks whose rows are powers of two."""
    powers = [(1 << power) - 1 for power in range(1, trained.bit_length() + 1)]
    return sorted({*(number for number in powers if number < trained), trained})


def candidates_for(numbers: Sequence[int], trained: int) -> list[Candidate]:
    """Both ways of each K below the trained one, where they are one; the trained one is always there.

    Raises:
        UsageError: a K that the draft was not trained for.
    """
    wrong = [number for number in numbers if not 1 <= number <= trained]
    if wrong:
        raise UsageError(
            f"{wrong[0]} speculative tokens, expected 1 to {trained}, those that the draft was trained for"
        )
    ways: tuple[Way, ...] = ("resized", "narrowed")
    fewer = [Candidate(number, way) for number in sorted({*numbers} - {trained}) for way in ways]
    return [*fewer, Candidate(trained, "whole")]


def resize(pair: LoadedPair, candidate: Candidate, config: EngineConfig) -> LoadedPair:
    """The pair as `config` asks for it, drafting as a candidate does; a pair for measuring has a tiny KV cache."""
    assert pair.draft is not None, "a pair that was loaded with a draft"
    number = None if candidate.way == "narrowed" else candidate.num_speculative_tokens
    restored = replace(
        pair.config, num_draft_tokens=number, max_num_requests=config.max_num_requests, num_pages=config.num_pages
    )
    limits = resolve_limits(restored, pair.target.config, pair.draft.config, pair.placement.kernels)
    return replace(pair, config=restored, limits=limits)


def measure_candidate(
    session: PairSession,
    candidate: Candidate,
    request: EvaluationPlan,
    config: EngineConfig,
    *,
    pair: LoadedPair | None = None,
    progress: AcceptanceProgress | None = None,
) -> Evaluation:
    """What is accepted of a candidate's drafts on all prompts, with a KV cache of its own.

    `pair` is run in place of the session's own.

    Raises:
        RequestError: a prompt that cannot be served; candidates have to be measured on the same ones.
    """
    if session.llm.device.type == "cuda":
        gc.collect()  # the KV cache of the candidate before, which the GPU may not hold beside this one's
        torch.cuda.empty_cache()
    params = replace(request.params, verify_width=candidate.verify_width)
    own = replace(session, llm=LLM(resize(pair or session.llm.pair, candidate, config)))
    own.check_params(params)
    own.warm_up(params, len(request.rows))
    found = measure(own, replace(request, params=params), progress=progress)
    if found.failed:
        first = found.failed[0]
        raise RequestError(f"{first.error} (of {candidate.name})", hint="take the prompt out, or raise --max-model-len")
    return found
