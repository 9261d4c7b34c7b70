"""Scripted servers with faults that depend on the request, on the position in an answer or on documents."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dflash_testing.fake_engines import Ids, Text
from dflash_testing.scripted_servers import LONG, Script

PENALTIES = ("repetition_penalty", "repeat_penalty")
Kind = Literal["sampled", "defaults"]
THOUGHT = "The user wants two sentences. I keep them short."


@dataclass
class Fading(Script):
    """Each further token of an answer lowers acceptance, or a draft ends after `ends_at` tokens."""

    fade: float = 0.94
    ends_at: int | None = None

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        draw, accepted, given = random.Random(f"fading {ids[-64:]}"), [], 1
        while given < num_tokens and (self.ends_at is None or given < self.ends_at):
            number = 0
            while number < self.k and draw.random() < rate * self.fade ** (given + number):
                number += 1
            accepted.append(number)
            given += number + 1
        return tuple(accepted)


@dataclass
class WithDefaults(Script):
    """Without a penalty of its own, a request is `penalised` by this many nats. Some kinds are `undrafted`."""

    penalised: float = 0.0
    undrafted: tuple[Kind, ...] = ()

    @property
    def sampling(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.body.get("sampling_params", self.body)
        return found

    @property
    def has_defaults(self) -> bool:
        return not any(name in self.sampling for name in PENALTIES) and not self.sampling.get("temperature")

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        kinds = {"sampled": bool(self.sampling.get("temperature")), "defaults": self.has_defaults}
        is_off = "messages" not in self.body and any(kinds[kind] for kind in self.undrafted)
        return () if is_off else super().steps(ids, num_tokens, rate)

    def tokens(self, ids: Ids, num_tokens: int) -> Ids:
        """Each tenth token is one that the answer has already; a penalty takes the next likely one."""
        own = list(super().tokens(ids, num_tokens))
        for place in range(9, num_tokens, 10):
            own[place] = own[0] + (bool(self.penalised) and self.has_defaults)
        return tuple(own)

    def next_of(self, ids: Ids) -> dict[int, float]:
        prompt = self.prompt_of(ids)
        first, place = super().tokens(prompt, 1)[0], len(ids) - len(prompt)
        if place % 10 == 9:
            return {first: -0.1, first + 1: -0.1 - self.penalised}
        return super().next_of(ids)

    def scores(self, ids: Ids) -> list[dict[int, float]]:
        return [{token: -0.1} for token in ids[len(self.prompt_of(ids)) :]]


@dataclass
class SecondTurn(Script):
    """A prompt that goes on from an earlier prompt and its answer gets other tokens, or no accepted draft token."""

    turn: Literal["wrong", "draftless"] = "wrong"
    given: dict[Ids, Ids] = field(default_factory=dict)

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        earlier = [(*prompt, *answer) for prompt, answer in list(self.given.items())]
        goes_on = uses_cache and any(len(ids) > len(item) and ids[: len(item)] == item for item in earlier)
        text = super().complete(ids, num_tokens, is_plain=is_plain, uses_cache=uses_cache)
        if len(ids) >= LONG:
            self.given[ids] = text.token_ids
        if not goes_on:
            return text
        if self.turn == "wrong":
            return replace(text, token_ids=tuple(token + 1 for token in text.token_ids), num_cached=len(ids) - 1)
        return replace(text, accepted=(0,) * num_tokens)

    def scores(self, ids: Ids) -> list[dict[int, float]]:
        prompt = self.prompt_of(ids)
        own = self.tokens(prompt, len(ids) - len(prompt))
        each = zip(ids[len(prompt) :], own, strict=True)
        return [{token: -0.1} if token == first else {token: -8.0, first: -0.1} for token, first in each]


@dataclass
class Telling(Script):
    """The server describes itself otherwise: `told` has the changed fields of a path's document, or None without it."""

    told: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    slots: tuple[bool, ...] = ()

    def as_document(self, path: str, document: Any) -> Any:
        if path == "/slots" and self.slots:
            return [{"id": place, "speculative": drafts} for place, drafts in enumerate(self.slots)]
        changes = self.told.get(path, {})
        return None if changes is None else document | changes if changes and document else document

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        """Only some slots draft. Requests take slots in turn."""
        is_off = self.slots and not self.slots[self.num_answers % len(self.slots)]
        return () if is_off else super().steps(ids, num_tokens, rate)


@dataclass
class Ageing(Script):
    """Each request since the start lowers acceptance by `leak`, and all of them by `cap` at most."""

    leak: float = 0.015
    cap: float = 1.0

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        return super().steps(ids, num_tokens, max(0.03, rate - min(self.cap, self.leak * self.num_answers)))


@dataclass
class FirstStep(Script):
    """The first step of an answer accepts at `first`, later ones hardly anything."""

    first: float = 0.75

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        good = super().steps(ids, num_tokens, self.first)[:1]
        left = num_tokens - sum(good) - len(good)
        return good + (super().steps(ids, left, 0.02) if left > 1 else ())


@dataclass
class Timed(Script):
    """The server's own times: of a plain token, and of a step with drafts. Each varies by the share `noise`."""

    token_ms: float = 2.0
    step_ms: float = 4.0
    noise: float = 0.0

    def as_answer(self, path: str, answer: Any) -> Any:
        timings = answer.get("timings")
        if not timings or "predicted_n" not in timings:
            return answer
        steps = timings.get("draft_n", 0) / self.k
        spent = steps * self.step_ms if steps else timings["predicted_n"] * self.token_ms
        spent *= 1 + random.Random(self.num_answers).random() * self.noise
        return answer | {"timings": timings | {"predicted_ms": spent}}


