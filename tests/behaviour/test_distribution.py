"""The distribution of sampled texts equals the enumerated distribution, on a vocabulary of six.

The first three tokens are counted jointly. The first comes from the prefill and the others from verify steps, so random
numbers shared between draft, acceptance, residual and bonus would show as dependence (vllm#54282).
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from dflash_kernels.logits.sampling import filtered_probs_ref
from dflash_runtime.draft_config import MarkovConfig
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.chi_square import chi_square, chi_square_quantile
from dflash_testing.hybrid_pair import random_hybrid_target
from dflash_testing.pairs import DFLASH2, ScriptedDraft, random_draft, random_llm, random_target, target_logits

V, PROMPT = 6, [1, 2, 3]
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T 1": {"temperature": 1.0},
    "T 0.5": {"temperature": 0.5},
    "T 1.5, top-k 4, top-p 0.9": {"temperature": 1.5, "top_k": 4, "top_p": 0.9},
}


@cache
def target(kind: str = "dense") -> Target:
    if kind == "hybrid":
        return random_hybrid_target(torch.float64, vocab_size=V)
    return random_target(torch.float64, vocab_size=V, num_layers=2, scale=0.15)


class FixedDraft(ScriptedDraft):
    """Proposes from one fixed distribution near the target's average, so that some drafts are accepted."""

    def __init__(self, kind: str = "dense") -> None:
        draft = random_draft(target(kind), torch.float64, block_size=4, target_layer_ids=(0, 1))
        super().__init__(draft, lambda position: 0)
        self._logits = distribution("T 1", kind).sum((0, 2)).log() + torch.linspace(-0.5, 0.5, V, dtype=torch.float64)

    def logits(
        self, block_ids: torch.Tensor, positions: torch.Tensor, attend: Attend, num_drafts: int | None = None
    ) -> torch.Tensor:
        return self._logits.expand(len(positions), num_drafts or positions.shape[1] - 1, V)


def walking_draft(kind: str = "dense") -> Draft:
    """A DFlash 2 draft: later tokens of a block depend on earlier ones."""
    return random_draft(target(kind), torch.float64, block_size=4, target_layer_ids=(0, 1), **DFLASH2)


def markov_draft(kind: str = "dense") -> Draft:
    """A DSpark draft, which proposes by the filters of the request, too."""
    markov = MarkovConfig(rank=3, head_type="rnn")
    changes: dict[str, Any] = {"family": "dspark", "markov": markov, "sample_from_anchor": True}
    return random_draft(target(kind), torch.float64, block_size=3, target_layer_ids=(0, 1), **changes)


def observe(
    draft_sampling: str,
    sampling: dict[str, Any],
    num_samples: int,
    draft: Draft,
    kind: str = "dense",
    num_nodes: int | None = None,
) -> tuple[torch.Tensor, float]:
    """Counts [V, V, V] of the first three tokens, and the share of accepted drafts."""
    llm = random_llm(
        target(kind),
        draft,
        3,
        max_num_requests=500,
        num_pages=4000,
        draft_sampling=draft_sampling,
        num_tree_nodes=num_nodes,
        prefix_cache=False,
    )
    counts = torch.zeros(V, V, V, dtype=torch.float64)
    params = [SamplingParams(max_new_tokens=3, seed=seed, **sampling) for seed in range(num_samples)]
    steps = accepted = 0
    for output in llm.generate([PROMPT] * num_samples, params):
        counts[output.token_ids] += 1
        steps += len(output.acceptance_lengths)
        accepted += sum(output.acceptance_lengths) - len(output.acceptance_lengths)
    return counts, accepted / (3 * steps)


@cache
def distribution(name: str, kind: str = "dense") -> torch.Tensor:
    """The joint distribution of the first three tokens, [V, V, V], by enumeration."""
    first = next_distribution(PROMPT, name, kind)
    joint = torch.zeros(V, V, V, dtype=torch.float64)
    for a in range(V):
        second = next_distribution([*PROMPT, a], name, kind)
        for b in range(V):
            joint[a, b] = first[a] * second[b] * next_distribution([*PROMPT, a, b], name, kind)
    return joint


