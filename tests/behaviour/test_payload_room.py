"""Payloads that stay on the device during a hand-off are limited by free memory. Other payloads wait."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest

from dflash_runtime.device.capacity import payload_room
from dflash_runtime.device.capacity.payload_room import PayloadRoom
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.handoffs import MemoryConnector, go_on, keys_of
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts

PROMPTS = [prompt[:40] for prompt in bundled_prompts()[:8]]
PARAMS = SamplingParams(max_new_tokens=16)


@dataclass(slots=True)
class SlowTaker(MemoryConnector):
    """Takes one saved payload per call of `take`, in the order of `wants`.

    `most` is the largest number of bytes held at once, and `order` has the keys in the order of their saves.
    """

    takes_device: bool = True
    holding: "dict[str, tuple[int, Future[None]]]" = field(default_factory=dict)
    most: int = 0
    order: list[str] = field(default_factory=list)
    wants: list[str] = field(default_factory=list)

    def save(self, handoff: Handoff) -> "Future[None]":
        self.saved[handoff.key] = handoff
        self.order.append(handoff.key)
        future: Future[None] = Future()
        self.holding[handoff.key] = (sum(item.nbytes for item in handoff.tensors.values()), future)
        self.most = max(self.most, sum(num_bytes for num_bytes, _ in self.holding.values()))
        return future

    def take(self) -> None:
        """Take the next wanted payload, if it is saved."""
        if self.wants and self.wants[0] in self.holding:
            self.holding.pop(self.wants.pop(0))[1].set_result(None)

    def is_wanted(self, key: str) -> bool:
        return self.wants[:1] == [key]


def make_llm(**engine: Any) -> LLM:
    return bundled_llm(bundled_draft_model(), 7, **{"max_num_requests": 8} | engine)


def hand_off_slowly(
    llm: LLM, prompts: Sequence[Sequence[int]], every: int = 6, *, is_reversed: bool = False
) -> SlowTaker:
    """Run prompts while the other side takes one payload every `every` steps, and wants one payload at a time."""
    keys = keys_of(prompts)
    connector, step, num_steps = SlowTaker(wants=list(reversed(keys) if is_reversed else keys)), llm.engine.step, 0

    def watched() -> Any:
        nonlocal num_steps
        num_steps += 1
        assert num_steps < 400, "no progress"
        if num_steps % every == 0:
            connector.take()
        llm.engine.scheduler.check_integrity()
        return step()

    llm.engine.step = watched  # type: ignore[method-assign]
    plan = HandoffPlan(connector=connector, keys=keys, is_sending=True)
    outputs = llm.generate(prompts, PARAMS, handoffs=plan)
    assert [(output.error, len(output.token_ids)) for output in outputs] == [(None, 1)] * len(prompts)
    llm.engine.scheduler.check_integrity()
    assert not llm.engine.scheduler.has_work
    return connector


def payload_bytes(llm: LLM, num_tokens: int) -> int:
    shapes = llm.engine.runner.porter.shapes(num_tokens).values()
    return sum(math.prod(shape) for shape in shapes) * 4


@pytest.mark.parametrize(("num_free", "expected"), [(0, 1), (2.5, 2), (100, 8)])
def test_payloads_on_the_device_stay_within_the_free_memory(
    num_free: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them arrive complete."""
    llm = make_llm()
    one = payload_bytes(llm, 40)
    free = num_free * one / payload_room.ROOM_SHARE
    monkeypatch.setattr(payload_room, "available_bytes", lambda: free)
    connector = hand_off_slowly(llm, PROMPTS)
    assert connector.most == expected * one
    wanted = make_llm().generate(PROMPTS, PARAMS)
    found = go_on(make_llm(), PROMPTS, PARAMS, connector)
    assert [(item.token_ids, item.drafts) for item in found] == [(item.token_ids, item.drafts) for item in wanted]
    assert [item.num_loaded for item in found] == [40] * len(PROMPTS)


@pytest.mark.parametrize("num_free", [0, 2.5])
def test_the_other_side_may_want_payloads_in_any_order(num_free: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads that nobody wants yet use all the room. A wanted payload is sent in addition, one at a time."""
    llm = make_llm()
    one = payload_bytes(llm, 40)
    free = num_free * one / payload_room.ROOM_SHARE
    monkeypatch.setattr(payload_room, "available_bytes", lambda: free)
    connector = hand_off_slowly(llm, PROMPTS, is_reversed=True)
    assert not connector.wants
    assert connector.most == (1 + max(1, int(num_free))) * one


def test_a_wanted_payload_never_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of shorter prompts use all the room until the payload of a long prompt, which ends last, is taken."""
    monkeypatch.setattr(payload_room, "available_bytes", lambda: 0)
    long = [token for prompt in bundled_prompts()[8:14] for token in prompt][:200]
    connector = hand_off_slowly(make_llm(max_batched_tokens=48), [long, *PROMPTS[:3]])
    assert connector.order[:2] == ["00001", "00000"]


def test_room_is_given_back_and_can_be_unlimited() -> None:
    runner = make_llm().engine.runner
    requests = [Request(index=index, prompt_token_ids=(1,), params=PARAMS) for index in range(4)]
    one = PayloadRoom(runner, 0)
    wanted = {requests[2], requests[3]}
    assert one.take(requests[0], 16, wanted.__contains__)
    assert not one.take(requests[1], 16, wanted.__contains__)
    assert one.take(requests[2], 16, wanted.__contains__)
    assert not one.take(requests[3], 16, wanted.__contains__)
    one.give_back(requests[0])
    assert not one.take(requests[1], 16, wanted.__contains__)
    one.give_back(requests[2])
    one.give_back(requests[3])
    assert one.take(requests[1], 10**6, wanted.__contains__)
    unlimited = PayloadRoom.beside(runner, is_bounded=False)
    assert all(unlimited.take(request, 10**6, wanted.__contains__) for request in requests)
