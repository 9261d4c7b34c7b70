"""Launch parameters: less shared memory means fewer pipeline stages, and nothing else changes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from dflash_kernels import launch_config
from dflash_kernels.attention import attention_config, ragged_config
from dflash_kernels.attention.attention_config import attention_shape, balanced_shape
from dflash_kernels.attention.ragged_config import LONG_CONTEXT, LONG_SHAPES, few_rows_shape, ragged_shape
from dflash_kernels.products.product_config import product_shape

pytestmark = pytest.mark.reference

HOPPER, AMPERE, ADA = 227 * 1024, 163 * 1024, 99 * 1024
DEVICE = torch.device("cpu")


def shapes() -> dict[str, tuple[Any, int, int]]:
    """Return shape, bytes per stage and other bytes of kernels, for 16-bit models with a head size of 128."""
    attention = attention_shape(256, 64, 128, 2, DEVICE)
    product, gated = (product_shape(32, 4096, 4096, 2, DEVICE, is_gated=is_gated) for is_gated in (False, True))
    head = product_shape(32, 151_936, 4096, 2, DEVICE)
    assert product is not None
    assert gated is not None
    assert head is not None
    ragged, few = ragged_shape(128, 2, 0, DEVICE), few_rows_shape(128, 2, DEVICE)
    return {
        "attention": (attention, 2 * attention.keys * 256, attention.rows * 256),
        "product": (product, (product.columns + product.rows) * product.depth * 2, 0),
        "gated": (gated, (2 * gated.columns + gated.rows) * gated.depth * 2, 0),
        "head": (head, (head.columns + head.rows) * head.depth * 2, 0),
        "ragged": (ragged, 2 * ragged.keys * 256, ragged.rows * 256),
        "few rows": (few, 2 * few.keys * 256, few.rows * 256),
    }


@pytest.mark.parametrize("num_bytes", [HOPPER, AMPERE, ADA])
def test_tiles_fit_in_shared_memory(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = shapes()
    monkeypatch.setattr(launch_config, "shared_memory", lambda device: num_bytes)
    for name, (shape, stage_bytes, kept_bytes) in shapes().items():
        assert kept_bytes + shape.num_stages * stage_bytes <= num_bytes, name
        assert shape.num_stages >= 2 or num_bytes == ADA, name
        assert shape == replace(wanted[name][0], num_stages=shape.num_stages)
        if num_bytes == HOPPER:
            assert shape == wanted[name][0]


@pytest.mark.parametrize(
    ("num_requests", "num_packed", "num_whole"),
    [(32, 64, 1), (48, 64, 0), (64, 64, 2), (24, 64, 0), (40, 4, 1), (256, 32, 8)],
)
def test_programs_take_whole_requests_if_they_fill_the_device(
    num_requests: int, num_packed: int, num_whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 KV heads on 132 multiprocessors: room for 33 programs per head, or 49 light programs."""
    monkeypatch.setattr(attention_config, "num_multiprocessors", lambda device: 132)
    shape = balanced_shape(num_requests, 8, num_packed, 128, 2, DEVICE)
    assert shape is not None
    assert shape.num_whole == num_whole


@pytest.mark.parametrize(("has_tile_loads", "rows"), [(True, 64), (False, 32)])
def test_number_of_rows_per_tile(has_tile_loads: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper's tensor cores need 64 rows. Other GPUs use 32. All GPUs use the smallest tile for few packed rows."""
    monkeypatch.setattr(attention_config, "has_tile_loads", lambda device: has_tile_loads)
    assert attention_shape(64, 32, 128, 2, DEVICE).rows == rows
    assert attention_shape(64, 32, 128, 4, DEVICE).rows == 32
    assert attention_shape(64, 4, 128, 2, DEVICE).rows == 16
    assert attention_shape(64, 4, 128, 2, DEVICE, 1).keys == 128


@pytest.mark.parametrize(("head_dim", "num_stages"), [(128, 2), (256, None)])
def test_long_prompts_over_a_cache_in_fp8_have_fewer_stages(
    head_dim: int, num_stages: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler keeps a converted tile of keys and one of values besides the stages.

    If only one stage is left, shorter tiles are used.
    """
    for module in (launch_config, ragged_config):
        monkeypatch.setattr(module, "shared_memory", lambda device: HOPPER)
    plain, fp8 = (ragged_shape(head_dim, 2, LONG_CONTEXT, DEVICE, kv_itemsize) for kv_itemsize in (2, 1))
    short = ragged_shape(head_dim, 2, 0, DEVICE, 1)
    assert plain == LONG_SHAPES[head_dim]
    assert fp8 == (short if num_stages is None else replace(plain, num_stages=num_stages))


@pytest.mark.parametrize(
    ("num_groups", "num_packed", "head_dim", "tiles"),
    [
        (32, 128, 512, (64, 32, 4, 2, 8)),
        (4, 128, 512, (64, 32, 16, 2, 8)),
        (32, 8, 512, (16, 32, 8, 3, 4)),
        (128, 32, 256, (32, 32, 2, 3, 4)),
        (4, 64, 256, (64, 32, 16, 3, 4)),
        (32, 64, 256, (64, 32, 8, 2, 4)),
    ],
)
def test_tiles_of_wide_heads_on_an_h200(
    num_groups: int, num_packed: int, head_dim: int, tiles: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiles that `docs/measurements/attention.md` names: rows, keys, parts, stages, warps."""
    monkeypatch.setattr(attention_config, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launch_config, "shared_memory", lambda device: HOPPER)
    shape = attention_shape(num_groups, num_packed, head_dim, 2, DEVICE)
    assert (shape.rows, shape.keys, shape.num_splits, shape.num_stages, shape.num_warps) == tiles
