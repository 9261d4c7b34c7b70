"""Sampling from logits: kernels equal the references token for token, and rows do not depend on their batch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.launch import jit, tl
from dflash_kernels.launch_config import VOCAB_TILE
from dflash_kernels.logits import sampling
from dflash_kernels.logits.sampling import filtered_probs_ref
from dflash_kernels.logits.uniform import ACCEPT, DRAFT, RESIDUAL, TARGET, stream, uniform_ref, uniform_tile
from dflash_kernels.suite import triton_kernels
from dflash_testing.distributions import draw_probs, filtered_probs, sample_probs_ref
from dflash_testing.tensors import DEVICE, DTYPES, normal, real, whole

VOCABS = [1, 63, VOCAB_TILE + 1, 2 * VOCAB_TILE + 15]
Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def sample(*rows: Tensor, **options: Any) -> Tensor:
    return sampling.sample(*rows, **options).token_ids


def sample_ref(*rows: Tensor, **options: Any) -> Tensor:
    return sampling.sample_ref(*rows, **options).token_ids


def sample_probs(probs: Tensor, *rows: Any) -> Tensor:
    return draw_probs(triton_kernels(), probs, *rows).token_ids


def mixed(num_rows: int, seed: int = 0) -> Rows:
    """Return temperatures (some 0), top_ks, top_ps, seeds and positions, with all mixtures of filters in one batch."""
    generator = torch.Generator().manual_seed(seed)

    def choose(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), (num_rows,), generator=generator)]

    return (
        choose(0.0, 0.3, 1.0, 2.5).to(DEVICE),
        choose(0, 1, 5, 20, 10**6).long().to(DEVICE),
        choose(1.0, 0.9, 0.5, 1e-9).to(DEVICE),
        torch.randint(-(2**62), 2**62, (num_rows,), generator=generator).to(DEVICE),
        torch.randint(0, 5000, (num_rows,), generator=generator).to(DEVICE),
    )


@jit  # type: ignore[untyped-decorator]
def uniform_kernel(seeds, positions, out, salt, num_rows, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Run `uniform_tile` alone. The kernels of the package call it inside other kernels."""
    row = tl.arange(0, TILE)
    seed = tl.load(seeds + row, mask=row < num_rows, other=0)
    position = tl.load(positions + row, mask=row < num_rows, other=0)
    tl.store(out + row, uniform_tile(seed, position, salt), mask=row < num_rows)


def uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    out = torch.empty(len(seeds), dtype=torch.float64, device=DEVICE)
    uniform_kernel[(1,)](seeds, positions, out, stream(purpose), len(seeds), TILE=2048)
    return out


def test_random_numbers_equal_the_references() -> None:
    *_, seeds, positions = mixed(1500)
    seen = [uniform(seeds, positions, purpose) for purpose in (TARGET, DRAFT, ACCEPT, RESIDUAL)]
    for purpose, numbers in zip((TARGET, DRAFT, ACCEPT, RESIDUAL), seen, strict=True):
        assert torch.equal(numbers, uniform_ref(seeds, positions, purpose))
    correlations = torch.corrcoef(torch.stack(seen)) - torch.eye(4, device=DEVICE)
    assert correlations.abs().max() < 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_tokens_equal_the_references(vocab_size: int, dtype: torch.dtype) -> None:
    logits = normal(6, vocab_size, dtype=dtype) * 3
    rows = mixed(6)
    expected = sample_ref(logits, *rows)
    assert torch.equal(sample(logits, *rows), expected)
    unfiltered = rows[0], rows[1] * 0, rows[2] * 0 + 1, *rows[3:]
    assert torch.equal(sample(logits, *unfiltered, has_filters=False), sample_ref(logits, *unfiltered))
    assert torch.equal(
        sample(logits, *unfiltered, has_filters=False, purpose=DRAFT), sample_ref(logits, *unfiltered, purpose=DRAFT)
    )
    greedy = rows[0] * 0, *rows[1:]
    assert torch.equal(sample(logits, *greedy, is_greedy=True), logits.argmax(-1))
    assert torch.equal(sample(logits, *greedy, has_filters=False), logits.argmax(-1))


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("has_filters", [True, False])
def test_distributions_equal_the_references(vocab_size: int, has_filters: bool) -> None:
    logits = normal(5, vocab_size) * 3
    rows = mixed(5, seed=1)[:3]
    probs = filtered_probs(logits, *rows, has_filters=has_filters)
    assert probs.dtype == torch.float64
    torch.testing.assert_close(
        probs, filtered_probs_ref(logits, *rows, has_filters=has_filters), atol=1e-14, rtol=1e-11
    )
    assert torch.equal(filtered_probs(logits, *rows, is_greedy=True), filtered_probs_ref(logits, *rows, is_greedy=True))


