"""What the tests of the kernels share: dtypes, tolerances, random pages."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
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


def small_integers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return random numbers out of -1, 0 and 1: dot products are exact whatever the order of summation.

    Random reals have no such guarantee. A matrix product of the CPU may sum two equal rows in different orders,
    by their position in the matrix, and round them differently.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(DEVICE, dtype)


def whole(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


SOFTMAXES = ["sinks", "cap", "wide cap", "both"]
"""Ways in which attention can differ from plain attention; see `random_softmax`."""


def random_softmax(
    kind: str, num_heads: int, dtype: torch.dtype = torch.float32, device: torch.device = DEVICE
) -> Softmax:
    """Return sinks that weigh as much as one key or more than all keys, or a cap that bends all scores or few."""
    sinks = (normal(num_heads, seed=9).to(device) + 2 * torch.arange(num_heads, device=device)).to(dtype)
    cap = {"cap": 0.7, "wide cap": 50.0, "both": 1.5}.get(kind)
    return Softmax(cap, sinks if kind in ("sinks", "both") else None)


def between_layers(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same caches [..., P, page_size, KV, D], as views of pages of NaN that hold more layers, and wider rows."""
    *layers, num_pages, page_size, num_kv, head_dim = keys.shape
    pages = keys.new_full((num_pages, math.prod(layers) + 2, 2, page_size, num_kv * head_dim + 16), torch.nan)
    views = pages[:, 1:-1, :, :, :-16].permute(2, 1, 0, 3, 4).unflatten(4, (num_kv, head_dim))
    views = views if layers else views[:, 0]
    views.copy_(torch.stack((keys, values)))
    return views[0], views[1]


def far_apart(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same caches [P, page_size, KV, D], the last page 2**31 numbers from the first; most is never touched."""
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
"""Ways in which caches may lie; kernels are told by strides alone."""


@dataclass
class Pages:
    """Caches whose every slot outside the context is NaN, and the shuffled page table that leads to the rest."""

    key_cache: Tensor
    value_cache: Tensor
    page_table: Tensor
    context_lens: Tensor
    is_context: Tensor

    def clean(self) -> tuple[Tensor, Tensor]:
        """Copies of the caches in float64, contiguous, with zeros for NaN, as a reference may read them."""
        hole = ~self.is_context[:, :, None, None]
        caches = (cache.contiguous().double() for cache in (self.key_cache, self.value_cache))
        keys, values = (cache.masked_fill(hole, 0) for cache in caches)
        return keys, values


def random_pages(
    lens: list[int], num_kv: int, head_dim: int, page_size: int, dtype: torch.dtype, seed: int, spare_pages: int = 1,
    arrangement: str = "between layers",
) -> Pages:  # fmt: skip
    """Context for each request, in pages of a shuffled order; page 0 belongs to nobody."""
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
