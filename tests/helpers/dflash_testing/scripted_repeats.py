"""Scripted servers whose answers do not end, or read a wrong prefix cache."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from dflash_testing.fake_engines import Ids, Text
from dflash_testing.scripted_requests import END, Drawing
from dflash_testing.scripted_servers import ARGUMENTS, LONG, SOUND_JSON, SPLIT, Script

SALTS = ("cache_salt", "extra_key")
BEGUN = SOUND_JSON[:31]


@dataclass
class Endless(Script):
    """Answers of a kind go on with a tail up to the limit. With `ends_plainly` they do so with drafts only."""

    kind: Literal["json", "tools"] = "json"
    begun: str = BEGUN
    tail: str = " \n  " * 100
    ends_plainly: bool = False

    def json_answer(self, ids: Ids, *, is_plain: bool) -> Text:
        text = super().json_answer(ids, is_plain=is_plain)
        is_sound = self.kind != "json" or (is_plain and self.ends_plainly)
        return text if is_sound else replace(text, is_stopped=False, text=self.begun + self.tail)

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        message, reason, count = super().tool_call()
        if self.kind == "tools" and message.get("tool_calls"):
            message["tool_calls"][0]["function"]["arguments"] = ARGUMENTS[:18] + self.tail
            reason = "length"
        return message, reason, count


@dataclass
class CachedWrongly(Drawing):
    """Of the answers to long prompts that read the prefix cache, the first and then each `every`th one is wrong.

    Wrong answers end at once, with a token or without (`ends`), or have other tokens. The first `num_spared` are right.
    """

    every: int = 2
    ends: Literal["", "token", "nothing"] = "token"
    takes_salt: bool = True
    num_spared: int = 0
    num_hits: int = 0

    def counted(self, text: Text) -> Text:
        if not text.num_cached or (self.takes_salt and any(map(self.body.get, SALTS))):
            return super().counted(replace(text, num_cached=0))
        self.num_hits += 1
        number = self.num_hits - self.num_spared
        if number > 0 and (number - 1) % self.every == 0:
            tokens = {"token": (END,), "nothing": ()}.get(self.ends)
            others = tuple(token + 2 + self.num_hits for token in text.token_ids)
            text = replace(text, token_ids=others if tokens is None else tokens, is_stopped=tokens is not None)
            text = text if tokens is None else replace(text, accepted=())
        return super().counted(text)


@dataclass
class CachedBlocks(Drawing):
    """Measured prompts of more than a block have the block in the prefix cache, and then a wrong token at SPLIT.

    The first `num_spared` answers are right.
    """

    num_spared: int = 0

    def counted(self, text: Text) -> Text:
        is_hit = self.block < text.num_prompt < LONG and not any(map(self.body.get, SALTS))
        if not is_hit or self.num_answers < self.num_spared:
            return super().counted(text)
        gap = 0 if self.body.get("temperature") else 500
        tokens = tuple(token + gap * (place == SPLIT) for place, token in enumerate(text.token_ids))
        return super().counted(replace(text, token_ids=tokens, num_cached=self.block))


@dataclass
class StaleWalk(Drawing):
    """A request without a draft that goes on from ten tokens of an answer in the prompt cache has wrong tokens."""

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        text = super().complete(ids, num_tokens, is_plain=is_plain, uses_cache=uses_cache)
        is_wrong = is_plain and uses_cache and len(ids) - len(self.prompt_of(ids)) >= 10
        return replace(text, token_ids=tuple(token + 500 for token in text.token_ids)) if is_wrong else text
