"""Rejection sampling: the kernel equals the reference, and the reference follows the target's distribution."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from dflash_kernels.launch_config import VOCAB_TILE
from dflash_kernels.logits.uniform import DRAFT, TARGET
from dflash_kernels.suite import REFERENCE, triton_kernels
from dflash_testing.distributions import reject_probs, sample_probs_ref
from dflash_testing.tensors import DEVICE, normal, real, sampled, whole

Reject = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def reject(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    return reject_probs(triton_kernels(), *arguments)


def reject_ref(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    return reject_probs(REFERENCE, *arguments)


BOTH = [pytest.param(reject_ref, marks=pytest.mark.reference), pytest.param(reject, marks=pytest.mark.gpu)]
"""Tests of distributions need tens of thousands of requests, too many for the interpreter. There the kernel is compared
with the reference request by request."""

P0 = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05], dtype=torch.float64)
Q0 = torch.tensor([0.1, 0.3, 0.3, 0.0, 0.3], dtype=torch.float64)
P1 = torch.stack([P0.roll(i).roll(i // 2) for i in range(5)])
Q1 = torch.stack([Q0.roll(-i) for i in range(5)])
CHI_SQUARE = {4: 18.47, 19: 43.82, 24: 51.18}
"""0.999 quantiles, by degrees of freedom."""


def distributions(*shape: int, seed: int) -> Tensor:
    return (normal(*shape, seed=seed).double() * 2).softmax(-1)


LARGE = VOCAB_TILE + 7
DOUBLE, SINGLE = torch.float64, torch.float32


@pytest.mark.parametrize(
    ("dtype", "num_drafts", "vocab_size"),
    sampled(
        product((DOUBLE, SINGLE), (1, 3, 7), (3, 63, LARGE)),
        [*product((DOUBLE,), (1, 3, 7), (3, 63)), (DOUBLE, 1, LARGE), (SINGLE, 3, LARGE), (DOUBLE, 7, LARGE)],
    ),
)
def test_the_kernel_equals_the_reference(num_drafts: int, vocab_size: int, dtype: torch.dtype) -> None:
    num_requests = 30
    generator = torch.Generator().manual_seed(vocab_size)
    target = distributions(num_requests, num_drafts + 1, vocab_size, seed=1)
    draft = (target[:, :-1] + 0.3 * distributions(num_requests, num_drafts, vocab_size, seed=2)) / 1.3
    draft[::3] = target[::3, :-1]  # one third of the requests accepts all tokens
    target[1::3, :, ::2] = 0  # one third rejects early and has zeros in p
    ids = torch.randint(vocab_size, (num_requests, num_drafts), generator=generator).to(DEVICE)
    ids[-1, 0], ids[-2, -1] = -1, -1
    seeds = torch.randint(2**40, (num_requests,), generator=generator).to(DEVICE)
    positions = torch.randint(3000, (num_requests,), generator=generator).to(DEVICE)
    most = torch.randint(0, num_drafts + 2, (num_requests,), generator=generator).to(DEVICE)
    arguments = ids, target.to(dtype), draft.to(dtype), seeds, positions, most
    num_accepted, target_ids = reject(*arguments)
    expected, expected_ids = reject_ref(*arguments)
    assert torch.equal(num_accepted, expected)
    assert len(set(num_accepted.tolist())) > 1
    is_decided = torch.arange(num_drafts + 1, device=DEVICE) <= num_accepted[:, None]
    assert torch.equal(target_ids[is_decided], expected_ids[is_decided])
    for valid in (target_ids, expected_ids):
        assert bool(((valid >= 0) & (valid < vocab_size)).all())


def step(reject_block: Reject, first: Tensor, second: Tensor, first_q: Tensor, second_q: Tensor, seeds: Tensor,
         position: int, most: int = 2) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Draft two tokens, the second given the first, and verify them. `second` and `second_q` are [R, V given, V]."""
    places = torch.full_like(seeds, position)
    one = sample_probs_ref(first_q, seeds, places, DRAFT)
    request = torch.arange(len(seeds), device=DEVICE)
    two = sample_probs_ref(second_q[request, one], seeds, places + 1, DRAFT)
    target = torch.stack((first, second[request, one], second[request, two]), 1)
    draft = torch.stack((first_q, second_q[request, one]), 1)
    return reject_block(torch.stack((one, two), 1), target, draft, seeds, places, torch.full_like(seeds, most))


