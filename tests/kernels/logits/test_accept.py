"""Acceptance of a block with stop ids and limits, compared with a plain loop."""

import pytest
import torch

from dflash_kernels.logits.accept import accept_block_ref
from dflash_testing.tensors import DEVICE, whole

pytestmark = pytest.mark.reference

NONE = -1


def accept_one(
    drafts: list[int], targets: list[int], max_accepted: int, stops: list[int], room: int
) -> tuple[int, int, int, bool]:
    """Compute the acceptance of one request in plain Python."""
    accepted = 0
    while accepted < min(max_accepted, len(drafts)) and drafts[accepted] == targets[accepted] >= 0:
        accepted += 1
    kept: list[int] = []
    for token in targets[: accepted + 1]:
        if len(kept) >= room or (kept and kept[-1] in stops):
            break
        kept.append(token)
    return accepted, len(kept), kept[-1] if kept else -1, bool(kept) and kept[-1] in stops


@pytest.mark.parametrize(("num_drafts", "num_stops"), [(0, 1), (1, 0), (3, 2), (7, 1), (15, 3)])
def test_acceptance_equals_the_loop(num_drafts: int, num_stops: int) -> None:
    generator = torch.Generator().manual_seed(num_drafts)
    num_requests = 60

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    targets = draw(0, 5, num_requests, num_drafts + 1)
    drafts = torch.where(draw(0, 6, num_requests, num_drafts) > 0, targets[:, :-1], draw(-1, 5, num_requests, 1))
    most, room = draw(0, num_drafts + 2, num_requests), draw(0, num_drafts + 3, num_requests)
    stops = torch.where(draw(0, 2, num_requests, num_stops) > 0, draw(0, 20, num_requests, num_stops), NONE)
    got = accept_block_ref(*(tensor.to(DEVICE) for tensor in (drafts, targets, most, stops, room)))
    expected = [
        accept_one(drafts[i].tolist(), targets[i].tolist(), int(most[i]), stops[i].tolist(), int(room[i]))
        for i in range(num_requests)
    ]
    assert list(zip(*(part.tolist() for part in got), strict=True)) == expected
    assert [part.dtype for part in got] == [torch.int64, torch.int64, torch.int64, torch.bool]


def test_a_draft_id_of_minus_one_is_never_accepted() -> None:
    """Not even if the target's id is -1, as in a padded row."""
    got = accept_block_ref(whole(NONE, 4)[None], whole(NONE, 4, 5)[None], whole(2), whole(NONE)[None], whole(9))
    assert got.num_accepted.tolist() == [0]
    assert got.is_stopped.tolist() == [False]


def test_a_stop_id_counts_only_if_it_is_committed() -> None:
    drafts, targets = whole(1, 2, 3)[None], whole(1, 2, 3, 4)[None]
    cases = {(9, 4): (3, 4, 4, True), (9, 2): (3, 2, 2, True), (1, 2): (3, 1, 1, False), (0, 1): (3, 0, -1, False)}
    for (room, stop), expected in cases.items():
        got = accept_block_ref(drafts, targets, whole(3), whole(NONE, stop)[None], whole(room))
        assert tuple(part.item() for part in got) == expected
