"""Shared parts of the kernel tests: dtypes, tolerances, random tensors and pages."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash_kernels.attention.softmax import Softmax

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
"""bfloat16 is tested on a GPU only: Triton's interpreter computes wrong numbers from it and reports no error."""

SAMPLED_DTYPES = [DTYPES[0], pytest.param(torch.float16, marks=pytest.mark.slow), DTYPES[2]]
"""For grids of many cases: float16 is slow. Tests of head sizes and page sizes run float16 by default."""

TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest relative error of a row, compared with the reference in float64."""

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def sampled(cases: Iterable[tuple[Any, ...]], default: Collection[tuple[Any, ...]]) -> list[Any]:
    """Return test parameters: `default` cases run by default, bfloat16 cases on a GPU, and all others are slow."""
    listed = list(cases)
    assert all(case in listed for case in default)

    def parameter(case: tuple[Any, ...]) -> Any:
        if torch.bfloat16 in case:
            return pytest.param(*case, marks=pytest.mark.gpu)
        return case if case in default else pytest.param(*case, marks=pytest.mark.slow)

    return [parameter(case) for case in listed]


def assert_rows_close(out: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Require that the relative error of each row (last axis), by norm, is within the dtype's tolerance.

    A row with NaN fails.
    """
    assert out.dtype == dtype
    assert out.shape == expected.shape
    error = (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)
    assert bool((error <= TOLERANCES[dtype]).all()), f"relative error {error.max().item():.2e}"


def assert_mostly_equal(out: Tensor, expected: Tensor) -> None:
    """Require that more than 97% of the elements are equal.

    The kernel rounds at the same steps as the reference. A different order of summation changes few elements.
    """
    share = (out == expected).double().mean().item()
    assert share > 0.97, f"{share:.1%} of elements equal"


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return random normal numbers. They come from the CPU, so they are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def small_integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return random numbers from -1, 0 and 1. Their dot products are exact in any order of summation.

    Real numbers do not have this property. A CPU library may sum two equal rows of a matrix in different orders,
    depending on their position in the matrix. It then rounds the two sums differently.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(DEVICE, dtype)


def whole(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


SOFTMAXES = ["sinks", "cap", "wide cap", "both"]
"""Variants of attention that differ from plain attention; see `random_softmax`."""


def random_softmax(
    kind: str, num_heads: int, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE
) -> Softmax:
    """Return sinks that weigh as much as one key or more than all keys, or a cap that bends all scores or few."""
    sinks = (normal(num_heads, seed=9).to(device) + 2 * torch.arange(num_heads, device=device)).to(dtype)
    cap = {"cap": 0.7, "wide cap": 50.0, "both": 1.5}.get(kind)
    return Softmax(cap, sinks if kind in ("sinks", "both") else None)


def between_layers(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of the caches [..., P, page_size, KV, D] as views of larger pages.

    The pages hold more layers and wider rows. Everything outside the copies is NaN.
    """
    *layers, num_pages, page_size, num_kv, head_dim = keys.shape
    pages = keys.new_full((num_pages, math.prod(layers) + 2, 2, page_size, num_kv * head_dim + 16), torch.nan)
    views = pages[:, 1:-1, :, :, :-16].permute(2, 1, 0, 3, 4).unflatten(4, (num_kv, head_dim))
    views = views if layers else views[:, 0]
    views.copy_(torch.stack((keys, values)))
    return views[0], views[1]


def far_apart(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return copies of the caches [P, page_size, KV, D] with the last page 2**31 numbers after the first.

    Memory between the pages is never touched.
    """
    size = keys[0].numel()
    stride = 2**31 // (len(keys) - 1) + 16
    shape = (len(keys), stride)
    if DEVICE.type == "cpu":
        memory = torch.from_numpy(np.zeros(math.prod(shape) * keys.itemsize, np.uint8)).view(keys.dtype).view(shape)
    else:
        memory = torch.empty(shape, dtype=keys.dtype, device=DEVICE)
    for index, cache in enumerate((keys, values)):
        memory[:, index * size : (index + 1) * size] = cache.flatten(1)
    views = memory[:, : 2 * size].unflatten(1, (2, *keys.shape[1:])).transpose(0, 1)
    return views[0], views[1]


ARRANGEMENTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "alone": lambda keys, values: (keys, values),
    "between layers": between_layers,
    "far apart": far_apart,
}
"""Memory layouts of caches. Kernels learn the layout from the strides only."""


@dataclass
class Pages:
    """Caches with a shuffled page table. Every slot outside the context is NaN."""

    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    context_lens: Tensor
    is_context: Tensor

    def clean(self) -> tuple[Tensor, Tensor]:
        """Return contiguous float64 copies of the caches with zeros instead of NaN, for a reference."""
        hole = ~self.is_context[:, :, None, None]
        caches = (cache.contiguous().double() for cache in (self.key_cache, self.value_cache))
        keys, values = (cache.masked_fill(hole, 0) for cache in caches)
        return keys, values


def random_pages(
    lens: list[int], num_kv: int, head_dim: int, page_size: int, dtype: torch.dtype, seed: int, spare_pages: int = 1,
    arrangement: str = "between layers",
) -> Pages:  # fmt: skip
    """Return a random context for each request, in shuffled pages. Page 0 belongs to no request."""
    generator = torch.Generator().manual_seed(seed)
    num_pages = -(-max(lens) // page_size) + spare_pages
    table = (torch.randperm(len(lens) * num_pages, generator=generator) + 1).view(len(lens), num_pages)
    is_context = torch.zeros(len(lens) * num_pages + 1, page_size, dtype=torch.bool)
    for request, length in enumerate(lens):
        for position in range(length):
            is_context[table[request, position // page_size], position % page_size] = True
    hole = ~is_context[:, :, None, None]
    keys, values = (
        torch.randn(*is_context.shape, num_kv, head_dim, generator=generator).masked_fill(hole, torch.nan)
        for _ in range(2)
    )
    return Pages(
        *ARRANGEMENTS[arrangement](keys.to(dtype).to(DEVICE), values.to(dtype).to(DEVICE)),
        table.to(DEVICE),
        torch.tensor(lens, device=DEVICE),
        is_context.to(DEVICE),
    )