def next_distribution(tokens: list[int], name: str, kind: str) -> torch.Tensor:
    sampling = SAMPLINGS[name]
    return filtered_probs_ref(
        target_logits(target(kind), tokens)[-1:],
        torch.tensor([sampling["temperature"]], dtype=torch.float64),
        torch.tensor([sampling.get("top_k", 0)]),
        torch.tensor([sampling.get("top_p", 1.0)], dtype=torch.float64),
    )[0]


def check(
    draft_sampling: str,
    name: str,
    num_samples: int,
    make_draft: Callable[[str], Draft] = FixedDraft,
    kind: str = "dense",
    num_nodes: int | None = None,
) -> str:
    counts, acceptance = observe(draft_sampling, SAMPLINGS[name], num_samples, make_draft(kind), kind, num_nodes)
    assert counts.sum() == num_samples
    assert acceptance > 0.05  # otherwise acceptance would hardly affect the distribution
    expected = distribution(name, kind) * num_samples
    assert counts[expected == 0].sum() == 0
    lines = []
    for label, seen, wanted in (
        ("three tokens", counts, expected),
        ("tokens two and three", counts.sum(0), expected.sum(0)),
        ("token two", counts.sum((0, 2)), expected.sum((0, 2))),
    ):
        statistic, degrees = chi_square(seen, wanted)
        limit = chi_square_quantile(degrees, 3.29)  # exceeded once in 2,000
        lines.append(
            f"{draft_sampling}, {name}, {label}: chi-square {statistic:.1f}, {degrees} degrees, 0.9995 at {limit:.1f}"
        )
        assert statistic < limit, lines[-1]
    return "\n".join([*lines, f"accepted {acceptance:.3f} of the drafts"])


@pytest.mark.parametrize("name", ["T 1", "T 1.5, top-k 4, top-p 0.9"])
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_distribution_of_three_tokens(draft_sampling: str, name: str) -> None:
    """2,000 samples detect a token that is a third too frequent, and random numbers shared with the draft."""
    check(draft_sampling, name, 2_000)


@pytest.mark.parametrize("name", ["T 1.5, top-k 4, top-p 0.9"])
def test_distribution_of_three_tokens_from_trees(name: str) -> None:
    """2,000 samples, as above. A tree of 9 nodes has several candidates for each of the tokens."""
    check("greedy", name, 2_000, num_nodes=9)


@pytest.mark.parametrize("draft_sampling", [pytest.param("greedy", marks=pytest.mark.slow), "probabilistic"])
def test_distribution_of_a_hybrid_target(draft_sampling: str) -> None:
    check(draft_sampling, "T 1.5, top-k 4, top-p 0.9", 2_000, kind="hybrid")


@pytest.mark.parametrize("make_draft", [walking_draft, markov_draft])
def test_distribution_with_a_draft_that_walks(make_draft: Callable[[str], Draft]) -> None:
    check("probabilistic", "T 1.5, top-k 4, top-p 0.9", 2_000, make_draft)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("make_draft", [FixedDraft, walking_draft, markov_draft])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("draft_sampling", ["greedy", "probabilistic"])
def test_distribution_over_200_000_samples(
    draft_sampling: str, name: str, make_draft: Callable[[str], Draft], kind: str
) -> None:
    print(check(draft_sampling, name, 200_000, make_draft, kind))


@pytest.mark.parametrize(("num_samples", "factor"), [(2_000, 1.33), (200_000, 1.03)])
def test_a_biased_sampler_would_be_caught(num_samples: int, factor: float) -> None:
    """The test detects a token that is too frequent by `factor` at this number of samples."""
    expected = distribution("T 1").sum((0, 2)) * num_samples
    moved = expected.clone()
    moved[expected.argmax()] *= factor
    statistic, degrees = chi_square(moved * (num_samples / moved.sum()), expected)
    assert statistic > chi_square_quantile(degrees, 3.29)
