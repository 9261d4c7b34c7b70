"""llama.cpp's server. Sources: `tools/server/server-task.cpp`, `server-context.cpp`, `server-common.cpp` and
`server-schema.cpp` of llama.cpp, 24 August 2026.

An answer's `timings` have the numbers of drafted and accepted tokens, but neither steps nor positions. With `--metrics`
the server counts steps and positions over all requests. If requests come one at a time, the rise of the counters
belongs to one answer.

Without `--metrics` only a lower bound of the number of steps is known, and only if each step drafts. A step adds one
token that was not drafted, and drafts at most K tokens. The last token may come without a draft. The length is
therefore an upper bound.

`/props` shows defaults in place of the settings of drafting. The settings of each answer are the server's own.
Releases that list `speculative.n_max` there let a request change it. Later ones always draft, but not in answers of
two tokens: a draft must leave room for the target's own token.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any, ClassVar

from dflash_cli.probing.served.served_answer import ServedAnswer, ids_of
from dflash_cli.probing.served.told_logprobs import ToldLogprobs
from dflash_cli.probing.servers.inference_server import (
    MAX_SHOWN_CHARS,
    MEASURED,
    SERVERS,
    Asked,
    InferenceServer,
    Variant,
)
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_cli.probing.servers.shown_settings import own_penalties
from dflash_runtime.errors import DFlashError
from dflash_runtime.json_values import as_object, is_int, is_number
from dflash_runtime.phrases import shorten

COMPLETION, TOKENIZE, TEMPLATE = "/completion", "/tokenize", "/apply-template"
NO_DRAFT = ("", "none")
METHODS, MOST = ("speculative.types", "speculative.type"), "speculative.n_max"
"""Settings of an answer: the method of drafting, by its names of two releases, and K of earlier releases."""
MAX_END_IDS = 2
"""Ids of an end token's text: a token that begins any text, and the end token. Ordinary text has more."""
PIECE = 2
"""Tokens of the longest answer that is not drafted."""


