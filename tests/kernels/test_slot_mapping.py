"""Slots through the page table, kernel against reference."""

import pytest
import torch

from dflash_kernels.slot_mapping import PAD, slot_mapping, slot_mapping_ref
from dflash_testing.tensors import DEVICE, whole


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("num_rows", [1, 7, 15, 31, 300])
def test_slots_equal_the_reference(num_rows: int, page_size: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    table = torch.randint(0, 50, (5, 6), generator=generator).to(DEVICE)  # a tenth of the entries or so own no page
    positions = torch.randint(-3, 8 * page_size, (5, num_rows), generator=generator).to(DEVICE)
    limits = torch.randint(0, 8 * page_size, (5,), generator=generator).to(DEVICE)
    expected = slot_mapping_ref(table, positions, limits, page_size)
    assert torch.equal(slot_mapping(table, positions, limits, page_size), expected)
    wide = torch.cat((table, table), 1)[:, :6], torch.cat((positions, positions), 1)[:, :num_rows]
    assert torch.equal(slot_mapping(*wide, limits, page_size), expected)


def test_page_boundaries_limits_and_missing_pages() -> None:
    table = whole(3, 0, 5)[None]
    positions = whole(-1, 0, 15, 16, 31, 32, 40, 41, 47, 48)[None]
    assert slot_mapping(table, positions, whole(41), 16).tolist() == [
        [PAD, 48, 63, PAD, PAD, 80, 88, PAD, PAD, PAD]
    ]  # fmt: skip


def test_slots_of_high_pages_pass_32_bits() -> None:
    assert slot_mapping(whole(2**31)[None], whole(15)[None], whole(16), 16).tolist() == [[2**35 + 15]]


def test_no_rows_are_no_launch() -> None:
    assert slot_mapping(whole(1)[None][:0], whole(1)[None][:0], whole(), 16).shape == (0, 1)