@dataclass
class Wide(Script):
    """Chats about text beyond ASCII have characters of several tokens. Streams replace or drop them."""

    streams: Literal["sound", "replaced", "dropped"] = "sound"

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        message, reason, count = super().tool_call()
        if self.body["messages"][0]["content"].isascii():
            return message, reason, count
        text = "\u201cCaf\u00e9 \u2014 \u65e5\u672c\u8a9e, \U0001f30a\u201d and some more words."
        return message | {"content": text}, reason, count

    def as_stream(self, pieces: list[str]) -> list[str]:
        def sent(letter: str) -> str:
            if ord(letter) < 0x2000 or self.streams == "sound":
                return letter
            return "\ufffd" * 3 if self.streams == "replaced" else ""

        return ["".join(map(sent, piece)) for piece in pieces]


@dataclass
class OddAnswers(Script):
    """Answers of one token, cut to `cap` tokens, or `surplus` tokens too long; lost pieces of streams; missed stops."""

    token: int | None = None
    cap: int | None = None
    surplus: int = 0
    loses: Literal["", "end", "pieces"] = ""
    misses: str = ""

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        size = min(num_tokens, self.cap or num_tokens) + (self.surplus if num_tokens > 1 else 0)
        return super().complete(ids, size, is_plain=is_plain, uses_cache=uses_cache)

    @property
    def is_sampled(self) -> bool:
        return super().is_sampled and self.token is None

    def tokens(self, ids: Ids, num_tokens: int) -> Ids:
        return super().tokens(ids, num_tokens) if self.token is None else (self.token,) * num_tokens

    def misses_stop(self, stop: str) -> bool:
        """Strings that begin with a letter of `misses` are in the middle of a step."""
        return stop[0] in self.misses

    def as_stream(self, pieces: list[str]) -> list[str]:
        return {"": pieces, "end": pieces[:-1], "pieces": pieces[::2]}[self.loses]


@dataclass
class Thinking(Script):
    """A model that thinks before it answers. The parser leaves the thought in the text where it `leaks`."""

    leaks: Literal["", "streamed", "in one piece"] = ""

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        message, reason, count = super().tool_call()
        reason = reason if "tools" in self.body else "stop"
        if self.leaks == ("streamed" if self.body.get("stream") else "in one piece"):
            return message | {"content": THOUGHT + (message["content"] or "")}, reason, count
        return message | {"reasoning_content": THOUGHT}, reason, count

    def as_thought(self, message: Mapping[str, Any]) -> str:
        return str(message.get("reasoning_content") or "")


@dataclass
class Miscounted(Script):
    """The counters by position lack every second answer."""

    def count(self, text: Text) -> None:
        positions = list(self.counts["positions"])
        super().count(text)
        if self.num_answers % 2:
            self.counts["positions"] = positions


@dataclass
class Tempered(Script):
    """Requests are sampled at temperature 0 as well, `whatever` they ask, or never. Scores are of the greedy answer."""

    samples: Literal["at 0", "whatever", "never"] = "at 0"
    is_seeded: bool = False

    @property
    def sampling_seed(self) -> int:
        return self.body["seed"] + 10 * bool(self.body.get("speculative.n_max")) if self.is_seeded else self.num_answers

    @property
    def is_sampled(self) -> bool:
        has_top_k = self.body.get("sampling_params", self.body).get("top_k") == 1
        return self.samples == "whatever" or (self.samples == "at 0" and not has_top_k)

    def next_of(self, ids: Ids) -> dict[int, float]:
        prompt = self.prompt_of(ids)
        token = self.tokens(prompt, len(ids) - len(prompt) + 1)[-1]
        return {token: -0.1, token + 1: -1.1, token + 2: -3.1}

    def scores(self, ids: Ids) -> list[dict[int, float]]:
        prompt = self.prompt_of(ids)
        own = self.tokens(prompt, len(ids) - len(prompt))
        each = zip(ids[len(prompt) :], own, strict=True)
        return [{token: -0.1} if token == first else {token: -3.0, first: -0.1} for token, first in each]


@dataclass
class Revised(Tempered):
    """One of two replicas has another revision of the target, with other answers."""

    samples: Literal["at 0", "whatever", "never"] = "never"
    revision: int = 0

    def tokens(self, ids: Ids, num_tokens: int) -> Ids:
        own = super().tokens(ids, num_tokens)
        return tuple(token + self.revision * (place % 12 == 5) for place, token in enumerate(own))


@dataclass
class Looping(Script):
    """After long prompts the target says `size` tokens in turn. One prompt in eight asks for such a text."""

    size: int = 2

    def tokens(self, ids: Ids, num_tokens: int) -> Ids:
        is_loop = (len(ids) >= LONG and self.size > 1) or ids[-1] % 8 == 3
        return (
            tuple(300 + place % self.size for place in range(num_tokens))
            if is_loop
            else super().tokens(ids, num_tokens)
        )


@dataclass
class Ranks(Script):
    """Two ranks answer in turn, each with a prefix cache of its own."""

    kept: tuple[list[Ids], list[Ids]] = field(default_factory=lambda: ([], []))

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        text = super().complete(ids, num_tokens, is_plain=is_plain, uses_cache=uses_cache)
        kept = self.kept[self.num_answers % 2]
        cached = max((len(item) for item in kept if ids[: len(item)] == item), default=0)
        kept += [ids, ids + text.token_ids]
        return replace(text, num_cached=min(cached, len(ids) - 1))
