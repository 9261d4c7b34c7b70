"""The choice of experts equals torch's."""

import pytest
import torch
from torch import Tensor

from dflash_kernels.mixtures.expert_choice import choose_experts, choose_experts_ref
from dflash_kernels.products.product import product_parts
from dflash_testing.tensors import DEVICE, DTYPES, assert_mostly_equal, assert_rows_close, normal, small_integers

DTYPE = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16
"""The kernels are made for bfloat16, which the interpreter cannot multiply."""


def distinct_logits(num_rows: int, num_experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows and a router with exact products. The logits of a row are different adjacent bfloat16 numbers."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randperm(num_experts, generator=generator) for _ in range(num_rows)]
    router = (torch.stack(columns, 1) + 0x3F80).to(torch.int16).view(torch.bfloat16)
    return torch.eye(num_rows).to(DEVICE, DTYPE), router.to(DEVICE, DTYPE)


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "num_chosen"), [(1, 8, 2), (5, 11, 3), (3, 4, 4), (1, 3, 1), (40, 128, 8), (2, 600, 10)]
)
def test_the_choice_equals_the_reference(num_rows: int, num_experts: int, num_chosen: int, is_normalised: bool) -> None:
    hidden, router = distinct_logits(num_rows, num_experts)
    chosen, scores = choose_experts(hidden, router, num_chosen, is_normalised)
    wanted = choose_experts_ref(hidden, router, num_chosen, is_normalised)
    assert torch.equal(chosen, wanted[0])
    assert_rows_close(scores, wanted[1].double(), DTYPE)
    if DEVICE.type == "cuda":
        assert_mostly_equal(scores, wanted[1])


@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen", "num_shared"), [(1, 8, 2, 1), (5, 11, 3, 3)])
def test_shared_experts_come_last_and_have_the_score_of_their_gate(
    num_rows: int, num_experts: int, num_chosen: int, num_shared: int
) -> None:
    hidden, router = distinct_logits(num_rows, num_experts)
    gate = torch.linspace(-3, 3, num_rows, device=DEVICE).to(DTYPE)
    with_gate = torch.cat((router, gate[None]))
    chosen, scores = choose_experts(hidden, with_gate, num_chosen, True, num_shared)
    own_chosen, own_scores = choose_experts(hidden, router, num_chosen, True)
    assert torch.equal(chosen[:, :num_chosen], own_chosen)
    assert torch.equal(scores[:, :num_chosen], own_scores)
    last = torch.arange(num_experts, num_experts + num_shared, device=DEVICE)
    assert torch.equal(chosen[:, num_chosen:], last.expand(num_rows, -1))
    assert_rows_close(scores[:, num_chosen:], gate.double().sigmoid()[:, None].expand(-1, num_shared), DTYPE)
    wanted = choose_experts_ref(hidden, with_gate, num_chosen, True, num_shared)
    assert torch.equal(chosen, wanted[0])
    assert_rows_close(scores, wanted[1].double(), DTYPE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_rounded_to_the_models_dtype(dtype: torch.dtype) -> None:
    """The second logit is larger by 2 ** -12. 16 bits round this away, although the parts of the sum are float32."""
    hidden = torch.tensor([[1, 2**-6, *[0] * 2046]], dtype=dtype, device=DEVICE)
    router = torch.zeros(3, 2048, dtype=dtype, device=DEVICE)
    router[:2, 0], router[1, 1] = 1, 2**-6
    assert len(product_parts(hidden, router)) > 1 or dtype == torch.float32
    chosen, scores = choose_experts(hidden, router, 2, True)
    assert chosen.tolist() == ([[1, 0]] if dtype == torch.float32 else [[0, 1]])
    assert scores.dtype == dtype


def test_equal_logits_choose_the_lowest_ids_first() -> None:
    """Products of small integers are exact in any order of summation, so equal router rows give equal logits."""
    hidden, router = small_integers(3, 64, dtype=DTYPE), small_integers(4, 64, dtype=DTYPE, seed=1)
    router = router[[3, 0, 0, 2, 1, 0, 1, 3, 2, 3, 1, 0]]
    logits = hidden.double() @ router.double().T
    by_id = logits.sort(dim=1, descending=True, stable=True).indices
    for num_chosen in (1, 5, 12):
        assert torch.equal(choose_experts(hidden, router, num_chosen, True)[0], by_id[:, :num_chosen])
        assert torch.equal(choose_experts(hidden[:1], router, num_chosen, True)[0], by_id[:1, :num_chosen])
    chosen, scores = choose_experts(hidden, router * 0, 5, True)
    assert chosen.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert_rows_close(scores, torch.full_like(scores, 0.2).double(), DTYPE)


def test_experts_with_a_score_of_zero_are_chosen_by_lowest_id() -> None:
    """Real experts with a probability of zero come before the padding of a tile."""
    hidden, router = (tensor.clone() for tensor in distinct_logits(1, 5))
    router[:, 0] = torch.tensor([-3000.0, -2000.0, 0.0, -4000.0, -3000.0])
    chosen, scores = choose_experts(hidden, router, 4, False)
    assert chosen.tolist() == [[2, 0, 1, 3]]
    assert scores.tolist() == [[1, 0, 0, 0]]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf])
def test_a_row_that_is_not_finite_chooses_existing_experts(value: float) -> None:
    hidden, router = normal(3, 64, dtype=DTYPE), normal(6, 64, dtype=DTYPE, seed=1)
    clean = choose_experts(hidden, router, 3, True)
    hidden[1, 5] = value
    chosen, scores = choose_experts(hidden, router, 3, True)
    assert sorted(set(chosen[1].tolist()) & set(range(6))) == sorted(chosen[1].tolist())
    assert scores[1].isnan().all()
    for found, wanted in zip((chosen, scores), clean, strict=True):
        assert torch.equal(found[[0, 2]], wanted[[0, 2]])


def test_more_chosen_than_existing_experts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^num_chosen: "):
        choose_experts(normal(3, 16), normal(4, 16), 5, True)
