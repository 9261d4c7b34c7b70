"""The regression on a draft's confidence: its Newton steps, its labels, and its fit."""

import math

import pytest
import torch
from torch import Tensor

from dflash_kernels.steps.draft_odds import LARGEST_FEATURE, features_of
from dflash_kernels.steps.odds_refit import DAMPING, HOPE, NEIGHBOUR_TOKENS, RIDGE, with_neighbours
from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.acceptance_model import AcceptanceModel, OnlineAcceptance

K = 5


def blocks(count: int, weight: float, biases: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features [R, K] of blocks whose tokens are accepted by a known model, accepted counts, and verified counts."""
    generator = torch.Generator().manual_seed(seed)
    features = 2 * torch.randn(count, K, generator=generator, dtype=torch.float64)
    likely = torch.sigmoid(weight * features + biases)
    accepted = (torch.rand(count, K, generator=generator, dtype=torch.float64) < likely).long().cumprod(1).sum(1)
    return features, accepted, torch.full((count,), K)


def test_a_step_is_damped_and_solves_the_bounded_problem() -> None:
    """The gradient comes from autograd, and the curvature of each token from its formula, over tokens one by one."""
    features, accepted, verified = blocks(9, 0.7, torch.linspace(0.5, -0.5, K, dtype=torch.float64))
    verified[::3] = 2
    verified[1] = 0
    start = AcceptanceModel(torch.tensor(0.4, dtype=torch.float64), torch.linspace(-1, 1, K, dtype=torch.float64))

    tokens = torch.zeros(K)
    for row in range(len(features)):
        tokens[: min(int(accepted[row]) + 1, int(verified[row]))] += 1
    counts = torch.cat((tokens.sum()[None], tokens))
    values = torch.cat((start.weight[None], start.biases))
    curvature = RIDGE * torch.eye(K + 1, dtype=torch.float64)

    def loss(values: Tensor) -> Tensor:
        total = values.new_zeros(())
        for row in range(len(features)):
            for place in range(min(int(accepted[row]) + 1, int(verified[row]))):
                score = values[0] * features[row, place] + values[1 + place]
                total = total - torch.nn.functional.logsigmoid(score if place < accepted[row] else -score)
        return total

    for row in range(len(features)):
        for place in range(min(int(accepted[row]) + 1, int(verified[row]))):
            column = torch.zeros(K + 1, dtype=torch.float64)
            column[0], column[1 + place] = features[row, place], 1
            score = float(column @ values)
            curvature += math.tanh(score / 2) / (2 * score) * torch.outer(column, column)
    own = torch.autograd.functional.hessian(loss, values)
    assert torch.linalg.eigvalsh(curvature - own).min() > 0  # a bound: a step never overshoots
    wanted = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(wanted), wanted)
    expected = values - torch.linalg.solve(curvature, gradient) * counts / (counts + DAMPING)
    found = start.stepped(start.sums_of(features, accepted, verified))
    torch.testing.assert_close(torch.cat((found.weight[None], found.biases)), expected)


def test_refits_converge_where_the_confidence_says_nothing() -> None:
    """Confidences of up to 0.9995 and an acceptance of 0.7: a step by the likelihood's own curvature goes anywhere.

    60 refits over 64 blocks each. The spread of a fit of this size is about 0.02 for the weight and 0.1 for a bias.
    """
    model = AcceptanceModel.first(K)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        features = 8 * torch.rand(64, K, generator=generator, dtype=torch.float64)
        accepted = (torch.rand(64, K, generator=generator) < 0.7).long().cumprod(1).sum(1)
        model = model.stepped(model.sums_of(features, accepted, torch.full((64,), K)))
    assert float(model.weight) == pytest.approx(0, abs=0.15)
    likely = model.probabilities(torch.full((1, K), 4.0, dtype=torch.float64))[0]
    assert likely[:3].tolist() == pytest.approx([0.7] * 3, abs=0.1)


def test_refits_recover_the_model_that_drew_the_labels() -> None:
    """200 refits over 64 blocks each: 12,800 blocks. The spread of a fit of this size is about 0.03 per bias."""
    biases = torch.tensor([1.0, 0.5, 0.0, -0.5, 0.8], dtype=torch.float64)
    model = AcceptanceModel.first(K)
    for seed in range(200):
        model = model.stepped(model.sums_of(*blocks(64, 0.6, biases, seed)))
    assert float(model.weight) == pytest.approx(0.6, abs=0.15)
    assert model.biases[:2].tolist() == pytest.approx(biases[:2].tolist(), abs=0.4)


def test_a_position_that_is_not_judged_keeps_its_bias() -> None:
    model = AcceptanceModel(torch.tensor(0.5, dtype=torch.float64), torch.arange(K, dtype=torch.float64))
    features, accepted, verified = blocks(100, 0.5, torch.zeros(K, dtype=torch.float64))
    found = model.stepped(model.sums_of(features, accepted.clamp(max=2), verified.clamp(max=2)))
    assert found.biases[2:].tolist() == [2, 3, 4]
    assert (found.biases[:2] != model.biases[:2]).all()


def test_a_position_without_judged_tokens_takes_the_bias_of_the_position_before() -> None:
    """The recursion, position by position, with many tokens, some, few, and none."""
    biases, num_judged = torch.tensor([0.3, -1.0, 2.0, 0.0, 0.0]).double(), torch.tensor([0.0, 4.0, 1e6, 1, 0]).double()
    expected = [0.3]
    for bias, count in list(zip(biases.tolist(), num_judged.tolist(), strict=True))[1:]:
        own = count / (count + NEIGHBOUR_TOKENS)
        expected.append(own * bias + (1 - own) * expected[-1] + HOPE * (1 - own) ** 2)
    assert with_neighbours(biases, num_judged).tolist() == pytest.approx(expected)


def test_rows_that_a_budget_leaves_out_are_expected_to_be_accepted_like_the_last_verified_row() -> None:
    """Blocks of 15 with an acceptance of 0.95 each, confidences that say nothing, and two verified draft tokens."""
    online = OnlineAcceptance(15, torch.device("cpu"), REFERENCE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        confidences = 0.1 + 0.8 * torch.rand(16, 15, generator=generator)
        odds = online.predict(confidences, torch.full((16,), 15))
        accepted = (torch.rand(16, 15, generator=generator) < 0.95).long().cumprod(1).sum(1)
        online.observe(odds.features, accepted.clamp(max=2), torch.full((16,), 2))
        online.count_step()
    assert odds.likely.mean(0)[2:].min() > 0.9


@pytest.mark.parametrize("label", [0, K])
def test_labels_of_one_kind_move_the_model_little(label: int) -> None:
    """One Newton step of separable labels without ridge and damping would go anywhere."""
    model = AcceptanceModel.first(K)
    features, _, verified = blocks(1, 1.0, torch.zeros(K, dtype=torch.float64))
    found = model.stepped(model.sums_of(features, torch.tensor([label]), verified))
    assert abs(float(found.weight) - 1) < 0.25
    assert found.biases.abs().max() < 0.1


def test_the_feature_is_the_logit_of_the_confidence() -> None:
    confidences = torch.linspace(0.01, 0.99, 12).view(3, 4)
    expected = torch.logit(confidences.double())
    torch.testing.assert_close(features_of(confidences), expected, rtol=1e-6, atol=1e-6)
    odd = torch.tensor([[1.0, 0.0, math.nan]])
    assert features_of(odd).tolist() == [[LARGEST_FEATURE, -LARGEST_FEATURE, 0]]
