"""Greedy speculative output equals plain decoding, token for token, for any draft.

Batch shape changes float32 sums, so float32 tests run single requests, and batches are compared in float64.
"""

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import (
    always_mask,
    always_right,
    always_wrong,
    bundled_draft,
    bundled_draft_model,
    bundled_llm,
    bundled_prompts,
)

PARAMS = SamplingParams(max_new_tokens=20)


LENGTHS = (1, 7, 8, 9, 16, 17, 33)
"""Prompt lengths around the ends of blocks and pages. A slow test runs every length from 1 to 65."""

AT_BOTH_ENDS = [1, pytest.param(3, marks=pytest.mark.slow), 7]
"""Values of K for scripted drafts. A trained draft runs with 3 too."""


def prompts_of(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    text = [token for prompt in bundled_prompts() for token in prompt]
    return [tuple(text[7 * length : 8 * length]) for length in lengths]


def plain_texts(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in bundled_llm(None, 0).generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return prompts_of(LENGTHS)


@pytest.fixture(scope="module")
def plain(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return plain_texts(prompts)


@pytest.mark.parametrize(("name", "num_draft_tokens"), [("tiny", 1), ("tiny", 7), ("tiny:reduced", 3)])
def test_bundled_drafts(
    name: str, num_draft_tokens: int, prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]]
) -> None:
    check_draft(name, num_draft_tokens, prompts, plain)


@pytest.mark.slow
@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("name", ["tiny", "tiny:reduced"])
def test_bundled_drafts_at_every_prompt_length(name: str, num_draft_tokens: int) -> None:
    prompts = prompts_of(range(1, 66))
    check_draft(name, num_draft_tokens, prompts, plain_texts(prompts))


def check_draft(name: str, num_draft_tokens: int, prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]]) -> None:
    outputs = bundled_llm(bundled_draft_model(name), num_draft_tokens).generate(prompts, PARAMS)
    assert [output.token_ids for output in outputs] == plain
    accepted = sum(sum(output.acceptance_lengths) - len(output.acceptance_lengths) for output in outputs)
    assert accepted > len(outputs)  # some drafts are accepted


@cache
def oracle(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The target's text to a block after the limit, so that a scripted draft knows its last block too."""
    longer = SamplingParams(max_new_tokens=PARAMS.max_new_tokens + 8)
    return bundled_llm(None, 0).generate([prompt], longer)[0].token_ids


@pytest.mark.parametrize("num_draft_tokens", AT_BOTH_ENDS)
def test_a_draft_that_is_always_right_is_always_accepted(
    num_draft_tokens: int, prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]]
) -> None:
    draft = bundled_draft_model()
    for prompt, expected in zip(prompts[::2], plain[::2], strict=True):
        sequence = prompt + oracle(prompt)
        output = bundled_llm(always_right(draft, sequence), num_draft_tokens).generate([prompt], PARAMS)[0]
        assert output.token_ids == expected
        assert set(output.acceptance_lengths) == {num_draft_tokens + 1}


@pytest.mark.parametrize("num_draft_tokens", AT_BOTH_ENDS)
def test_a_draft_that_is_always_wrong_is_never_accepted(
    num_draft_tokens: int, prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]]
) -> None:
    draft = bundled_draft_model()
    for prompt, expected in zip(prompts[::2], plain[::2], strict=True):
        wrong = always_wrong(draft, prompt + expected)
        output = bundled_llm(wrong, num_draft_tokens).generate([prompt], PARAMS)[0]
        assert output.token_ids == expected
        assert output.acceptance_lengths == (1,) * (PARAMS.max_new_tokens - 1)


@pytest.mark.parametrize("num_draft_tokens", AT_BOTH_ENDS)
def test_a_draft_that_proposes_its_mask_token_changes_nothing(
    num_draft_tokens: int, prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]]
) -> None:
    llm = bundled_llm(always_mask(bundled_draft_model()), num_draft_tokens)
    outputs = llm.generate(prompts[::2], PARAMS)
    assert [output.token_ids for output in outputs] == plain[::2]


def test_plain_decoding_equals_transformers(prompts: list[tuple[int, ...]], plain: list[tuple[int, ...]]) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_directory() / "target", dtype=torch.float32)
    for prompt, expected in zip(prompts[::2], plain[::2], strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=PARAMS.max_new_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert tuple(output[0, len(prompt) :].tolist()) == expected


LAYOUTS: dict[str, dict[str, int]] = {
    "as trained": {},
    "causal": {"causal": True},
    "window": {"window": 24},
    "causal window": {"window": 24, "causal": True},
}


@cache
def plain_in_float64() -> tuple[list[tuple[int, ...]], SamplingParams, list[RequestOutput]]:
    """Prompts with lengths around the ends of pages, their parameters, and the outputs of plain decoding."""
    prompts = [prompt[:length] for prompt, length in zip(bundled_prompts(), [1, 15, 16, 33, 40], strict=False)]
    params = SamplingParams(max_new_tokens=12)
    return prompts, params, bundled_llm(None, 0, dtype=torch.float64).generate(prompts, params)


def layout_cases() -> list[Any]:
    """All cases of draft, layout and K. One case per layout runs by default, and the others are slow."""
    by_default = {
        ("tiny", "as trained", 7), ("tiny:reduced", "causal", 1), ("tiny", "window", 1),
        ("tiny:reduced", "causal window", 7),
    }  # fmt: skip
    cases = product(["tiny", "tiny:reduced"], LAYOUTS, [1, 7])
    return [pytest.param(*case, marks=() if case in by_default else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "layout", "num_draft_tokens"), layout_cases())
def test_batches_in_float64(name: str, layout: str, num_draft_tokens: int) -> None:
    """Five prompts run with three requests at a time, for both drafts and every attention layout."""
    num_layers = bundled_draft(name).config.num_layers
    causal, window = LAYOUTS[layout].get("causal", False), LAYOUTS[layout].get("window")
    draft = bundled_draft_model(
        name, torch.float64, causal=(bool(causal),) * num_layers, windows=(window,) * num_layers
    )
    prompts, params, plain = plain_in_float64()
    single = bundled_llm(draft, num_draft_tokens, dtype=torch.float64).generate(prompts, params)
    batched = bundled_llm(draft, num_draft_tokens, dtype=torch.float64, max_num_requests=3).generate(prompts, params)
    assert [output.token_ids for output in single] == [output.token_ids for output in plain]
    assert batched == single
    assert sum(map(sum, (output.acceptance_lengths for output in single))) > sum(
        len(output.acceptance_lengths) for output in single
    )
