"""llama.cpp's server. Sources: `tools/server/server-task.cpp` and `tools/server/README.md` of llama.cpp, pull requests
24536 and 26389.

An answer's `timings` have the numbers of drafted and accepted tokens, but neither steps nor positions. With `--metrics`
the server counts steps and positions over all requests. If requests come one at a time, the rise of the counters
belongs to one answer.

Without `--metrics` only a lower bound of the number of steps is known. Each step adds one token that was not drafted,
and drafts at most K tokens. The length is therefore an upper bound.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar

from dflash_cli.probing.inference_server import (
    MAX_SHOWN_CHARS,
    MEASURED,
    SERVERS,
    Asked,
    InferenceServer,
    ServedAnswer,
    ServerFacts,
    Variant,
    ids_of,
)
from dflash_cli.probing.own_penalties import own_penalties
from dflash_cli.probing.told_logprobs import ToldLogprobs
from dflash_runtime.json_values import as_object, is_number
from dflash_runtime.phrases import shorten

COMPLETION, TOKENIZE, TEMPLATE = "/completion", "/tokenize", "/apply-template"
NO_DRAFT = ("", "none")


@SERVERS.register("llama.cpp")
class LlamaCppServer(InferenceServer):
    """Reads from `/props` whether a draft is configured, because the counters exist with and without a draft."""

    name = "llama.cpp"
    title = "llama.cpp"
    owner = "llamacpp"
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
    plain_fields: ClassVar[Mapping[str, Any]] = {"speculative.n_max": 0}
    how_to_report = "--model-draft and --metrics"
    how_to_report_steps = "--metrics, and ask with --concurrency 1"

    _num_draft_tokens: int | None = None
    _active: tuple[Mapping[str, Any], ...] = ()
    """The adapters that the server applies to each request."""
    _scales: tuple[Mapping[str, Any], ...] = ()
    """The scales of adapters that requests ask for; empty for the server's own."""

    def describe(self) -> ServerFacts:
        props = self.find("/props")
        params = as_object(as_object(props.get("default_generation_settings")).get("params"))
        kind = params.get("speculative.type", params.get("speculative.types"))
        kind = ",".join(map(str, kind)) if isinstance(kind, list) else kind
        is_drafting = None if kind is None else kind not in NO_DRAFT
        facts = ServerFacts(
            engine=self.name,
            release=props.get("build_info"),
            model=self.model,
            target=props.get("model_path"),
            method=kind if is_drafting else None,
            is_drafting=is_drafting,
            num_draft_tokens=params.get("speculative.n_max") if is_drafting else None,
            max_concurrency=props.get("total_slots"),
            max_len=as_object(props.get("default_generation_settings")).get("n_ctx"),
            cache_block=1,
            active_adapter=self._find_active(),
            own_penalties=own_penalties(params, self.neutral),
            undrafted_slots=self._undrafted_slots(),
        )
        self._num_draft_tokens = facts.num_draft_tokens
        return facts

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

    def _undrafted_slots(self) -> int | None:
        """How many slots cannot draft, by `/slots`; None if the server shows none, or none that can."""
        slots = self.client.find("/slots")
        flags = [as_object(item).get("speculative") for item in slots] if isinstance(slots, list) else []
        return flags.count(False) if True in flags else None

    def answer(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ServedAnswer:
        return self.post(COMPLETION, self._body(prompt_ids, asked, variant), self._read_answer)

    def told_logprobs(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ToldLogprobs:
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
        timings = document["timings"]
        return ServedAnswer(
            token_ids=tuple(ids_of(document)),
            text=document["content"],
            finish_reason="length" if document.get("stop_type") == "limit" else "stop",
            num_steps=self._least_steps(timings),
            num_accepted=timings.get("draft_n_accepted"),
            num_drafted=timings.get("draft_n"),
            num_cached=timings.get("cache_n"),
            num_prompt=document.get("tokens_evaluated"),
            decode_ms=timings.get("predicted_ms"),
        )

    def _least_steps(self, timings: Mapping[str, Any]) -> int | None:
        if not timings.get("draft_n"):
            return None
        num_drafted: int = timings["draft_n"]
        undrafted: int = timings["predicted_n"] - 1 - timings["draft_n_accepted"]
        return max(1, undrafted, math.ceil(num_drafted / (self._num_draft_tokens or num_drafted)))

    def next_logprobs(self, text_ids: Sequence[int]) -> Mapping[int, float]:
        body = {"prompt": list(text_ids), "n_predict": 1, "temperature": 0, "n_probs": 5, "cache_prompt": False}
        return self.post(COMPLETION, body, _read_logprobs)

    def encode(self, text: str) -> list[int]:
        return self._tokenize(text, add_special=True)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        body = {"messages": list(messages), "chat_template_kwargs": dict(options)}
        return self._tokenize(self.post(TEMPLATE, body, itemgetter("prompt")), add_special=False)

    def _tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return self.post(TOKENIZE, {"content": text, "add_special": add_special, "parse_special": True}, ids_of)


def _read_told(document: Any) -> ToldLogprobs:
    found = document.get("completion_probabilities") or ()
    return ToldLogprobs.of(ids_of(document), [item["logprob"] for item in found], [int(item["id"]) for item in found])


def _read_logprobs(document: Any) -> dict[int, float]:
    top = document["completion_probabilities"][0]["top_logprobs"]
    return {int(item["id"]): float(item["logprob"]) for item in top}
