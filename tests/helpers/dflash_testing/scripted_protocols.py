"""Scripted servers with faults of queues, counters, log-probabilities, chat answers and active adapters."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_testing.fake_engines import Ids, Text
from dflash_testing.scripted_servers import ANSWER_LEN, NUM_PROMPTS, Script

QUEUES: Mapping[str, tuple[str, str, str]] = {
    "vllm": ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:request_queue_time_seconds"),
    "sglang": ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:queue_time_seconds"),
    "llama.cpp": ("llamacpp:requests_processing", "llamacpp:requests_deferred", ""),
}


@dataclass
class Queued(Script):
    """Answers of two runs take `answer_s` each. `at_once` requests run at a time; `shares` one time among all."""

    at_once: int = 1
    answer_s: float = 0.03
    shares: bool = False
    shows_queue: bool = True
    waiting: int = 0
    running: int = 0
    waited_s: float = 0.0
    num_timed: int = 0
    turns: threading.Semaphore = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.turns = threading.Semaphore(self.at_once)

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        if num_tokens != ANSWER_LEN or self.num_timed >= 2 * NUM_PROMPTS:
            return super().complete(ids, num_tokens, is_plain=is_plain, uses_cache=uses_cache)
        began = time.monotonic()
        self.change(waiting=1, num_timed=1)
        with self.turns:
            self.change(waiting=-1, running=1, waited_s=time.monotonic() - began)
            self.work()
            self.change(running=-1)
        return super().complete(ids, num_tokens, is_plain=is_plain, uses_cache=uses_cache)

    def change(self, **by: float) -> None:
        with self.lock:
            for name, value in by.items():
                setattr(self, name, getattr(self, name) + value)

    def work(self) -> None:
        left = self.answer_s
        while left > 0:
            time.sleep(0.002 if self.shares else left)
            left -= 0.002 / self.running if self.shares else left

    def as_metrics(self, text: str) -> str:
        running, waiting, queue = QUEUES[self.style]
        if not self.shows_queue:
            return text
        text += f"# TYPE {running} gauge\n{running} {self.running}\n# TYPE {waiting} gauge\n{waiting} {self.waiting}\n"
        if queue:
            text += f'# TYPE {queue} histogram\n{queue}_bucket{{le="+Inf"}} {self.num_answers}.0\n'
            text += f"{queue}_count {self.num_answers}.0\n{queue}_sum {self.waited_s}\n"
        return text


@dataclass
class Miscounting(Script):
    """One counter counts something else: rejected draft tokens as well, or each request or step twice, or a part."""

    counts_wrong: Literal["rejected", "requests", "steps", "half"] = "rejected"

    def count(self, text: Text) -> None:
        steps, accepted = len(text.accepted), sum(text.accepted)
        super().count(text)
        more: dict[str, int] = {
            "rejected": {"tokens": self.k * steps - accepted},
            "requests": {"requests": 1},
            "steps": {"drafts": steps, "drafted": self.k * steps},
            "half": {"tokens": -len(text.token_ids) // 2},
        }[self.counts_wrong]
        for name, number in more.items():
            self.counts[name] += number


@dataclass
class PartlyTold(Script):
    """Log-probabilities come only for the first token and the last one of each step."""

    def kept_logprobs(self, places: Sequence[int], accepted: Ids) -> list[int]:
        kept, place = [0], 0
        for number in accepted:
            place += number + 1
            kept.append(place)
        return [place for place in places if place in kept or not accepted]

    def scores(self, ids: Ids) -> list[dict[int, float]]:
        return [{token: -(token % 8) / 8} for token in ids[len(self.prompt_of(ids)) :]]


@dataclass
class OddChats(Script):
    """Chat answers in one piece have an object as arguments, or streams lack ids, or answers end with `stop`."""

    odd: Literal["object", "no id", "stop"] = "object"

    def as_answer(self, path: str, answer: Any) -> Any:
        if path == "/v1/chat/completions" and self.odd == "object":
            for call in answer["choices"][0]["message"].get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return answer

    def as_events(self, events: list[Any]) -> list[Any]:
        for event in events:
            for call in event["choices"][0]["delta"].get("tool_calls") or ():
                call.pop("id" if self.odd == "no id" else "", None)
        return events

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        message, reason, count = super().tool_call()
        return message, "stop" if self.odd == "stop" else reason, count


@dataclass
class CutStreams(Script):
    """A proxy passes on a part of each stream, in whole events or not, or lets every second stream pass."""

    part: float = 0.6
    cuts: Literal["events", "bytes", "every second", "mark"] = "events"
    num_streams: int = 0

    def as_stream_text(self, text: str) -> str:
        self.num_streams += 1
        if self.cuts == "mark":
            return text.removesuffix("data: [DONE]\n\n")
        if self.cuts == "every second" and self.num_streams % 2 == 0:
            return text
        found = text[: int(len(text) * self.part)]
        return found if self.cuts == "bytes" else found[: found.rindex("\n\n") + 2]


@dataclass
class OffSchema(Script):
    """Calls have `arguments` in both forms, in streams alone, without a draft as well or not, or a single time."""

    arguments: str = '{"city": "Lisbon", "days": "3"}'
    off: Literal["all", "streams", "drafted", "once"] = "all"
    num_off: int = 0

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        message, reason, count = super().tool_call()
        is_off = {
            "all": True,
            "streams": self.body.get("stream"),
            "drafted": self.body.get("speculative.n_max") != 0,
            "once": not self.num_off,
        }[self.off]
        for call in message.get("tool_calls") or ():
            self.num_off += bool(is_off)
            call["function"]["arguments"] = self.arguments if is_off else call["function"]["arguments"]
        return message, reason, count


@dataclass
class ActiveAdapter(Script):
    """llama.cpp applies an adapter with `scale` to each request that does not change it."""

    scale: float = 1.0
    adapter_rate: float = 0.15
    takes_scales: bool = True

    def as_document(self, path: str, document: Any) -> Any:
        adapter = {"id": 0, "path": "/adapters/support.gguf", "scale": self.scale}
        return [adapter] if path == "/lora-adapters" else document

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        asked = {item["id"]: item["scale"] for item in self.body.get("lora") or ()} if self.takes_scales else {}
        return super().steps(ids, num_tokens, self.adapter_rate if asked.get(0, self.scale) else rate)
