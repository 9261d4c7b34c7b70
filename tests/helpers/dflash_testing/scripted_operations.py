"""Scripted servers with faults of their operation: gateways, limits, counters, restarts, adapters and ends of turns."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_cli.probing.servers.http_client import ServerUnreachable
from dflash_testing.fake_engines import Ids, Text
from dflash_testing.scripted_servers import ARGUMENTS, SPLIT, Script

RUN_ON = "<|im_end|>\n<|im_start|>user\nAnd lakes?"


def wants_grammar(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a request needs a grammar."""
    return "response_format" in body or "tools" in body


def is_long(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a request has a prompt of 1,000 tokens or more."""
    return len(body.get("prompt") or body.get("input_ids") or ()) >= 1000


@dataclass
class Rounded(Script):
    """Counters of a server that has run for weeks, printed with six digits. Positions have all their digits."""

    def reset(self) -> None:
        super().reset()
        drafts = 16_204_411
        positions = [drafts * 7 // (10 + 4 * place) for place in range(self.k)]
        self.counts |= {"drafts": drafts, "drafted": drafts * self.k, "accepted": sum(positions)}
        self.counts |= {"positions": positions, "tokens": drafts + sum(positions) + 90_117}

    def as_metrics(self, text: str) -> str:
        lines = [line.rpartition(" ") for line in text.splitlines()]
        return "".join(
            f"{name} {value}\n" if name.startswith("#") or "_per_pos" in name else f"{name} {float(value):.6g}\n"
            for name, _, value in lines
        )


@dataclass
class Bonus(Script):
    """The target's own token of each step is counted as an accepted draft token, in answers and metrics."""

    def as_metrics(self, text: str) -> str:
        name, counts = "llamacpp:spec_decode_num_accepted_tokens_total", self.counts
        return text.replace(f"{name} {counts['accepted']}\n", f"{name} {counts['accepted'] + counts['drafts']}\n")

    def as_answer(self, path: str, answer: Any) -> Any:
        timings = answer.get("timings", {})
        if timings.get("draft_n"):
            timings["draft_n_accepted"] += timings["draft_n"] // self.k
        return answer


@dataclass
class Named(Script):
    """Each answer has an id, by default its own. A gateway with a store gives each answer again, with its id."""

    has_store: bool = False
    id: str | None = None
    store: dict[str, Any] = field(default_factory=dict)

    def early_answer(self, path: str, body: Mapping[str, Any]) -> Any | None:
        return self.store.get(json.dumps([path, body], default=str)) if self.has_store and path != "/tokenize" else None

    def as_answer(self, path: str, answer: Any) -> Any:
        named = answer | {"id": self.id or f"cmpl-{self.num_answers}"}
        self.store[json.dumps([path, self.body], default=str)] = named
        return named


@dataclass
class Failing(Script):
    """Some requests get a `status` and no answer. The engine starts anew after each, or the server `recovers` then."""

    fails: Callable[[str, Mapping[str, Any]], bool] = wants_grammar
    restarts: bool = False
    recovers: bool = False
    status: int = 500
    num_failed: int = 0

    def early_answer(self, path: str, body: Mapping[str, Any]) -> Any | None:
        if not self.fails(path, body) or (self.recovers and self.num_failed):
            return None
        self.num_failed += 1
        if self.restarts:
            self.reset()
        raise ServerUnreachable(f"answered {self.status}, after 4 tries", id="no-answer", path=f"http://scripted{path}")


@dataclass
class Cut(Script):
    """Prompts of more than `pool` tokens are cut. Answers tell how many tokens were read."""

    pool: int = 900

    def as_answer(self, path: str, answer: Any) -> Any:
        sent = len(self.body.get("input_ids") or ())
        if "meta_info" in answer:
            answer["meta_info"] |= {"prompt_tokens": min(self.pool, sent)}
        return answer


@dataclass
class CacheStart(Script):
    """The prefix cache finds the first tokens of a prompt and no more."""

    most: int = 128

    def counted(self, text: Text) -> Text:
        return super().counted(replace(text, num_cached=min(self.most, text.num_cached)))


@dataclass
class Spread(Script):
    """Acceptance differs between prompts: nothing for each third one, or a rate of its own, from 0 to 15 of 16."""

    is_even: bool = False

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        own = ids[-1] % 16 / 16 if self.is_even else 0.02 if ids[-1] % 3 == 0 else rate
        return super().steps(ids, num_tokens, own)


@dataclass
class RunsOn(Script):
    """Chats go on behind the end of their turn."""

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        message, reason, count = super().tool_call()
        return (message, reason, count) if message.get("tool_calls") else (
            message | {"content": message["content"] + RUN_ON}, "length", count
        )  # fmt: skip


@dataclass
class Adapted(Script):
    """Three adapters, for which each draft token is accepted with `adapter_rate`."""

    adapter_rate: float = 0.05

    def as_document(self, path: str, document: Any) -> Any:
        if path != "/v1/models":
            return document
        base, names = document["data"][0], ("sql", "support", "news")
        return {"data": [base, *(base | {"id": name, "parent": base["id"]} for name in names)]}

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        name = self.body.get("lora_path") if self.style == "sglang" else self.body.get("model")
        is_adapter = name in ("sql", "support", "news")
        return super().steps(ids, num_tokens, self.adapter_rate if is_adapter else rate)


@dataclass
class Surprising(Script):
    """A second method drafts 20 tokens in some steps, although K is 7."""

    def reset(self) -> None:
        super().reset()
        self.counts["positions"] = [0] * 20

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        return (
            (20, *super().steps(ids, num_tokens - 21, rate))
            if num_tokens > 30
            else super().steps(ids, num_tokens, rate)
        )


@dataclass
class Told(Script):
    """Each token has an own log-probability. Those of drafted tokens are told as 0, or by a setting all `are_zero`."""

    are_zero: bool = False

    def scores(self, ids: Ids) -> list[dict[int, float]]:
        return [{token: -(token % 8) / 8} for token in ids[len(self.prompt_of(ids)) :]]

    def next_of(self, ids: Ids) -> dict[int, float]:
        found = super().next_of(ids)
        most = max(found.values()) if self.are_zero else 0.0
        return {token: value - most for token, value in found.items()}

    def told_logprob(self, place: int, value: float) -> float:
        return value if not place and not self.are_zero else 0.0


@dataclass
class Mixed(Script):
    """Greedy requests get other tokens while sampled ones run, or the other token of a near-tie."""

    num_sampled: int = 0
    has_near_ties: bool = False

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        with self.lock:
            self.num_sampled += self.is_sampled
        time.sleep(0.002)
        text = super().complete(ids, num_tokens, is_plain=is_plain, uses_cache=uses_cache)
        with self.lock:
            is_beside = self.num_sampled > 0 and not self.is_sampled
            self.num_sampled -= self.is_sampled
        if not is_beside:
            return text
        other = [token if self.has_near_ties else token % 8 for token in text.token_ids]
        other[SPLIT] += self.has_near_ties
        return replace(text, token_ids=tuple(other))


@dataclass
class CallsAtTimes(Script):
    """Each second tool call is broken, in one piece or streamed."""

    num_calls: int = 0

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        message, reason, count = super().tool_call()
        self.num_calls += 1
        if message.get("tool_calls") and self.num_calls % 2 == 0:
            message["tool_calls"][0]["function"]["arguments"] = ARGUMENTS[:-6]
        return message, reason, count


@dataclass
class NarrowWhenLong(Script):
    """After prompts of 900 tokens or more each step drafts one token."""

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        self.drafted = 1 if len(ids) >= 900 else None
        return super().steps(ids, num_tokens, rate)


@dataclass
class FailsLate(Script):
    """From token `at` of an answer on, no draft token is accepted."""

    at: int = 48

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        found, given = [], 1
        for count in super().steps(ids, num_tokens, rate):
            if given >= self.at:
                break
            found.append(count)
            given += count + 1
        return (*found, *[0] * (num_tokens - given))
