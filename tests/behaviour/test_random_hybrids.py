"""Random pairs in random engines: texts equal transformers' generation, and traces equal an uncached loop.

300 have hybrid targets, and 60 each are dense or with experts, Gemma 4, and gpt-oss.

`pytest -m slow tests/behaviour/test_random_hybrids.py` runs all pairs. The loop runs the whole prefix through
transformers' model anew for each step. A comparison ends where two logits are nearer than the rounding of float32.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.llm import LLM
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.scheduling.request import Request
from dflash_testing.hosted_models import plain_text
from dflash_testing.hybrid_cases import HybridCase, HybridPair, draw_case, make_pair, steer
from dflash_testing.pairs import placement, random_llm
from dflash_testing.plain_loop import Trace, trace_of
from dflash_testing.preemption import run_preempted
from dflash_testing.widths import RandomWidths

CASES = {"hybrid": (300, (0, 1, 2, 3)), "dense": (60, (0,)), "gemma4": (60, (0,)), "gpt_oss": (60, (0,))}
"""Family -> the number of seeds, and the seeds that run by default."""

ROUNDING = 1e-4
"""Correct programs in float32 differ by about 1e-5 in these logits."""


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:
        yield Path(path)


def run(case: HybridCase, llm: LLM, prompts: Sequence[Sequence[int]]) -> list[Request]:
    """Run all prompts at once, and preempt the youngest request from time to time."""
    if case.has_widths:
        llm.engine.scheduler.width_policy = RandomWidths(case.seed, case.num_drafts + 1)
    return run_preempted(llm, prompts, case.params, every=case.forced or 0)


def sampled_text(case: HybridCase, folder: Path, index: int, prompt: list[int]) -> list[int]:
    """The text of plain decoding by transformers' code with transformers' cache."""
    target = load_target(open_target(folder), placement(), "transformers-cache")
    (output,) = random_llm(target, None, 0).generate([prompt], case.params[index])
    return list(output.token_ids)


def texts_of(case: HybridCase, pair: HybridPair, folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """The right text after each prompt, longer than the engine's for greedy requests."""
    return [
        plain_text(pair.model, prompt, case.num_tokens + case.num_drafts + 1)
        if params.is_greedy
        else sampled_text(case, folder, index, prompt)
        for index, (prompt, params) in enumerate(zip(prompts, case.params, strict=True))
    ]


def num_sure(trace: Trace, num_tokens: int) -> int:
    """The number of first tokens of a text that rounding cannot change."""
    return next((index for index, gap in enumerate(trace.token_gaps) if gap < ROUNDING), num_tokens)


def check(case: HybridCase, folder: Path) -> dict[str, int]:
    """Run a case and compare it. Returns counts of what happened."""
    pair, prompts = make_pair(case, folder), case.prompts()
    texts = texts_of(case, pair, folder, prompts)
    known = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    draft = steer(pair.draft, known, case.skill, case.body["vocab_size"])
    llm = random_llm(
        pair.target, draft, case.num_drafts, max_model_len=case.model_len, num_pages=case.num_pages, **case.engine
    )
    requests = run(case, llm, prompts)
    seen = {"tokens": 0, "compared": 0, "steps": 0, "preemptions": 0, "sampled": 0, "cached": 0}
    for request, prompt, text in zip(requests, prompts, texts, strict=True):
        assert request.error is None
        found = request.output_token_ids
        assert len(found) == min(request.params.max_new_tokens, case.model_len - len(prompt))
        seen["tokens"] += len(found)
        seen["preemptions"] += request.num_preemptions
        seen["cached"] += request.num_cached
        if not request.params.is_greedy:
            assert found == text[: len(found)]
            seen["sampled"] += len(found)
            continue
        widths = {step.start: step.verify_width for step in request.steps}
        is_whole = not case.has_widths and not case.is_cut
        trace = trace_of(pair.read, draft, prompt, case.num_drafts, len(found), None if is_whole else widths)
        count = min(num_sure(trace, len(found)), len(found))
        assert found[:count] == text[:count] == trace.text[:count]
        seen["compared"] += count
        seen["steps"] += compare_steps(request, trace, count)
    return seen


def compare_steps(request: Request, trace: Trace, num_tokens: int) -> int:
    """Compare the verify steps within the first tokens of a text. Returns their number."""
    count = 0
    for index, (step, start) in enumerate(zip(trace.steps, trace.starts, strict=True)):
        if trace.draft_gaps[index] < ROUNDING or start + step[1] >= num_tokens:
            break
        found = request.steps[index]
        assert (found.start, found.draft_ids, found.num_accepted) == (start, *step)
        count += 1
    return count


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        pytest.param(family, seed, marks=() if seed in sample else pytest.mark.slow)
        for family, (count, sample) in CASES.items()
        for seed in range(count)
    ],
)
def test_a_random_pair_equals_transformers(family: str, seed: int, folder: Path, record_property: Any) -> None:
    seen = check(draw_case(seed, family), folder)
    for name, count in seen.items():
        record_property(name, count)
    assert seen["tokens"] > 0
