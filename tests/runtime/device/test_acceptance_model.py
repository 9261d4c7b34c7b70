"""The regression on a draft's confidence: its Newton steps, its labels, and its fit."""

import math

import pytest
import torch
from torch import Tensor

from dflash_kernels.draft_odds import LARGEST_FEATURE, features_of
from dflash_runtime.device.acceptance_model import DAMPING, RIDGE, AcceptanceModel

K = 5


def blocks(count: int, weight: float, biases: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Features [R, K] of blocks whose tokens are accepted by a known model, accepted counts, and verified counts."""
    generator = torch.Generator().manual_seed(seed)
    features = 2 * torch.randn(count, K, generator=generator, dtype=torch.float64)
    likely = torch.sigmoid(weight * features + biases)
    accepted = (torch.rand(count, K, generator=generator, dtype=torch.float64) < likely).long().cumprod(1).sum(1)
    return features, accepted, torch.full((count,), K)


def test_a_step_is_newtons_damped_step_of_the_penalised_likelihood() -> None:
    """The gradient and the Hessian come from autograd, over tokens gathered one by one."""
    features, accepted, verified = blocks(9, 0.7, torch.linspace(0.5, -0.5, K, dtype=torch.float64))
    verified[::3] = 2
    verified[1] = 0
    start = AcceptanceModel(torch.tensor(0.4, dtype=torch.float64), torch.linspace(-1, 1, K, dtype=torch.float64))

    tokens = torch.zeros(K)
    for row in range(len(features)):
        tokens[: min(int(accepted[row]) + 1, int(verified[row]))] += 1
    counts = torch.cat((tokens.sum()[None], tokens))

    def loss(values: Tensor) -> Tensor:
        total = RIDGE / 2 * ((values - torch.cat((start.weight[None], start.biases))) ** 2).sum()
        for row in range(len(features)):
            for place in range(min(int(accepted[row]) + 1, int(verified[row]))):
                score = values[0] * features[row, place] + values[1 + place]
                total = total - torch.nn.functional.logsigmoid(score if place < accepted[row] else -score)
        return total

    values = torch.cat((start.weight[None], start.biases))
    wanted = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(wanted), wanted)
    step = torch.linalg.solve(torch.autograd.functional.hessian(loss, values), gradient)
    expected = values - step * counts / (counts + DAMPING)
    found = start.stepped(start.sums_of(features, accepted, verified))
    torch.testing.assert_close(torch.cat((found.weight[None], found.biases)), expected)


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
