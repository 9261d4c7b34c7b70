"""The states of recurrent layers, by row of the device state."""

import torch

from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.storage.recurrent import STATES, RecurrentStates
from dflash_runtime.models.placement import Placement
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.target_config import RecurrenceConfig

CPU = torch.device("cpu")


def test_a_request_that_begins_again_leaves_its_old_row() -> None:
    config = RecurrenceConfig(layers=(0,), num_key_heads=1, num_value_heads=1, key_size=2, value_size=2, num_taps=4)
    states = RecurrentStates(config, num_texts=4, block_rows=2, placement=Placement(CPU, torch.float32, REFERENCE, 8))
    states.memories[0].states.copy_(torch.arange(4.0).view(4, 1, 1, 1, 1).expand(4, 1, 1, 2, 16))
    first, second = (Request(index=index, prompt_token_ids=(1, 2, 3), params=SamplingParams()) for index in range(2))
    for first_row, second_row in ((3, 0), (1, 2)):
        first.row, second.row = first_row, second_row
        states.hold([first, second])
        assert states.take(first).tensors[STATES].unique().tolist() == [first_row]
        assert states.take(second).tensors[STATES].unique().tolist() == [second_row]
    second.row = 3
    states.hold([second])
    assert states.take(first).tensors[STATES].unique().tolist() == [1]
    assert states.take(second).tensors[STATES].unique().tolist() == [3]