def chi_square(counts: Tensor, probs: Tensor) -> float:
    expected = probs.flatten() * counts.sum()
    assert bool((counts.flatten()[expected == 0] == 0).all())
    is_possible = expected > 0
    return float(((counts.flatten() - expected)[is_possible] ** 2 / expected[is_possible]).sum())


@pytest.mark.parametrize("reject_block", BOTH)
@pytest.mark.parametrize("most", [0, 1, 2])
def test_two_tokens_follow_the_targets_joint_distribution(reject_block: Reject, most: int) -> None:
    """Two committed tokens follow p(x) p(y | x) for any draft tokens and any limit."""
    num = 40_000
    seeds = torch.arange(num, device=DEVICE) * 7919
    p0, q0 = (row.to(DEVICE).expand(num, 5) for row in (P0, Q0))
    p1, q1 = (rows.to(DEVICE).expand(num, 5, 5) for rows in (P1, Q1))
    num_accepted, ids = step(reject_block, p0, p1, q0, q1, seeds, 10, most)
    request = torch.arange(num, device=DEVICE)
    first = ids[:, 0]
    # If the step commits one token, the next step gives the second, with the random numbers of the next position.
    given = p1[request, first]
    _, later = step(reject_block, given, p1, q1[request, first], q1, seeds, 11, most)
    second = torch.where(num_accepted > 0, ids[:, 1], later[:, 0])
    counts = torch.bincount(first * 5 + second, minlength=25).double().cpu()
    assert chi_square(counts.view(5, 5).sum(1), P0) < CHI_SQUARE[4]
    assert chi_square(counts, P0[:, None] * P1) < CHI_SQUARE[24]
    rate = (num_accepted > 0).double().mean().item()
    overlap = torch.minimum(P0, Q0).sum().item() if most else 0.0
    assert abs(rate - overlap) < 0.01


@pytest.mark.parametrize("reject_block", BOTH)
def test_draws_after_a_rejection_follow_the_residual(reject_block: Reject) -> None:
    """After a rejection, samples follow norm(max(p - q, 0)) for every draft token: the streams are independent."""
    num = 60_000
    seeds = torch.arange(num, device=DEVICE)
    p0, q0 = (row.to(DEVICE).expand(num, 5) for row in (P0, Q0))
    places = torch.full_like(seeds, 3)
    drafted = sample_probs_ref(q0, seeds, places, DRAFT)
    num_accepted, ids = reject_block(
        drafted[:, None], p0[:, None].expand(-1, 2, -1), q0[:, None], seeds, places, places
    )
    residual = (P0 - Q0).clamp(min=0)
    residual = residual / residual.sum()
    for token in range(5):
        drawn = ids[(num_accepted == 0) & (drafted == token), 0]
        if len(drawn):
            assert chi_square(torch.bincount(drawn, minlength=5).double().cpu(), residual) < CHI_SQUARE[4]
    bonus = ids[num_accepted == 1, 1]
    assert chi_square(torch.bincount(bonus, minlength=5).double().cpu(), P0) < CHI_SQUARE[4]


@pytest.mark.parametrize("reject_block", [pytest.param(reject_ref, marks=pytest.mark.reference), reject])
def test_a_limit_does_not_count_as_a_rejection(reject_block: Reject) -> None:
    """With a limit of 0 or without draft tokens, a step equals plain sampling, number for number."""
    num = 40
    seeds = torch.arange(num, device=DEVICE)
    positions = seeds * 3
    target, draft = distributions(num, 3, 9, seed=3), distributions(num, 2, 9, seed=4)
    plain = sample_probs_ref(target[:, 0], seeds, positions, TARGET)
    ids = torch.zeros((num, 2), dtype=torch.int64, device=DEVICE)
    for drafted, most in ((ids, 0), (ids - 1, 2)):
        num_accepted, out = reject_block(drafted, target, draft, seeds, positions, torch.full_like(seeds, most))
        assert not num_accepted.any()
        assert torch.equal(out[:, 0], plain)


