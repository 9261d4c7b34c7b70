"""The walk over candidates equals its definition, greedy and sampled."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_kernels.drafts.candidate_walk import Codebooks, WalkDraws, candidate_walk, candidate_walk_ref
from dflash_kernels.logits.temperature import MIN_TEMPERATURE
from dflash_testing.tensors import DEVICE, normal


def inputs(
    requests: int,
    positions: int,
    num: int,
    rank: int,
    vocab: int = 61,
    dtype: torch.dtype = torch.float32,
    parts: int = 1,
) -> dict[str, Any]:
    order = torch.stack([torch.randperm(vocab, generator=torch.Generator().manual_seed(n))
                         for n in range(requests * positions)])  # fmt: skip
    candidates = order[:, :num].sort(-1).values.view(requests, positions, num).to(DEVICE)
    return {
        "logits": normal(requests, positions, num, dtype=dtype),
        "candidates": candidates,
        "hidden": normal(parts, requests * positions, rank, dtype=dtype, seed=1),
        "codebooks": Codebooks(normal(vocab, rank, dtype=dtype, seed=2), normal(vocab, rank, dtype=dtype, seed=3)),
        "anchors": torch.arange(requests, device=DEVICE) * 7 % vocab,
    }


def draws(requests: int, positions: int, *temperatures: float) -> WalkDraws:
    first = torch.arange(requests, device=DEVICE)[:, None] * 100
    return WalkDraws(
        torch.tensor(temperatures, dtype=torch.float64, device=DEVICE),
        torch.arange(requests, device=DEVICE) + 5,
        first + torch.arange(positions, device=DEVICE),
    )


@pytest.mark.reference
def test_the_walk_is_the_best_path_choice_by_choice() -> None:
    given = inputs(1, 3, 4, 5)
    walk = candidate_walk_ref(**given)
    before = int(given["anchors"][0])
    for position in range(3):
        ids = given["candidates"][0, position].tolist()
        left = given["codebooks"].predecessors[before] * given["hidden"][0, position]
        scores = [
            float(given["logits"][0, position, n] + left @ given["codebooks"].successors[ids[n]]) for n in range(4)
        ]
        torch.testing.assert_close(walk.scores[0, position].tolist(), scores)
        before = ids[scores.index(max(scores))]
        assert int(walk.token_ids[0, position]) == before


@pytest.mark.parametrize(("requests", "positions", "num", "rank"), [(1, 1, 1, 1), (3, 7, 16, 33), (2, 4, 5, 256)])
def test_the_kernel_equals_the_reference(requests: int, positions: int, num: int, rank: int) -> None:
    given = inputs(requests, positions, num, rank, parts=requests)
    for how in (None, draws(requests, positions, *(0.0, 0.7, 2.0)[:requests])):
        check(given, how)


def check(given: dict[str, Any], how: WalkDraws | None = None) -> None:
    found, wanted = candidate_walk(**given, draws=how), candidate_walk_ref(**given, draws=how)
    assert torch.equal(found.token_ids, wanted.token_ids)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-5, atol=1e-4)


def test_without_hidden_states_of_a_smaller_vocabulary() -> None:
    """As a Markov head among the best tokens of a draft with a reduced vocabulary."""
    given = inputs(3, 4, 5, 8)
    own = torch.randperm(200, generator=torch.Generator().manual_seed(1))[:61].to(DEVICE)
    books = Codebooks(normal(200, 8, seed=4), given["codebooks"].successors, 0.5, own)
    check(given | {"hidden": None, "codebooks": books, "anchors": given["anchors"] + 100})


@pytest.mark.gpu
def test_in_bfloat16() -> None:
    check(inputs(4, 15, 16, 256, vocab=5000, dtype=torch.bfloat16), draws(4, 15, 0.0, 0.7, 1.0, 2.0))


@pytest.mark.parametrize("walk", [pytest.param(candidate_walk_ref, marks=pytest.mark.reference), candidate_walk])
def test_of_equal_scores_the_lowest_id_is_chosen(walk: Any) -> None:
    given = inputs(2, 3, 5, 4)
    given |= {"logits": torch.zeros_like(given["logits"]), "hidden": torch.zeros_like(given["hidden"])}
    assert torch.equal(walk(**given).token_ids, given["candidates"][:, :, 0])


@pytest.mark.reference
def test_a_draw_does_not_depend_on_the_other_requests() -> None:
    given, how = inputs(3, 4, 6, 8), draws(3, 4, 0.9, 1.1, 0.5)
    together = candidate_walk_ref(**given, draws=how)
    alone = {name: value[1:2] for name, value in given.items() if name not in ("codebooks", "hidden")}
    alone |= {"codebooks": given["codebooks"], "hidden": given["hidden"][:, 4:8]}
    assert torch.equal(candidate_walk_ref(**alone, draws=WalkDraws(*(item[1:2] for item in how))).token_ids[0],
                       together.token_ids[1])  # fmt: skip


@pytest.mark.reference
def test_a_low_temperature_is_greedy() -> None:
    given = inputs(2, 4, 6, 8)
    cold = candidate_walk_ref(**given, draws=draws(2, 4, 0.0, MIN_TEMPERATURE / 2))
    assert torch.equal(cold.token_ids, candidate_walk_ref(**given).token_ids)


@pytest.mark.reference
def test_draws_follow_the_scores() -> None:
    given = inputs(1, 1, 3, 4)
    scores: Tensor = candidate_walk_ref(**given).scores[0, 0].double() / 0.8
    count = 4000
    books, hidden = given.pop("codebooks"), given.pop("hidden")
    many = {name: value.expand(count, *value.shape[1:]) for name, value in given.items()}
    many |= {"codebooks": books, "hidden": hidden.expand(1, count, -1)}
    seeds = torch.arange(count, device=DEVICE)
    how = WalkDraws(
        torch.full((count,), 0.8, dtype=torch.float64, device=DEVICE), seeds, torch.zeros_like(seeds)[:, None]
    )
    drawn = candidate_walk_ref(**many, draws=how).token_ids[:, 0]
    shares = torch.stack([(drawn == token).double().mean() for token in given["candidates"][0, 0]])
    probs = scores.softmax(-1)
    assert ((shares - probs).abs() < 4 * (probs * (1 - probs) / count).sqrt() + 1e-9).all()
