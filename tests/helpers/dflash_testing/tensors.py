"""What the tests of the kernels share: dtypes, tolerances, random pages."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dflash_kernels.block_attention import Softmax

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
"""Triton's interpreter computes garbage from bfloat16 and says nothing, so that dtype is a GPU's business."""

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest relative error of a row, against the reference in float64."""

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def assert_rows_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Every row (last axis) within the tolerance of its dtype, by norm; NaN never passes."""
    assert out.dtype == dtype
    assert out.shape == expected.shape
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)
    assert bool((error <= TOLERANCES[dtype]).all()), f"relative error {error.max().item():.2e}"


def assert_mostly_equal(out: Tensor, expected: Tensor) -> None:
    """The same roundings in the same places: only an accident of summing may tip an element over."""
    share = (out == expected).double().mean().item()
    assert share > 0.97, f"{share:.1%} of elements equal"


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Fresh normal numbers, made on the CPU so that they are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def whole(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


SOFTMAXES = ["sinks", "cap", "wide cap", "both"]
"""Ways in which attention can differ from plain attention; see `random_softmax`."""


def random_softmax(kind: str, num_heads: int, dtype: torch.dtype = torch.float32) -> Softmax:
    """Sinks that weigh from as much as a key to more than all of them; caps that bend all scores, or hardly any."""
    sinks = (normal(num_heads, seed=9) + 2 * torch.arange(num_heads, device=DEVICE)).to(dtype)
    cap = {"cap": 0.7, "wide cap": 50.0, "both": 1.5}.get(kind)
    return Softmax(cap, sinks if kind in ("sinks", "both") else None)


@dataclass
class Pages:
    """Caches whose every slot outside the context is NaN, and the shuffled page table that leads to the rest."""

    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    context_lens: Tensor
    is_context: Tensor

    def clean(self) -> tuple[Tensor, Tensor]:
        """The caches in float64, with zeros for NaN, as a reference may read them."""
        hole = ~self.is_context[:, None, None]
        return self.key_cache.double().masked_fill(hole, 0), self.value_cache.double().masked_fill(hole, 0)


def random_pages(
    lens: list[int], num_kv: int, head_dim: int, page_size: int, dtype: torch.dtype, seed: int, spare_pages: int = 1
) -> Pages:
    """Context for each request, in pages of a shuffled order; page 0 belongs to nobody."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = -(-max(lens) // page_size) + spare_pages
    table = (torch.randperm(len(lens) * num_pages, generator=generator) + 1).view(len(lens), num_pages)
    num_slots = (len(lens) * num_pages + 1) * page_size
    is_context = torch.zeros(num_slots, dtype=torch.bool)
    for request, length in enumerate(lens):
        for position in range(length):
            is_context[int(table[request, position // page_size]) * page_size + position % page_size] = True
    keys, values = (
        torch.randn(num_slots, num_kv, head_dim, generator=generator).masked_fill(~is_context[:, None, None], torch.nan)
        for _ in range(2)
    )
    return Pages(
        keys.to(dtype).to(DEVICE),
        values.to(dtype).to(DEVICE),
        table.to(DEVICE),
        torch.tensor(lens, device=DEVICE),
        is_context.to(DEVICE),
    )
