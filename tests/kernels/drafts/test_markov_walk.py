"""The walk with a Markov bias equals its definition, with ties, a scale and a reduced vocabulary."""

from typing import Any

import pytest
import torch

from dflash_kernels.drafts.markov_walk import markov_walk, markov_walk_ref
from dflash_testing.tensors import DEVICE, normal


def inputs(
    requests: int, positions: int, rank: int, vocab: int = 150, own: int = 150, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randperm(vocab, generator=generator)[:own].to(DEVICE) if own < vocab else None
    return {
        "logits": normal(requests, positions, own, dtype=dtype),
        "before": normal(vocab, rank, dtype=dtype, seed=1),
        "after": normal(own, rank, dtype=dtype, seed=2),
        "anchors": torch.arange(requests, device=DEVICE) * 7 % vocab,
        "target_ids": ids,
    }


@pytest.mark.reference
def test_each_choice_reads_the_token_before() -> None:
    given = inputs(1, 3, 4, own=90)
    found, before = markov_walk_ref(**given, scale=0.5), int(given["anchors"][0])
    for position in range(3):
        scores = given["logits"][0, position] + 0.5 * given["after"] @ given["before"][before]
        assert int(found[0, position]) == int(scores.argmax())
        before = int(given["target_ids"][found[0, position]])


@pytest.mark.parametrize(
    ("requests", "positions", "rank", "own"), [(1, 1, 1, 150), (3, 5, 24, 150), (2, 4, 256, 90), (18, 2, 8, 150)]
)
def test_the_kernel_equals_the_reference(requests: int, positions: int, rank: int, own: int) -> None:
    given = inputs(requests, positions, rank, own=own)
    for scale in (1.0, 0.25):
        assert torch.equal(markov_walk(**given, scale=scale), markov_walk_ref(**given, scale=scale))
    given["logits"] = normal(positions, requests, own, seed=3).transpose(0, 1)
    assert torch.equal(markov_walk(**given), markov_walk_ref(**given))


@pytest.mark.parametrize("walk", [pytest.param(markov_walk_ref, marks=pytest.mark.reference), markov_walk])
def test_of_equal_scores_the_lowest_id_is_chosen(walk: Any) -> None:
    given = inputs(2, 3, 4)
    given["after"].zero_()
    given["logits"].fill_(-1.0)[..., 70::3] = 2.0
    assert walk(**given).tolist() == [[70] * 3] * 2
    given["logits"].fill_(-torch.inf)
    assert walk(**given).tolist() == [[0] * 3] * 2


def test_nan_is_never_chosen() -> None:
    given = inputs(2, 2, 4)
    given["logits"][..., ::2] = torch.nan
    assert bool((markov_walk(**given) % 2 == 1).all())
    given["logits"].fill_(torch.nan)
    assert bool((markov_walk(**given) < 150).all())


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 8, 32])
def test_in_bfloat16_at_the_size_of_a_real_vocabulary(requests: int) -> None:
    """Few choices may differ: sums have another order before they are rounded."""
    given = inputs(requests, 15, 256, vocab=151936, own=151936, dtype=torch.bfloat16)
    found, wanted = markov_walk(**given, scale=0.25), markov_walk_ref(**given, scale=0.25)
    # After one other choice, the rest of a request differs.
    is_same = (found == wanted).long().cumprod(-1)
    assert is_same.double().mean().item() > 0.8
