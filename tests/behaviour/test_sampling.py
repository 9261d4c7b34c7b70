"""Sampled texts are the same with and without speculation, and have the right distribution."""

import pytest
import torch

from dflash_runtime.models.target import Target
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.chi_square import chi_square, chi_square_quantile
from dflash_testing.pairs import (
    bundled_draft_model,
    bundled_llm,
    bundled_prompts,
    random_draft,
    random_llm,
    random_target,
    target_logits,
)

SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.8},
]


@pytest.mark.parametrize(
    "sampling",
    [SAMPLINGS[3], *(pytest.param(sampling, marks=pytest.mark.slow) for sampling in SAMPLINGS[:3])],
    ids=str,
)
def test_speculation_does_not_change_sampled_text(sampling: dict[str, float]) -> None:
    """Random numbers depend on seed and position, so the tokens do not depend on how many rows a step verifies."""
    prompts = [prompt[:24] for prompt in bundled_prompts()[:4]]
    params = [SamplingParams(max_new_tokens=14, seed=seed, **sampling) for seed in range(4)]  # type: ignore[arg-type]
    plain = bundled_llm(None, 0, dtype=torch.float64).generate(prompts, params)
    draft = bundled_draft_model(dtype=torch.float64)
    for num_draft_tokens, max_num_requests in ((1, 1), (7, 1), (7, 4)):
        llm = bundled_llm(draft, num_draft_tokens, dtype=torch.float64, max_num_requests=max_num_requests)
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]


def test_seeds_give_different_texts() -> None:
    prompt = bundled_prompts()[0][:24]
    llm = bundled_llm(bundled_draft_model(), 7)
    texts = {llm.generate([prompt], SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed))[0].token_ids
             for seed in range(4)}  # fmt: skip
    assert len(texts) == 4


def test_joint_distribution_of_the_first_two_tokens() -> None:
    """2,000 speculative samples have the enumerated distribution, on a vocabulary of 8, with a model as draft.

    Chi-square stays below its 0.999 quantile. `test_distribution.py` tests the statistic's power, and 200,000 samples.
    """
    target = random_target(torch.float64, vocab_size=8, num_layers=3)
    draft = random_draft(target, torch.float64, block_size=4, target_layer_ids=(0, 1))
    prompt, num_samples = [1, 2, 3], 2000
    llm = random_llm(target, draft, 3, max_num_requests=500)
    params = [SamplingParams(max_new_tokens=3, temperature=1.5, seed=seed) for seed in range(num_samples)]
    observed = torch.zeros(8, 8)
    num_accepted = 0
    for output in llm.generate([prompt] * num_samples, params):
        observed[output.token_ids[1], output.token_ids[2]] += 1
        num_accepted += sum(output.acceptance_lengths) - len(output.acceptance_lengths)
    assert num_accepted > num_samples / 20
    expected = torch.zeros(8, 8)
    first = next_token_law(target, prompt, 1.5)
    for token in range(8):
        second = next_token_law(target, [*prompt, token], 1.5)
        for after in range(8):
            expected[after] += first[token] * second[after] * next_token_law(target, [*prompt, token, after], 1.5)
    expected *= num_samples
    statistic, degrees = chi_square(observed, expected)
    assert statistic < chi_square_quantile(degrees, 3.09)


def next_token_law(target: Target, tokens: list[int], temperature: float) -> torch.Tensor:
    """[V] probabilities of the token after `tokens`."""
    return (target_logits(target, tokens)[-1] / temperature).softmax(-1)
