"""Candidates of a tuning: their numbers of draft tokens, and equality with a run of the same options."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_cli.acceptance.measure import EvaluationPlan, measure
from dflash_cli.checkpoints.references import TINY
from dflash_cli.generation.loaded_pair import open_session
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.tuning.candidate_runs import measure_candidate
from dflash_cli.tuning.candidates import Candidate, candidates_for, default_numbers
from dflash_cli.tuning.speed import smallest
from dflash_runtime.errors import RequestError, UsageError
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.dumps import EXACT, bundled_rows, rows_of
from dflash_testing.refusals import refuses


@pytest.mark.parametrize(("trained", "numbers"), [(1, [1]), (7, [1, 3, 7]), (10, [1, 3, 7, 10]), (15, [1, 3, 7, 15])])
def test_blocks_of_powers_of_two_are_tried(trained: int, numbers: list[int]) -> None:
    assert default_numbers(trained) == numbers


def test_each_k_below_the_trained_k_is_tried_in_both_ways() -> None:
    names = ["resized-1", "narrowed-1", "resized-3", "narrowed-3", "whole-7"]
    assert [item.name for item in candidates_for([3, 1, 3], 7)] == names
    trees = [item.name for item in candidates_for([7], 7, [32, 8, 32])]
    assert trees == ["tree-8", "tree-32", "whole-7"]
    with refuses(UsageError, "k-out-of-range", field="--num-speculative-tokens", found=8):
        candidates_for([8], 7)


def request_for(count: int, **params: Any) -> EvaluationPlan:
    return EvaluationPlan(
        rows=bundled_rows(count),
        params=SamplingParams(max_new_tokens=16, **params),
        source=PromptSource(name="bundled", num_available=count),
        num_resamples=0,
    )


@pytest.mark.parametrize(
    ("candidate", "engine", "params"),
    [
        (Candidate(3, "resized"), {"num_draft_tokens": 3}, {}),
        (Candidate(3, "narrowed"), {}, {"verify_width": 4}),
        (Candidate(7, "tree", 12), {"num_tree_nodes": 12}, {}),
    ],
    ids=["resized", "narrowed", "tree"],
)
def test_a_candidate_is_the_run_with_its_options(
    candidate: Candidate, engine: dict[str, Any], params: dict[str, Any]
) -> None:
    """A resized block equals a run with `-k`, a narrowed block a run with `--verify-width`, in every conversation."""
    found = measure_candidate(open_session(TINY, None, smallest(EXACT)), candidate, request_for(2), EXACT)
    expected = measure(open_session(TINY, None, replace(EXACT, **engine)), request_for(2, **params))
    assert found.conversations == expected.conversations
    assert found.settings == expected.settings
    assert sum(item.num_steps for item in found.conversations) > 8


def test_answers_without_a_step_measure_nothing() -> None:
    """As answers that are one stop token."""
    none = replace(request_for(1), params=SamplingParams(max_new_tokens=1))
    with refuses(UsageError, "no-steps", field="--max-new-tokens", found=1):
        measure_candidate(open_session(TINY, None, smallest(EXACT)), Candidate(7, "whole"), none, EXACT)


def test_a_prompt_that_cannot_be_served_ends_the_run() -> None:
    long = replace(request_for(1), rows=rows_of([list(range(5, 400)) * 6]))
    with refuses(RequestError, "candidate-prompt-failed", field="whole-7") as error:
        measure_candidate(open_session(TINY, None, smallest(EXACT)), Candidate(7, "whole"), long, EXACT)
    assert "2370" in error.value.message
