"""Scripted servers that sample in part, tell certainty, repeat drafts, refuse requests, or go on behind an end."""

import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dflash_cli.probing.servers.http_client import ServerUnreachable
from dflash_testing.fake_engines import Ids, Text
from dflash_testing.scripted_servers import Script

END = 7


@dataclass
class Drawing(Script):
    """A target with two choices for each next token. Of a sampled answer, the `drawn` tokens are drawn.

    has_no_seed  requests' seeds have no effect
    promises     SGLang draws by the request's seed
    """

    drawn: Literal["all", "first", "last of eight"] = "all"
    has_one_seed: bool = False
    has_no_seed: bool = False
    promises: bool = False
    surest: float = 0.2

    def likely(self, ids: Ids) -> dict[int, float]:
        draw = random.Random(f"{ids[-4:]}")
        first, gap = 100 + draw.randrange(900), self.surest + 3 * draw.random()
        total = math.log1p(math.exp(-gap))
        return {first: -total, first + 1: -gap - total}

    def as_document(self, path: str, document: Any) -> Any:
        is_info = self.promises and path == "/server_info"
        return document | {"enable_deterministic_inference": True} if is_info else document

    @property
    def is_sampled(self) -> bool:
        return False  # the tokens are drawn here

    def tokens(self, ids: Ids, num_tokens: int) -> Ids:
        seed = self.num_answers if self.has_no_seed else self.sampling_seed
        found, draw = list(ids), random.Random(f"{ids}" if self.has_one_seed else seed)
        for place in range(num_tokens):
            likely = self.likely(tuple(found))
            is_drawn = self.drawn == "all" or place == 0 or (self.drawn == "last of eight" and place % 8 == 0)
            weights = [math.exp(value) for value in likely.values()]
            found.append(draw.choices(list(likely), weights)[0] if super().is_sampled and is_drawn else min(likely))
        return tuple(found[len(ids) :])

    def scores(self, ids: Ids) -> list[dict[int, float]]:
        places = range(len(self.prompt_of(ids)), len(ids))
        return [{ids[place]: -12.0} | self.likely(ids[:place]) for place in places]

    def next_of(self, ids: Ids) -> dict[int, float]:
        return self.likely(ids)


@dataclass
class Certain(Drawing):
    """Each token of a drafted answer is told as certain."""

    def told_logprob(self, place: int, value: float) -> float:
        return 0.0


@dataclass
class Repeating(Script):
    """From the second answer to a prompt on, a draft token is accepted with `again_rate`."""

    again_rate: float = 1.0
    drafted_prompts: set[Ids] = field(default_factory=set)

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        is_again = ids in self.drafted_prompts
        self.drafted_prompts.add(ids)
        return super().steps(ids, num_tokens, self.again_rate if is_again else rate)


@dataclass
class Crowded(Script):
    """More than `most` requests at a time are refused. SGLang `declares` the limits."""

    most: int = 2
    declares: bool = False
    num_inside: int = 0

    def as_document(self, path: str, document: Any) -> Any:
        limits = {"max_running_requests": self.most - 1, "max_queued_requests": 1}
        return document | limits if self.declares and path == "/server_info" else document

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        self.change(1)
        try:
            if self.num_inside > self.most:
                raise ServerUnreachable("answered 503, after 4 tries", id="no-answer", path="http://scripted")
            time.sleep(0.003)
            return super().complete(ids, num_tokens, is_plain=is_plain, uses_cache=uses_cache)
        finally:
            self.change(-1)

    def change(self, by: int) -> None:
        with self.lock:
            self.num_inside += by


@dataclass
class Ending(Script):
    """Answers end with END after 30 tokens or more. Two of three have `behind` tokens more."""

    behind: int = 0

    def end_of(self, ids: Ids) -> int:
        return 30 + ids[-1] % 9

    def tokens(self, ids: Ids, num_tokens: int) -> Ids:
        own = super().tokens(ids, num_tokens)
        return tuple(END if place == self.end_of(ids) else token for place, token in enumerate(own))

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        begun = self.prompt_of(ids) if is_plain else ids
        left = self.end_of(begun) + 1 + self.behind * (begun[-1] % 3 > 0) - (len(ids) - len(begun))
        size = max(1, min(num_tokens, left))
        text = super().complete(ids, size, is_plain=is_plain, uses_cache=uses_cache)
        return replace(text, is_stopped=left <= num_tokens)

    def as_answer(self, path: str, answer: Any) -> Any:
        reason = as_mapping(answer.get("meta_info")).get("finish_reason", {})
        if "matched" in reason:
            reason["matched"] = END
        return answer

    def as_document(self, path: str, document: Any) -> Any:
        return document | {"eos_token": chr(END)} if path == "/props" else document


@dataclass
class Renamed(Script):
    """A gateway lists the model as its own."""

    def as_document(self, path: str, document: Any) -> Any:
        return {"data": [{"id": "org/model", "owned_by": "acme"}]} if path == "/v1/models" else document


def as_mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