@pytest.mark.parametrize("reject_block", [pytest.param(reject_ref, marks=pytest.mark.reference), reject])
def test_one_hot_distributions_are_greedy_verification(reject_block: Reject) -> None:
    drafts, targets = whole(1, 2, 3)[None], whole(1, 2, 4, 0)[None]
    p = torch.nn.functional.one_hot(targets, 5).double()
    q = torch.nn.functional.one_hot(drafts, 5).double()
    num_accepted, ids = reject_block(drafts, p, q, whole(5), whole(100), whole(3))
    assert num_accepted.tolist() == [2]
    assert ids[0, :3].tolist() == [1, 2, 4]


@pytest.mark.parametrize("reject_block", [pytest.param(reject_ref, marks=pytest.mark.reference), reject])
def test_an_empty_residual_gives_a_sample_of_the_target(reject_block: Reject) -> None:
    """p equals q, but the draft token has the probability 0: the residual p - q is empty."""
    p = torch.tensor([[[0.0, 0.6, 0.4]]], dtype=torch.float64, device=DEVICE).expand(20, 2, 3)
    seeds = torch.arange(20, device=DEVICE)
    num_accepted, ids = reject_block(seeds[:, None] * 0, p, p[:, :1], seeds, seeds, seeds * 0 + 1)
    assert not num_accepted.any()
    assert torch.equal(ids[:, 0], sample_probs_ref(p[:, 0], seeds, seeds, TARGET))


@pytest.mark.parametrize(
    ("draft_vocab", "dtype"),
    [
        (40, torch.float32),
        pytest.param(None, torch.float32, marks=pytest.mark.slow),
        pytest.param(40, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(None, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_the_kernel_equals_the_reference_on_logits(draft_vocab: int | None, dtype: torch.dtype) -> None:
    """Greedy, sampled and filtered requests with equal and different vocabularies. The draft is near the target."""
    num_requests, num_drafts, vocab_size = 12, 3, VOCAB_TILE + 7
    generator = torch.Generator().manual_seed(1)
    target_ids = torch.randperm(vocab_size, generator=generator)[: draft_vocab or vocab_size].sort().values.to(DEVICE)
    places = torch.full((vocab_size,), -1, device=DEVICE).index_copy(0, target_ids, whole(*range(len(target_ids))))
    p_logits = normal(num_requests * (num_drafts + 1), vocab_size) * 4
    p_logits[:, target_ids[:30]] += 14
    p_logits[:, (places < 0).nonzero()[:9, 0]] += 15  # likely target ids without a draft id
    near = p_logits.view(num_requests, -1, vocab_size)[:, :-1].flatten(0, 1)
    q_logits = (near + normal(len(near), vocab_size, seed=1))[:, target_ids].contiguous()
    q_logits[-18:, 0] += 12  # six requests that rarely accept their first draft token
    p_logits, q_logits = p_logits.to(dtype), q_logits.to(dtype)
    values = (
        real(*[(0.0, 0.8, 1.2)[i % 3] for i in range(num_requests)]),
        whole(*[(0, 6)[i // 3 % 2] for i in range(num_requests)]),
        real(*[(1.0, 0.9)[i // 6 % 2] for i in range(num_requests)]),
    )
    seeds = torch.arange(num_requests, device=DEVICE) * 7919
    positions = seeds + torch.arange(num_requests, device=DEVICE)
    rows = positions[:, None] + torch.arange(num_drafts + 1, device=DEVICE)
    seen = []
    for kernels in (REFERENCE, triton_kernels()):
        draft = kernels.sample(q_logits, *values, seeds, rows[:, :-1].flatten(), purpose=DRAFT)
        target = kernels.sample(p_logits, *values, seeds, rows.flatten())
        ids = target_ids[draft.token_ids].view(num_requests, num_drafts)
        sampled = target.token_ids.view(num_requests, -1)
        num_accepted, out = kernels.reject(
            ids, sampled, target.distribution, draft.distribution, None if draft_vocab is None else places,
            seeds, positions, torch.full_like(seeds, num_drafts),
        )  # fmt: skip
        is_decided = torch.arange(num_drafts + 1, device=DEVICE) <= num_accepted[:, None]
        seen.append((ids, num_accepted, torch.where(is_decided, out, -1)))
    for ours, expected in zip(*seen, strict=True):
        assert torch.equal(ours, expected)
    assert len(set(seen[0][1].tolist())) >= num_drafts
