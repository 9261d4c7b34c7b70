"""A fake engine behind a test server: its answers, its counters, and faults on request."""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Fault = Literal["500", "501", "503", "timeout", "garbage", "cut", "400"]
Reports = Literal["nothing", "summary", "detailed"]
K = 7
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """An answer, and how many drafts each of its steps accepted."""

    token_ids: Ids
    accepted: Ids
    is_stopped: bool = False
    text: str = "..."
    num_cached: int = 0
    num_prompt: int = 9

    def cut(self, num_tokens: int) -> "Text":
        """The answer with a limit: the steps that are done until then."""
        if num_tokens >= len(self.token_ids):
            return self
        steps, given = 0, 1
        while given < num_tokens:
            given += self.accepted[steps] + 1
            steps += 1
        return Text(self.token_ids[:num_tokens], self.accepted[:steps])


def make_text(prompt: Ids, *, length: int = 48, rate: float = 0.7) -> Text:
    """An answer that follows from its prompt: each draft is accepted with `rate` where those before it are."""
    numbers = iter(range(10**6))

    def draw() -> float:
        digest = hashlib.sha256(f"{list(prompt)} {next(numbers)}".encode()).digest()
        return int.from_bytes(digest[:4], "big") / 2**32

    accepted: list[int] = []
    while 1 + sum(accepted) + len(accepted) < length:
        accepted.append(next((place for place in range(K) if draw() >= rate), K))
    return Text(tuple(100 + int(900 * draw()) for _ in range(length)), tuple(accepted))


def texts_of_rows(path: Path) -> dict[Ids, Text]:
    """The answers in a file of `--rows`, by the ids of their prompts."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    return {
        tuple(row["prompt_token_ids"]): Text(
            tuple(row["token_ids"]),
            tuple(length - 1 for length in row["acceptance_lengths"]),
            is_stopped=row["finish_reason"] == "stop",
        )
        for row in rows
    }


@dataclass
class FakeEngine:
    """The settings of a fake server.

    reports        the facts about verify steps that an answer includes
    has_draft      whether the server was started with a draft; without one, counters of drafts are missing
    is_engaged     whether the server drafts
    has_metrics    whether the server shows counters
    faults         number of the request, from 0 -> its fault; request 0 is the probe's trial
    resets_at      the request before which counters fall to 0
    is_shared      another user sends a request beside every request
    runs_beside    another user's request runs beside every second request and does not end
    worse_loaded   how many fewer drafts are accepted while more than one request runs
    changes_at     the position at which an answer differs while more than one request runs
    gap            nats between the two tokens at that position
    old_names      use the names of earlier releases of SGLang and llama.cpp, and their way to switch drafts off
    method         the method of drafting that answers of llama.cpp name
    metrics_text   the text of the metrics, in place of the server's own
    missing        names that the metrics leave out
    k              configured draft tokens per step
    drafted        draft tokens per step if they are fewer than k
    cache          state of the prefix cache: `off` by the settings, `untold` without a setting or a counter
    block          tokens of a block of the prefix cache
    num_slots      requests that llama.cpp runs at the same time
    started_s      start of the process, if the metrics show it
    metrics_slash  redirect the metrics to a path that ends with a slash
    """

    style: Literal["vllm", "sglang", "llama.cpp"] = "vllm"
    release: str = "0.33.0"
    reports: Reports = "nothing"
    has_draft: bool = True
    is_engaged: bool = True
    has_metrics: bool = True
    texts: Mapping[Ids, Text] = field(default_factory=dict)
    rate: float = 0.7
    encode: Callable[[str], list[int]] = lambda text: [ord(letter) for letter in text[-24:]]
    faults: Mapping[int, Fault] = field(default_factory=dict)
    resets_at: int | None = None
    is_shared: bool = False
    runs_beside: bool = False
    worse_loaded: int = 0
    changes_at: int | None = None
    gap: float = 0.05
    old_names: bool = False
    method: str = "draft-dflash"
    key: str | None = None
    metrics_text: str | None = None
    missing: tuple[str, ...] = ()
    metrics_slash: Literal["", "/"] = ""
    k: int = K
    drafted: int | None = None
    cache: str = "on"
    block: int = 16
    kv_dtype: str = "auto"
    num_slots: int = 4
    started_s: float | None = None
    pause_s: float = 0.002
    url: str = ""
    num_answers: int = 0
    num_active: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    seen: set[Ids] = field(default_factory=set)
    counts: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts = {"drafts": 0, "drafted": 0, "accepted": 0, "positions": [0] * self.k, "requests": 0, "tokens": 0}
        self.counts["cached"] = 0

    def text_of(self, prompt: Ids, num_tokens: int, *, is_loaded: bool) -> Text:
        text = self.texts.get(prompt) or make_text(prompt, rate=self.rate, length=max(48, num_tokens))
        text = text.cut(num_tokens)
        accepted = text.accepted if self.is_engaged and self.has_draft else ()
        token_ids = list(text.token_ids)
        if is_loaded:
            accepted = tuple(max(0, number - self.worse_loaded) for number in accepted)
            if self.changes_at is not None and self.changes_at < len(token_ids):
                token_ids[self.changes_at] += 1
        return Text(tuple(token_ids), accepted, text.is_stopped)

    def with_cache(self, prompt: Ids, text: Text) -> Text:
        """The answer with the tokens of its prompt that an earlier request has left in the prefix cache."""
        with self.lock:
            is_seen = prompt in self.seen
            self.seen.add(prompt)
        cached = (len(prompt) - 1) // self.block * self.block if is_seen else 0
        return replace(text, num_cached=cached, num_prompt=len(prompt))

    def likeliest(self, ids: Ids) -> dict[int, float]:
        """Return the log probabilities of the next token of a text that begins with a known prompt."""
        prompts = [tuple(body["ids"]) for body in self.bodies if body["num_tokens"] > 1]
        prompt = next(item for item in prompts if ids[: len(item)] == item)
        token = self.text_of(prompt, 10**4 if prompt in self.texts else 48, is_loaded=False).token_ids[
            len(ids) - len(prompt)
        ]
        return {token: -0.1, token + 1: -0.1 - self.gap, 5: -9.0}

    def count(self, text: Text) -> None:
        counts, steps = self.counts, text.accepted
        beside = self.is_shared or (self.runs_beside and counts["requests"] % 2)
        for place in range(2 if beside else 1):
            counts["requests"] += place == 0 or self.is_shared
            counts["tokens"] += len(text.token_ids)
            counts["cached"] += text.num_cached
            counts["drafts"] += len(steps)
            counts["drafted"] += (self.drafted or self.k) * len(steps)
            counts["accepted"] += sum(steps)
            for number in steps:
                for place in range(number):
                    counts["positions"][place] += 1


def prompt_rows(count: int) -> list[dict[str, Sequence[int] | str]]:
    """Prompts as ids, which no tokenizer is needed for."""
    return [{"id": f"p{index}", "prompt_token_ids": [7, 8, 9 + index]} for index in range(count)]