def test_equal_logits_prefer_the_lowest_ids() -> None:
    """Ties are common in bfloat16, and 0.0 equals -0.0."""
    logits = torch.full((3, VOCAB_TILE + 9), -9.0, device=DEVICE)
    logits[0, [3, 8, VOCAB_TILE + 1]] = 2.0
    logits[1, [VOCAB_TILE - 1, VOCAB_TILE]] = 2.0
    logits[2, 5], logits[2, 6] = 0.0, -0.0
    ones, zeros = real(1, 1, 1), whole(0, 0, 0)
    for choose in (sample, sample_ref):
        assert choose(logits, ones * 0, zeros, ones, zeros, zeros).tolist() == [3, VOCAB_TILE - 1, 5]
    for probs in (filtered_probs, filtered_probs_ref):
        two = probs(logits, ones, zeros + 2, ones)
        assert two[0].nonzero()[:, 0].tolist() == [3, 8]
        assert two[2].nonzero()[:, 0].tolist() == [5, 6]
        assert probs(logits, ones, zeros + 2, ones * 0.4)[0].nonzero()[:, 0].tolist() == [3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_p", [1.0, 0.7, 0.2])
def test_ties_at_the_edge_of_a_cut(top_p: float, dtype: torch.dtype) -> None:
    """Few distinct values of both signs in several tiles: each cut has equal logits on both sides."""
    logits = (normal(4, VOCAB_TILE + 3000) * 2).round().div(4).to(dtype)
    rows = real(*[1.0] * 4), whole(0, 50, 500, 4000), real(*[top_p] * 4)
    probs, expected = filtered_probs(logits, *rows), filtered_probs_ref(logits, *rows)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, atol=1e-14, rtol=1e-11)


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-310, 9.9e-6])
def test_temperatures_below_the_floor_are_greedy(temperature: float) -> None:
    logits = normal(3, 2 * VOCAB_TILE) * 3
    rows = real(*[temperature] * 3), whole(0, 9, 0), real(1, 1, 0.5), whole(1, 2, 3), whole(0, 0, 0)
    for draw in (sample, sample_ref):
        assert draw(logits, *rows).tolist() == logits.argmax(-1).tolist()
        assert draw(logits, rows[0], rows[1] * 0, rows[2] * 0 + 1, *rows[3:], has_filters=False).tolist() == (
            logits.argmax(-1).tolist()
        )


@pytest.mark.parametrize("temperature", [1e-5, 0.3, 1.0])
def test_rows_that_are_not_finite_give_ids_of_the_vocabulary(temperature: float) -> None:
    """An id after the vocabulary would not be a row of the embedding."""
    logits = normal(5, 300)
    logits[0], logits[1, 7], logits[2], logits[3, 5] = torch.nan, torch.inf, float("-inf"), torch.nan
    rows = real(*[temperature] * 5), whole(*[0] * 5), real(*[1] * 5), whole(*range(5)), whole(*[0] * 5)
    expected = sample_ref(logits[4:], *(row[4:] for row in rows), has_filters=False)
    for draw in (sample, sample_ref):
        ids = draw(logits, *rows, has_filters=False)
        assert bool(((ids >= 0) & (ids < 300)).all())
        assert ids[4] == expected[0]
    assert sample(logits, *rows, has_filters=False)[1] == 7
    for probs in (torch.full((2, 300), torch.nan, dtype=torch.float64), torch.zeros((2, 300), dtype=torch.float64)):
        for pick in (sample_probs, sample_probs_ref):
            ids = pick(probs.to(DEVICE), whole(1, 2), whole(3, 4))
            assert bool(((ids >= 0) & (ids < 300)).all())


