"""Calibration of a draft's confidence: held-out predictions, bins of equal mass, and their error."""

import numpy as np
import pytest
import torch

from dflash_cli.acceptance.calibration import (
    NUM_BINS,
    bin_by_mass,
    expected_error,
    find_calibration,
    predict_blocks,
    predict_online,
)
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput

K = 4


def output(confidences: list[list[float]], accepted: list[int]) -> RequestOutput:
    return RequestOutput(
        index=0, prompt_token_ids=(1,), token_ids=(1,), finish_reason=FinishReason.LENGTH,
        acceptance_lengths=tuple(count + 1 for count in accepted), draft_confidences=tuple(map(tuple, confidences)),
    )  # fmt: skip


def answers(num_prompts: int, num_steps: int, weight: float, bias: float) -> list[tuple[int, RequestOutput]]:
    """Prompts whose tokens are accepted with sigmoid(weight * logit(confidence) + bias)."""
    generator = np.random.default_rng(0)
    found = []
    for prompt in range(num_prompts):
        features = 2 * generator.standard_normal((num_steps, K))
        likely = 1 / (1 + np.exp(-(weight * features + bias)))
        accepted = np.cumprod(generator.random((num_steps, K)) < likely, axis=1).sum(1)
        found.append((prompt, output((1 / (1 + np.exp(-features))).tolist(), accepted.tolist())))
    return found


def test_a_fit_corrects_a_confidence_that_is_wrong_in_a_regular_way() -> None:
    """About 20,000 tokens, 1,300 a bin: a bin of a true model is 0.01 off on average. The raw error is above 0.1."""
    found = find_calibration(predict_blocks(answers(40, 300, 0.5, 0.8)))
    assert found is not None
    assert found.num_tokens > 18_000
    assert found.num_prompts == 40
    assert found.ece < 0.02
    assert found.confidence_ece > 0.1
    assert found.ece < found.online_ece < 0.03
    assert found.weight == pytest.approx(0.5, abs=0.05)
    assert found.biases == pytest.approx([0.8] * K, abs=0.15)
    assert len(found.bins) == NUM_BINS
    assert max(item.num_tokens for item in found.bins) - min(item.num_tokens for item in found.bins) <= 1
    assert [item.predicted for item in found.bins] == sorted(item.predicted for item in found.bins)


def test_predictions_come_from_prompts_that_were_not_predicted() -> None:
    """Every second prompt accepts the first token, and the others do not: each half predicts the other wrongly."""
    mixed = [(prompt, output([[0.5]] * 50, [prompt % 2] * 50)) for prompt in range(10)]
    found = find_calibration(predict_blocks(mixed))
    assert found is not None
    assert found.ece > 0.9


def test_an_online_prediction_never_uses_its_own_step() -> None:
    """64 steps accept the first token and 64 do not: the last step before a change is predicted as those before it."""
    features, accepted = torch.zeros(128, 1, dtype=torch.float64), (torch.arange(128) < 64).long()
    found = predict_online(features, accepted, torch.ones(128, dtype=torch.int64))[:, 0]
    assert found.unique_consecutive().tolist() == found[[0, 1, 2, 4, *range(8, 128, 8)]].tolist()
    assert found[0] == 0.5
    assert found[0] < found[1] < found[32] < found[64]
    assert found[96] < found[64]


def test_only_tokens_after_accepted_ones_count() -> None:
    found = find_calibration(predict_blocks([(0, output([[0.9] * K], [1])), (1, output([[0.9] * 2], [2]))]))
    assert found is not None
    assert found.num_tokens == 2 + 2


def test_there_is_no_calibration_without_confidences_or_with_one_prompt() -> None:
    assert find_calibration(predict_blocks([(0, output([], [1])), (1, output([], [2]))])) is None
    assert find_calibration(predict_blocks([(0, output([[0.9] * K], [1]))])) is None


def test_the_error_is_the_mean_gap_of_the_bins() -> None:
    likely, labels = np.array([0.1, 0.1, 0.9, 0.9]), np.array([0, 1, 1, 1])
    bins = bin_by_mass(likely, labels)
    assert [item.num_tokens for item in bins] == [1, 1, 1, 1]
    assert expected_error(bins) == pytest.approx((0.1 + 0.9 + 0.1 + 0.1) / 4)
