"""A limit on payloads that stay on the device until they are sent, so that steps keep the memory they need."""

import math
from collections.abc import Callable
from typing import Self

import torch

from dflash_runtime.device.capacity.host_memory import available_bytes
from dflash_runtime.device.runner import Runner
from dflash_runtime.scheduling.request import Request

ROOM_SHARE = 0.5
"""Share of the free memory at the start of a call that payloads may use. The rest allows for fragmentation."""


class PayloadRoom:
    """Bytes of payloads that may be on a device at once. A single payload is always allowed."""

    def __init__(self, runner: Runner, num_bytes: float) -> None:
        self._porter = runner.porter
        self._num_bytes = num_bytes
        self._taken: dict[Request, int] = {}

    @classmethod
    def beside(cls, runner: Runner, *, is_bounded: bool) -> Self:
        """The room on a runner's device. It is unlimited if payloads do not stay on the device."""
        if not is_bounded:
            return cls(runner, math.inf)
        device = runner.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
        return cls(runner, free * ROOM_SHARE)

    def take(self, request: Request, num_tokens: int, is_wanted: Callable[[Request], bool]) -> bool:
        """Take room for a request's payload of `num_tokens` tokens; False if there is not enough.

        A payload that the other side waits for may exceed the limit, unless the other side also waits for a payload
        that has room already. The other side may ask for payloads in any order, and without this exception payloads
        that it asks for later could hold all the room.
        """
        needed = self._porter.num_bytes(num_tokens)
        has_room = not self._taken or sum(self._taken.values()) + needed <= self._num_bytes
        if not has_room and (not is_wanted(request) or any(map(is_wanted, self._taken))):
            return False
        self._taken[request] = needed
        return True

    def give_back(self, request: Request) -> None:
        """Free the room of a request, if it has any."""
        self._taken.pop(request, None)