@SERVERS.register("llama.cpp")
class LlamaCppServer(InferenceServer):
    """Reads from `/slots` whether the server can draft, because the counters exist with and without a draft."""

    name = "llama.cpp"
    title = "llama.cpp"
    owner = "llamacpp"
    own_fields: ClassVar[Mapping[str, str]] = {"/props": "default_generation_settings"}
    counter_names: ClassVar[Mapping[str, str]] = {
        "num_drafts": "llamacpp:spec_decode_num_drafts",
        "num_draft_tokens": "llamacpp:spec_decode_num_draft_tokens",
        "num_accepted_tokens": "llamacpp:spec_decode_num_accepted_tokens",
        "per_pos_accepted": "llamacpp:spec_decode_num_accepted_tokens_per_pos",
        "num_tokens": "llamacpp:tokens_predicted",
    }
    load_names: ClassVar[Mapping[str, str]] = {
        "running": "llamacpp:requests_processing",
        "waiting": "llamacpp:requests_deferred",
    }
    drafts_every_step = False
    neutral: ClassVar[Mapping[str, Any]] = {
        "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "dry_multiplier": 0.0,
    }  # fmt: skip
    can_answer_plainly = True
    how_to_report = "--model-draft and --metrics"
    how_to_report_steps = "--metrics, and ask with --concurrency 1"

    _takes_most = False
    """Whether an answer listed MOST, so that requests can change it."""

    @property
    def plain_fields(self) -> Mapping[str, Any]:
        return {MOST: 0} if self._takes_most else {}

    def num_requests_of(self, num_tokens: int, variant: Variant) -> int:
        return math.ceil(num_tokens / PIECE) if variant.is_plain and not self.plain_fields else 1

    _end: tuple[int, ...] | None = None
    """The token that ends answers; None before it was looked for."""
    _active: tuple[Mapping[str, Any], ...] = ()
    """The adapters that the server applies to each request."""
    _scales: tuple[Mapping[str, Any], ...] = ()
    """The scales of adapters that requests ask for; empty for the server's own."""

    def describe(self) -> ServerFacts:
        props, slots = self.find("/props"), self._drafting_slots()
        defaults = as_object(as_object(props.get("default_generation_settings")).get("params"))
        return ServerFacts(
            engine=self.name,
            release=props.get("build_info"),
            model=self.model,
            target=props.get("model_path"),
            is_drafting=any(slots) if slots else None,
            max_concurrency=props.get("total_slots"),
            max_len=as_object(props.get("default_generation_settings")).get("n_ctx"),
            cache_block=1,
            active_adapter=self._find_active(),
            end_ids=self._find_end(props.get("eos_token")),
            own_penalties=own_penalties(defaults, self.neutral),
            undrafted_slots=slots.count(False) if any(slots) else None,
        )

    def _find_end(self, text: object) -> tuple[int, ...]:
        """The token of the text that `/props` names as the end, behind the special tokens that begin any text."""
        if self._end is None and isinstance(text, str) and text:
            self._end = ()
            with suppress(DFlashError):
                ids = self.encode(text)
                self._end = tuple(ids[-1:]) if len(ids) <= MAX_END_IDS else ()
        return self._end or ()

    def _find_active(self) -> str | None:
        """The adapters with a scale other than 0, by `/lora-adapters`, with their scales."""
        listed = self.client.find("/lora-adapters")
        items = [as_object(item) for item in listed] if isinstance(listed, list) else []
        self._active = tuple(item for item in items if item.get("scale") and is_number(item["scale"]))
        names = [
            f"{shorten(str(item.get('path')), MAX_SHOWN_CHARS)} at scale {item['scale']:g}" for item in self._active
        ]
        return ", ".join(names) or None

    def without_adapter(self) -> InferenceServer | None:
        if not self._active:
            return None
        other = copy.copy(self)
        other._scales = tuple({"id": item.get("id"), "scale": 0} for item in self._active)
        return other

    def _drafting_slots(self) -> list[bool]:
        """Whether each slot can draft, by `/slots`; empty if the server does not show it."""
        slots = self.client.find("/slots")
        flags = [as_object(item).get("speculative") for item in slots] if isinstance(slots, list) else []
        return [flag for flag in flags if isinstance(flag, bool)]

    def answer(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ServedAnswer:
        if self.num_requests_of(asked.max_new_tokens, variant) == 1:
            return self.post(COMPLETION, self._body(prompt_ids, asked, variant), self._read_answer)
        found = self._pieces(prompt_ids, asked, variant)
        pieces = [self.read(self._read_answer, item, COMPLETION) for item in found]
        return replace(
            pieces[0],
            token_ids=tuple(token for piece in pieces for token in piece.token_ids),
            text="".join(piece.text for piece in pieces),
            finish_reason=pieces[-1].finish_reason,
            num_drafted=sum(piece.num_drafted or 0 for piece in pieces) or None,
            decode_ms=None,
        )

    def _pieces(
        self, prompt_ids: Sequence[int], asked: Asked, variant: Variant, **more: Any
    ) -> Iterator[Mapping[str, Any]]:
        """An answer without drafts, by requests of PIECE tokens.

        The first reads no cache. The others go on in its slot, which holds no key of a drafted token.
        """
        ids, end = list(prompt_ids), len(prompt_ids) + asked.max_new_tokens
        while len(ids) < end:
            body = self._body(ids, replace(asked, max_new_tokens=min(PIECE, end - len(ids))), variant)
            document = self.post(COMPLETION, {**body, **more}, as_object)
            yield document
            ids += (found := self.read(ids_of, document, COMPLETION))
            if not found or document.get("stop_type") != "limit":
                return
            more |= {"cache_prompt": True, "id_slot": document.get("id_slot", -1)}

    def told_logprobs(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ToldLogprobs:
        if self.num_requests_of(asked.max_new_tokens, variant) > 1:
            pieces = self._pieces(prompt_ids, asked, variant, n_probs=1)
            return ToldLogprobs.joined([self.read(_read_told, item, COMPLETION) for item in pieces])
        return self.post(COMPLETION, {**self._body(prompt_ids, asked, variant), "n_probs": 1}, _read_told)

    def _body(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant) -> dict[str, Any]:
        return {
            "prompt": list(prompt_ids),
            "n_predict": asked.max_new_tokens,
            "seed": asked.seed,
            "ignore_eos": asked.ignore_eos,
            "return_tokens": True,
            "cache_prompt": variant.uses_cache,
            **self.sampling_fields(asked, variant),
            **(self.plain_fields if variant.is_plain else {}),
            **({} if variant.json_schema is None else {"json_schema": variant.json_schema}),
            **({"lora": list(self._scales)} if self._scales else {}),
        }

    def _read_answer(self, document: Any) -> ServedAnswer:
        timings, settings = document["timings"], as_object(document.get("generation_settings"))
        self._takes_most |= MOST in settings
        method = next((settings[name] for name in METHODS if name in settings), None)
        num_draft_tokens = settings.get(MOST) if is_int(settings.get(MOST)) else None
        return ServedAnswer(
            token_ids=tuple(ids_of(document)),
            text=document["content"],
            finish_reason="length" if document.get("stop_type") == "limit" else "stop",
            num_steps=_least_steps(timings, num_draft_tokens),
            num_accepted=timings.get("draft_n_accepted"),
            num_drafted=timings.get("draft_n"),
            num_draft_tokens=num_draft_tokens,
            num_cached=timings.get("cache_n"),
            num_prompt=document.get("tokens_evaluated"),
            decode_ms=timings.get("predicted_ms"),
            method=None if method in NO_DRAFT else method,
        )

    def next_logprobs(self, text_ids: Sequence[int]) -> Mapping[int, float]:
        body = {"prompt": list(text_ids), "n_predict": 1, "temperature": 0, "n_probs": 5, "cache_prompt": False}
        return self.post(COMPLETION, body, _read_logprobs)

    def encode(self, text: str) -> list[int]:
        return self.post(TOKENIZE, {"content": text, "add_special": True, "parse_special": True}, ids_of)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """The server takes the first special token off the rendered text, and adds it as to any text."""
        body = {"messages": list(messages), "chat_template_kwargs": dict(options)}
        return self.encode(self.post(TEMPLATE, body, itemgetter("prompt")))


def _least_steps(timings: Mapping[str, Any], num_draft_tokens: int | None) -> int | None:
    if not timings.get("draft_n"):
        return None
    num_drafted: int = timings["draft_n"]
    undrafted: int = timings["predicted_n"] - 1 - timings["draft_n_accepted"]
    return max(1, undrafted - 1, math.ceil(num_drafted / (num_draft_tokens or num_drafted)))


def _read_told(document: Any) -> ToldLogprobs:
    found = document.get("completion_probabilities") or ()
    return ToldLogprobs.of(ids_of(document), [item["logprob"] for item in found], [int(item["id"]) for item in found])


def _read_logprobs(document: Any) -> dict[int, float]:
    top = document["completion_probabilities"][0]["top_logprobs"]
    return {int(item["id"]): float(item["logprob"]) for item in top}
