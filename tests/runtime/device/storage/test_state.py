"""The device state: the values that admissions and new pages write, and their copy to the device."""

import torch

from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.storage.state import DeviceState, Uploader
from dflash_runtime.scheduling.batch import PageAddition
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams

CPU = torch.device("cpu")
PAGE, FULL_WIDTH = 16, 8


def request(row: int, **params: object) -> Request:
    made = Request(index=0, prompt_token_ids=(1, 2, 3), params=SamplingParams(**params))  # type: ignore[arg-type]
    made.row, made.generation = row, 10 + row
    return made


def used_state() -> DeviceState:
    """A state of six rows with running requests."""
    state = DeviceState.empty(6, 5, REFERENCE, CPU)
    for tensor in (state.kv_lens, state.anchors, state.remaining, state.reserved_lens, state.page_table):
        tensor.fill_(77)
    state.done.fill_(False)
    return state


def test_several_requests_get_rows_at_once_and_other_rows_do_not_change() -> None:
    state = used_state()
    requests = [
        request(4, temperature=0.5, top_k=7, top_p=0.25, seed=-5, stop_token_ids=(8, 9)),
        request(1, verify_width=3, seed=2**62, stop_token_ids=(4,), ignore_eos=True),
        request(0),
    ]
    additions = [PageAddition(4, 0, (11, 12)), PageAddition(1, 0, ()), PageAddition(1, 0, (13,)),
                 PageAddition(4, 2, (14,)), PageAddition(3, 4, (15,))]  # fmt: skip
    state.admit(requests, additions, FULL_WIDTH, PAGE, Uploader(CPU))
    rows = [4, 1]
    assert state.generations[rows].tolist() == [14, 11]
    assert state.widths[rows].tolist() == [FULL_WIDTH, 3]
    assert state.top_ks[rows].tolist() == [7, 0]
    assert state.seeds[rows].tolist() == [-5, 2**62]
    assert state.temperatures[rows].tolist() == [0.5, 0.0]
    assert state.top_ps[rows].tolist() == [0.25, 1.0]
    assert state.stop_ids[4].tolist()[:3] == [8, 9, -1]
    assert set(state.stop_ids[1].tolist()) == {-1}
    assert state.done.tolist() == [True, True, False, False, True, False]
    assert state.page_table[rows].tolist() == [[11, 12, 14, 0, 0], [13, 0, 0, 0, 0]]
    assert state.reserved_lens[rows].tolist() == [3 * PAGE, PAGE]
    assert state.page_table[3].tolist() == [77, 77, 77, 77, 15]
    assert state.reserved_lens[3] == 5 * PAGE
    assert not state.page_table[0].any()
    assert state.reserved_lens[0] == 0
    assert (state.page_table[[2, 5]] == 77).all()
    assert state.reserved_lens[[2, 5]].tolist() == [77] * 2


def test_an_empty_admission_copies_nothing() -> None:
    class Refusing(Uploader):
        def _send(self, tensor: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    used_state().admit([], [], FULL_WIDTH, PAGE, Refusing(CPU))


def test_lists_are_uploaded_in_one_copy_and_aligned() -> None:
    """Triton compiles another kernel for a pointer that is not a multiple of 16 bytes."""
    lists = [[1, 2, 3], [], [4], [5, 6], [7]]
    tensors = Uploader(CPU).lists(*lists)
    assert [tensor.tolist() for tensor in tensors] == lists
    assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.numel())
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
