"""Candidates (a number of draft tokens and a way to draft them), and the acceptance of each.

There are two ways to draft fewer tokens than trained. Resized: the draft gets a shorter block, as in serving engines.
Narrowed: the draft gets its whole block, and only the first rows are verified. Attention in a block is not causal, so
the two ways give different draft tokens. A run with whole blocks cannot replace either: its later anchors differ. A
tree verifies more tokens than a block: the most likely paths of the whole block.
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
from dflash_cli.terminal.sampling_options import LOOKUP_NAMES
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.device.settings import resolve_limits
from dflash_runtime.documents import NOT_REQUIRED
from dflash_runtime.errors import RequestError, UsageError
from dflash_runtime.llm import LLM

Way = Literal["whole", "resized", "narrowed", "tree", "ngram", "suffix"]
WAYS: tuple[Way, ...] = ("resized", "narrowed")
"""Ways to draft fewer tokens than trained."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A number of draft tokens and a way to draft them."""

    num_speculative_tokens: int
    way: Annotated[
        Way,
        "the trained block; a block of K + 1 rows; the trained block, with its first K + 1 rows verified; a tree from "
        "the trained block; or a lookup in each request's own text, without a draft model",
    ]
    num_nodes: Annotated[int, NOT_REQUIRED, "drafted tokens of a tree, otherwise 0"] = 0

    @property
    def name(self) -> str:
        """`resized-3` or `tree-32`, the name in files and documents."""
        return f"{self.way}-{self.num_nodes or self.num_speculative_tokens}"

    @property
    def is_resized(self) -> bool:
        """Whether serving engines draft this way: they give the draft a block of K + 1 rows."""
        return self.way in ("whole", "resized")

    @property
    def is_lookup(self) -> bool:
        """Whether the tokens are looked up in each request's own text, without a draft model."""
        return self.way in LOOKUP_NAMES

    @property
    def verify_width(self) -> int | None:
        """Rows of the block to verify; None for all rows."""
        return self.num_speculative_tokens + 1 if self.way == "narrowed" else None


def default_numbers(trained: int) -> list[int]:
    """Return 1, 3, 7, ... (blocks of 2, 4, 8, ... rows) and the trained K."""
    powers = [(1 << power) - 1 for power in range(1, trained.bit_length() + 1)]
    return sorted({*(number for number in powers if number < trained), trained})


def candidates_for(numbers: Sequence[int], trained: int, trees: Sequence[int] = ()) -> list[Candidate]:
    """Return both ways of each K below the trained K, trees of these sizes, and the whole block with the trained K.

    Raises:
        UsageError: a K is outside 1 to the trained K.
    """
    wrong = [number for number in numbers if not 1 <= number <= trained]
    if wrong:
        raise UsageError(
            id="k-out-of-range",
            field="--num-speculative-tokens",
            found=wrong[0],
            expected=f"1 to {trained}, the K of the draft's training",
        )
    fewer = [Candidate(number, way) for number in sorted({*numbers} - {trained}) for way in WAYS]
    wider = [Candidate(trained, "tree", number) for number in sorted({*trees})]
    return [*fewer, *wider, Candidate(trained, "whole")]


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
        first = found.failed[0]
        raise RequestError(
            f"{candidate.name}: {first.error}",
            id="candidate-prompt-failed",
            field=candidate.name,
            hint="correct or remove this prompt: all candidates run on the same prompts",
        )
    return found
