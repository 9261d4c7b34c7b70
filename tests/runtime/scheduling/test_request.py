"""Where requests end: limits, stop tokens inside an accepted run, the model length. And which requests are refused."""

import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from dflash_runtime.device.setup.settings import resolve_limits
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError, RequestError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import FinishReason, Request
from dflash_runtime.scheduling.sampling_params import MAX_STOP_IDS, SamplingParams
from dflash_testing.pairs import always_right, bundled_draft_model, bundled_llm, bundled_prompts
from dflash_testing.refusals import refuses

K = 3


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    return bundled_prompts()[3][:20]


@pytest.fixture(scope="module")
def sequence(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The prompt and 40 tokens of plain decoding."""
    return prompt + bundled_llm(None, 0).generate([prompt], SamplingParams(max_new_tokens=40))[0].token_ids


@pytest.fixture(scope="module")
def oracle(sequence: tuple[int, ...]) -> LLM:
    return bundled_llm(always_right(bundled_draft_model(), sequence), K)


@pytest.mark.parametrize("max_new_tokens", range(1, 2 * K + 4))
def test_any_limit_is_met_exactly(
    oracle: LLM, prompt: tuple[int, ...], sequence: tuple[int, ...], max_new_tokens: int
) -> None:
    output = oracle.generate([prompt], SamplingParams(max_new_tokens=max_new_tokens))[0]
    assert output.token_ids == sequence[len(prompt) : len(prompt) + max_new_tokens]
    assert output.finish_reason is FinishReason.LENGTH
    # The prefill gives one token. Every step accepts a whole block, even when the output keeps only part of it.
    assert output.acceptance_lengths == (K + 1,) * -(-(max_new_tokens - 1) // (K + 1))
    assert sum(output.committed_lengths) == max_new_tokens - 1


@pytest.mark.parametrize("position", range(9))
def test_a_stop_token_ends_the_run_at_any_position_of_a_block(
    oracle: LLM, prompt: tuple[int, ...], sequence: tuple[int, ...], position: int
) -> None:
    generated = sequence[len(prompt) :]
    stop = generated[position]
    expected = generated[: generated.index(stop) + 1]
    params = SamplingParams(max_new_tokens=30, stop_token_ids=(stop,))
    output = oracle.generate([prompt], params)[0]
    assert output.token_ids == expected
    assert output.finish_reason is FinishReason.STOP
    assert set(output.acceptance_lengths) <= {K + 1}
    ignored = oracle.generate([prompt], SamplingParams(max_new_tokens=30, stop_token_ids=(stop,), ignore_eos=True))[0]
    assert ignored.token_ids == generated[:30]


@pytest.mark.parametrize("distance", range(0, 2 * K + 4))
def test_near_the_model_length_blocks_are_whole_or_not_drafted(
    prompt: tuple[int, ...], sequence: tuple[int, ...], distance: int
) -> None:
    limit = len(prompt) + 1 + distance
    llm = bundled_llm(always_right(bundled_draft_model(), sequence), K, max_model_len=limit)
    output = llm.generate([prompt], SamplingParams(max_new_tokens=100))[0]
    assert output.token_ids == sequence[len(prompt) : limit]
    assert output.finish_reason is FinishReason.LENGTH
    drafted, kv_len = 0, len(prompt)
    while kv_len + K + 1 <= limit:
        drafted, kv_len = drafted + 1, kv_len + K + 1
    assert output.acceptance_lengths == (K + 1,) * drafted


def test_a_request_near_the_model_length_does_not_change_its_batch_mates() -> None:
    prompts = [bundled_prompts()[5][:30], bundled_prompts()[6][:8]]
    draft = bundled_draft_model()
    params = SamplingParams(max_new_tokens=24)
    together = bundled_llm(draft, 7, max_num_requests=2, max_model_len=36).generate(prompts, params)
    alone = bundled_llm(draft, 7, max_model_len=36).generate([prompts[1]], params)[0]
    assert len(together[0].token_ids) == 6
    assert together[1].token_ids == alone.token_ids
    assert together[1].acceptance_lengths == alone.acceptance_lengths


def test_a_repeated_request_gives_the_same_output(prompt: tuple[int, ...]) -> None:
    llm = bundled_llm(bundled_draft_model(), 7)
    first, second, third = (llm.generate([prompt], SamplingParams(max_new_tokens=40))[0] for _ in range(3))
    assert first.drafts == second.drafts == third.drafts
    assert first.token_ids == second.token_ids == third.token_ids


@pytest.mark.parametrize(
    ("token_ids", "problem", "found"),
    [
        ([], "empty-prompt", ()),
        ([1, 2, 99_999], "token-id-out-of-range", 99_999),
        ([1, -1], "token-id-out-of-range", -1),
        ([1] * 5000, "prompt-too-long", 5000),
    ],
)
def test_a_refused_prompt_is_reported_and_does_not_change_other_prompts(
    token_ids: list[int], problem: str, found: Any, prompt: tuple[int, ...]
) -> None:
    llm = bundled_llm(bundled_draft_model(), 7, max_num_requests=2)
    params = SamplingParams(max_new_tokens=12)
    alone = llm.generate([prompt], params)[0]
    before, wrong, after = llm.generate([prompt, token_ids, prompt], params)
    assert wrong.finish_reason is FinishReason.ERROR
    assert (wrong.error_id, wrong.exit_code) == (problem, RequestError.exit_code)
    assert wrong.error
    assert wrong.index == 1
    assert before.token_ids == after.token_ids == alone.token_ids
    with refuses(RequestError, problem, field="prompt_token_ids", found=found):
        llm.engine.add(Request(index=0, prompt_token_ids=tuple(token_ids), params=params))


def test_a_request_that_can_never_fit_is_refused_with_the_arithmetic() -> None:
    """8 pages of 16 tokens hold 120 tokens and a block of 8; the pool has 4."""
    llm = bundled_llm(bundled_draft_model(), 7, num_pages=5)
    with refuses(CapacityError, "request-exceeds-kv-pages", found=8, expected="at most 4 pages") as caught:
        llm.engine.add(Request(index=0, prompt_token_ids=(1,) * 20, params=SamplingParams(max_new_tokens=100)))
    assert re.findall(r"\d+", caught.value.message) == ["8", "16", "120", "8", "4"]
    assert "--max-model-len" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "changes",
    [{"max_new_tokens": 0}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.5},
     {"top_k": -1}, {"seed": 2**70}, {"top_k": 2**63}, {"top_k": 2.5}, {"temperature": "hot"}, {"top_p": None},
     {"stop_token_ids": (2**64,)}, {"stop_token_ids": (-1,)}, {"stop_token_ids": (1.5,)}, {"stop_token_ids": 3},
     {"max_new_tokens": None}, {"max_new_tokens": 1.5}, {"verify_width": 0}, {"verify_width": "3"}, {"seed": 0.5},
     {"max_new_tokens": True}, {"top_k": True}, {"seed": False}, {"temperature": True}, {"top_p": True},
     {"stop_token_ids": (True,)}, {"verify_width": True}, {"temperature": 10**400}, {"top_p": 10**400},
     {"temperature": float("inf")}, {"ignore_eos": "no"}, {"ignore_eos": None}, {"ignore_eos": 1}],
)  # fmt: skip
def test_sampling_parameters_out_of_range_are_refused(changes: dict[str, float]) -> None:
    with refuses(RequestError, field=next(iter(changes))):
        SamplingParams(**changes)  # type: ignore[arg-type]


def test_numbers_of_any_type_are_stored_as_plain_ones() -> None:
    params = SamplingParams(max_new_tokens=np.int64(3), temperature=Fraction(1, 2), top_p=1, seed=torch.tensor(4))  # type: ignore[arg-type]
    assert list(map(type, (params.max_new_tokens, params.temperature, params.top_p, params.seed))) == [
        int, float, float, int
    ]  # fmt: skip
    assert params == SamplingParams(max_new_tokens=3, temperature=0.5, top_p=1.0, seed=4)


@pytest.mark.parametrize("name", ["max_new_tokens", "top_k", "verify_width"])
def test_a_number_that_is_too_large_is_told_the_largest_one(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: 2**70})  # type: ignore[arg-type]
    assert "at least" not in str(caught.value.expected)
    assert str(caught.value.expected).endswith("to 2**63 - 1")


@pytest.mark.parametrize("value", [True, 2**70, 2.0, "4"])
@pytest.mark.parametrize("name", ["max_num_requests", "page_size", "num_pages", "num_draft_tokens", "max_in_flight"])
def test_a_setting_of_an_engine_is_an_integer_of_64_bits(name: str, value: object) -> None:
    with refuses(UsageError, field=name, found=value):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


def test_too_many_stop_ids_are_refused() -> None:
    SamplingParams(stop_token_ids=tuple(range(MAX_STOP_IDS)))
    with refuses(RequestError, "too-many-stop-ids", field="stop_token_ids", found=MAX_STOP_IDS + 1):
        SamplingParams(stop_token_ids=tuple(range(MAX_STOP_IDS + 1)))


def test_more_drafts_than_the_draft_was_trained_for_are_refused() -> None:
    from dflash_cli.checkpoints.opening import open_target
    from dflash_cli.checkpoints.references import tiny_directory
    from dflash_testing.pairs import bundled_draft

    target = open_target(tiny_directory() / "target")
    with pytest.raises(UsageError) as caught:
        resolve_limits(EngineConfig(num_draft_tokens=8), target.config, bundled_draft().config)
    assert re.findall(r"\d+", caught.value.message)[:2] == ["8", "7"]


def test_the_largest_accepted_values_run(prompt: tuple[int, ...]) -> None:
    """Values that are not refused at once do not fail later."""
    params = SamplingParams(
        max_new_tokens=2**63 - 1, top_k=2**63 - 1, seed=-(2**63), stop_token_ids=(2**63 - 1,), verify_width=2**63 - 1,
        temperature=1.7e308, top_p=5e-324,
    )  # fmt: skip
    output = bundled_llm(bundled_draft_model(), 7, max_model_len=24).generate([prompt], params)[0]
    assert (output.error, len(output.token_ids)) == (None, 4)


@pytest.mark.parametrize("temperature", [1e-310, 5e-324, 1e-307, 9e-6])
def test_a_temperature_near_zero_is_greedy(temperature: float, prompt: tuple[int, ...]) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=temperature, seed=1)
    assert params.is_greedy
    llm = bundled_llm(bundled_draft_model(), 7, max_num_requests=2)
    greedy = llm.generate([prompt], SamplingParams(max_new_tokens=6))[0]
    warm = SamplingParams(max_new_tokens=6, temperature=1.0, seed=1)
    assert llm.generate([prompt, prompt], [params, warm])[0].token_ids == greedy.token_ids
