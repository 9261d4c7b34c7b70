"""Hand-offs for tests: a connector within the process, with deliveries timed by the test, and engines on both sides."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dflash_runtime.errors import PeerUnreachable
from dflash_runtime.kv_transfer.handoff import Handoff
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.pairs import bundled_llm, bundled_prompts
from dflash_testing.walking_drafts import KINDS, draft_model

Params = SamplingParams | Sequence[SamplingParams]

NUM_DRAFTS = 7
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 48, 63)
"""Prompt lengths around the bounds of pages of 16 tokens, with one to four pages."""

PROMPTS = tuple(prompt[:length] for prompt, length in zip(bundled_prompts(), LENGTHS, strict=False))
PARAMS = SamplingParams(max_new_tokens=16)
DRAFTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("tiny", {}),
    "causal": ("tiny", {"causal": (True, True, True)}),
    "sliding": ("tiny", {"windows": (16, None, 16)}),
    "reduced": ("tiny:reduced", {}),
    **{kind: (kind, {}) for kind in KINDS},
}


def make_llm(draft: str = "full", **engine: Any) -> LLM:
    """The bundled pair with one of DRAFTS, in a small engine."""
    name, changes = DRAFTS[draft]
    return bundled_llm(draft_model(name, **changes), NUM_DRAFTS, **{"max_num_requests": 4} | engine)


@cache
def whole_run(
    prompts: tuple[tuple[int, ...], ...], params: SamplingParams = PARAMS, draft: str = "full", **engine: Any
) -> list[RequestOutput]:
    """The outputs of one engine that runs these prompts from start to end. Computed once per process."""
    return make_llm(draft, **engine).generate(prompts, params)


def traces(outputs: list[RequestOutput]) -> list[Any]:
    """Token ids, finish reason and the drafts of every step, for each output."""
    return [(output.token_ids, output.finish_reason, output.drafts) for output in outputs]


@dataclass(slots=True)
class MemoryConnector:
    """Keeps saved hand-offs in memory.

    holds_back     loads wait until `deliver` is called
    change         applied to each loaded hand-off
    failure        raised by each load instead
    save_failure   raised by each save
    holds_saves    saves are done only when `confirm` is called
    """

    name: str = "memory"
    takes_device: bool = False
    saved: dict[str, Handoff] = field(default_factory=dict)
    holds_back: bool = False
    waiting: list[tuple[str, "Future[Handoff]"]] = field(default_factory=list)
    change: Callable[[Handoff], Handoff] | None = None
    failure: Exception | None = None
    refused: dict[str, str] = field(default_factory=dict)
    save_failure: Exception | None = None
    holds_saves: bool = False
    unconfirmed: "list[Future[None]]" = field(default_factory=list)

    def save(self, handoff: Handoff) -> "Future[None]":
        if self.save_failure is not None:
            raise self.save_failure
        copies = {name: tensor.clone() for name, tensor in handoff.tensors.items()}
        self.saved[handoff.key] = handoff.with_tensors(copies)
        future: Future[None] = Future()
        self.unconfirmed.append(future)
        if not self.holds_saves:
            self.confirm()
        return future

    def confirm(self) -> None:
        """Confirm that the oldest saved hand-off was taken."""
        self.unconfirmed.pop(0).set_result(None)

    def load(self, key: str) -> "Future[Handoff]":
        future: Future[Handoff] = Future()
        self.waiting.append((key, future))
        if not self.holds_back:
            self.deliver()
        return future

    def deliver(self, which: int = 0) -> None:
        """Deliver one awaited hand-off. The load of a key that was never saved keeps waiting forever."""
        key, future = self.waiting.pop(which)
        if self.failure is not None:
            future.set_exception(self.failure)
        elif key in self.refused:
            future.set_exception(PeerUnreachable(self.refused[key]))
        elif key in self.saved and future.set_running_or_notify_cancel():
            handoff = self.saved[key]
            future.set_result(handoff if self.change is None else self.change(handoff))

    def refuse(self, key: str, reason: str) -> None:
        self.refused[key] = reason

    def is_wanted(self, key: str) -> bool:
        return False

    def close(self) -> None:
        self.waiting.clear()


def keys_of(prompts: Sequence[object]) -> tuple[str, ...]:
    return tuple(f"{index:05}" for index in range(len(prompts)))


def hand_off(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Params, *, takes_device: bool = False
) -> MemoryConnector:
    """Prefill prompts and hand all of them off."""
    connector = MemoryConnector(takes_device=takes_device)
    outputs = llm.generate(
        prompts, params, handoffs=HandoffPlan(connector=connector, keys=keys_of(prompts), is_sending=True)
    )
    assert [output.error for output in outputs] == [None] * len(prompts)
    assert all(len(output.token_ids) == 1 for output in outputs)
    llm.engine.scheduler.check_integrity()
    return connector


def handed_off(prompts: tuple[tuple[int, ...], ...], params: SamplingParams = PARAMS) -> MemoryConnector:
    """A connector with the hand-offs of these prompts. They are computed once per process."""
    return MemoryConnector(saved=dict(_saved_hand_offs(prompts, params)))


@cache
def _saved_hand_offs(prompts: tuple[tuple[int, ...], ...], params: SamplingParams) -> dict[str, Handoff]:
    return hand_off(make_llm(), prompts, params).saved


def go_on(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Params,
    connector: MemoryConnector,
    *,
    timeout: float = 60.0,
    force: bool = False,
) -> list[RequestOutput]:
    """Continue all prompts from their hand-offs to the end."""
    plan = HandoffPlan(connector=connector, keys=keys_of(prompts), timeout=timeout, force=force)
    outputs = llm.generate(prompts, params, handoffs=plan)
    llm.engine.scheduler.check_integrity()
    return outputs