@pytest.mark.gpu
def test_more_rows_than_a_grids_second_axis_has() -> None:
    """About 4,096 requests with 16 rows each."""
    num_rows = 66_000
    logits = normal(num_rows, 40)
    rows = mixed(num_rows)
    assert torch.equal(sample(logits, *rows), sample_ref(logits, *rows))


def test_masked_and_broken_logits_give_valid_ids() -> None:
    logits = torch.full((4, 2 * VOCAB_TILE), float("-inf"), device=DEVICE)
    logits[0, VOCAB_TILE + 5] = 0.0
    logits[1, :] = torch.nan
    logits[3, 7], logits[3, VOCAB_TILE + 7] = 1.0, torch.nan
    rows = real(1, 1, 1, 1), whole(0, 0, 0, 0), real(1, 1, 1, 1), whole(1, 2, 3, 4), whole(0, 0, 0, 0)
    for temperature in (0.0, 1.0):
        ids = sample(logits, rows[0] * temperature, *rows[1:], has_filters=False)
        assert ids[0] == VOCAB_TILE + 5
        assert ids[3] == 7
        assert bool(((ids >= 0) & (ids < 2 * VOCAB_TILE)).all())


@pytest.mark.parametrize("has_filters", [True, False])
def test_a_row_does_not_depend_on_its_batch(has_filters: bool) -> None:
    logits = normal(6, 3000) * 2
    temperatures, _, _, seeds, positions = mixed(6, seed=2)
    temperatures[0] = 1.0
    top_ks, top_ps = whole(0, 5, 0, 0, 9, 0), real(1, 1, 0.5, 1, 0.9, 1)
    if not has_filters:
        top_ks, top_ps = top_ks * 0, top_ps * 0 + 1
    rows = temperatures, top_ks, top_ps
    probs = filtered_probs(logits, *rows, has_filters=has_filters)
    for i in (0, 3):  # rows without filters
        alone = filtered_probs(logits[i : i + 1], *(row[i : i + 1] for row in rows), has_filters=False)
        assert torch.equal(probs[i], alone[0])
    tokens = sample(logits, *rows, seeds, positions, has_filters=has_filters)
    for i in range(6):
        one = (row[i : i + 1].contiguous() for row in (*rows, seeds, positions))
        assert sample(logits[i : i + 1], *one, has_filters=has_filters)[0] == tokens[i]


@pytest.mark.parametrize("choose", [filtered_probs, pytest.param(filtered_probs_ref, marks=pytest.mark.reference)])
def test_rows_without_filters_are_not_renormalised_for_their_neighbours(choose: Callable[..., Tensor]) -> None:
    logits, ones = normal(40, 3000) * 2, torch.ones(40, dtype=torch.float64, device=DEVICE)
    top_ks = (torch.arange(40, device=DEVICE) == 0).long()
    together = choose(logits, ones, top_ks, ones)
    assert torch.equal(together[1:], choose(logits, ones, top_ks * 0, ones, has_filters=False)[1:])


@pytest.mark.parametrize("vocab_size", VOCABS)
def test_samples_of_given_distributions_equal_the_references(vocab_size: int) -> None:
    *_, seeds, positions = mixed(30)
    probs = normal(30, vocab_size).double().abs().pow(8)
    probs[:, 1::3] = 0
    assert torch.equal(
        sample_probs(probs, seeds, positions, RESIDUAL), sample_probs_ref(probs, seeds, positions, RESIDUAL)
    )
    assert bool((probs.gather(1, sample_probs(probs, seeds, positions)[:, None]) > 0).all())


def test_logits_in_float64_are_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        sample(normal(2, 9).double(), *mixed(2))
