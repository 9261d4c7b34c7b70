"""Convert between distributions as tensors of probabilities and the forms that the sampling kernels use."""

import torch
from torch import Tensor

from dflash_kernels.logits.candidates import KEY_BITS
from dflash_kernels.logits.categorical import categorical_ref
from dflash_kernels.logits.sampling import Chosen, Distribution
from dflash_kernels.logits.temperature import MIN_TEMPERATURE
from dflash_kernels.logits.uniform import TARGET, uniform_ref
from dflash_kernels.suite import Kernels, triton_kernels


def sample_probs_ref(probs: Tensor, seeds: Tensor, positions: Tensor, purpose: int = TARGET) -> Tensor:
    """Sample tokens [T] from distributions [T, V] with the random numbers of these positions."""
    return categorical_ref(probs, uniform_ref(seeds, positions, purpose))


def draw_probs(kernels: Kernels, probs: Tensor, seeds: Tensor, positions: Tensor, purpose: int = TARGET) -> Chosen:
    """Sample from distributions [T, V] through the kernels, as logits. `seeds` [R] has one seed per T / R rows."""
    ones, zeros = torch.ones(len(seeds), dtype=torch.float64, device=probs.device), torch.zeros_like(seeds)
    return kernels.sample(
        probs.log().float(), ones, zeros, ones, seeds, positions, has_filters=False, purpose=purpose
    )  # fmt: skip


def given(kernels: Kernels, probs: Tensor, num_requests: int) -> Distribution | Tensor:
    """Distributions [T, V] in the form that the `reject` of these kernels takes."""
    logits = probs.log().float()
    if kernels.name == "reference":
        return logits.double().softmax(-1)
    highest = logits.amax(-1)
    keys = torch.full((len(logits),), -(2**31), dtype=torch.int32, device=probs.device)
    masses = (logits.double() - highest[:, None].double()).exp().sum(-1)
    ones = torch.ones(num_requests, dtype=torch.float64, device=probs.device)
    return Distribution(logits, ones, highest, keys, torch.full_like(keys, logits.shape[1]), masses)


def reject_probs(
    kernels: Kernels, draft_ids: Tensor, p: Tensor, q: Tensor, seeds: Tensor, positions: Tensor, most: Tensor
) -> tuple[Tensor, Tensor]:
    """Run rejection sampling with target distributions p [R, N, V] and draft distributions q [R, K, V]."""
    num_requests, num_rows, _ = p.shape
    target, draft = (given(kernels, probs.flatten(0, 1), num_requests) for probs in (p, q))
    row_positions = positions[:, None] + torch.arange(num_rows, device=p.device)
    sampled = sample_probs_ref(p.flatten(0, 1), seeds.repeat_interleave(num_rows), row_positions.flatten())
    return kernels.reject(draft_ids, sampled.view(row_positions.shape), target, draft, None, seeds, positions, most)


def filtered_probs(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, *, is_greedy: bool = False,
    has_filters: bool = True,
) -> Tensor:  # fmt: skip
    """The distributions that the kernels sample from, [T, V] float64."""
    seeds, positions = torch.zeros_like(top_ks), torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    rows = temperatures, top_ks, top_ps, seeds, positions
    chosen = triton_kernels().sample(logits, *rows, is_greedy=is_greedy, has_filters=has_filters)
    if is_greedy:
        return torch.nn.functional.one_hot(chosen.token_ids, logits.shape[1]).double()
    assert isinstance(chosen.distribution, Distribution)
    return written(chosen.distribution)


def written(distribution: Distribution) -> Tensor:
    """The probabilities of a `Distribution`, [T, V] float64."""
    logits, temperatures, max_scores, keys, last_ids, masses = distribution
    scores = logits.float()
    scores = torch.where(scores.isnan(), float("-inf"), scores).clamp(max=torch.finfo(torch.float32).max)
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)
    token_keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - KEY_BITS[logits.dtype])
    token = torch.arange(logits.shape[1], device=logits.device)
    is_last = (token_keys == keys[:, None]) & (token <= last_ids[:, None])
    is_kept = ((token_keys > keys[:, None]) | is_last) & (scores > float("-inf"))
    steepness = torch.where(temperatures >= MIN_TEMPERATURE, temperatures, 1.0)
    steepness = steepness.repeat_interleave(len(logits) // len(temperatures))[:, None]
    weights = ((scores.double() - max_scores[:, None].double()) / steepness).exp()
    return torch.where(is_kept, weights, 0.0) / masses[:, None]
