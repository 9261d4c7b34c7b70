"""Room on a device for payloads that are handed off from there, so that many at once do not take what steps need."""

import math
from collections.abc import Callable
from typing import Self

import torch

from dflash_runtime.device.host_memory import available_bytes
from dflash_runtime.device.runner import Runner
from dflash_runtime.scheduling.request import Request

ROOM_SHARE = 0.5
"""Share of the memory that is free beside weights, KV and steps when a call begins; the rest is for what fragments."""


class PayloadRoom:
    """How many bytes of payloads may lie on a device at once. One that is alone always may, however large it is."""

    def __init__(self, runner: Runner, num_bytes: float) -> None:
        self._porter = runner.porter
        self._num_bytes = num_bytes
        self._taken: dict[Request, int] = {}

    @classmethod
    def beside(cls, runner: Runner, *, is_bounded: bool) -> Self:
        """Room in what a runner's device has free; without end where payloads leave it by themselves."""
        if not is_bounded:
            return cls(runner, math.inf)
        device = runner.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
        return cls(runner, free * ROOM_SHARE)

    def take(self, request: Request, num_tokens: int, is_wanted: Callable[[Request], bool]) -> bool:
        """Take room for the payload of so many tokens, if there is any.

        For what the other side waits for there is, unless it waits for one that has room too, which it will have taken
        soon: it may ask in any order, and those it has not asked for would keep their room until it has.
        """
        needed = self._porter.num_bytes(num_tokens)
        has_room = not self._taken or sum(self._taken.values()) + needed <= self._num_bytes
        if not has_room and (not is_wanted(request) or any(map(is_wanted, self._taken))):
            return False
        self._taken[request] = needed
        return True

    def give_back(self, request: Request) -> None:
        """Give back what a request has taken, if it has taken any."""
        self._taken.pop(request, None)
