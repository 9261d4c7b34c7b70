"""SGLang's server. Sources: `srt/managers/tokenizer_manager.py`, `srt/entrypoints/http_server.py` of SGLang 0.5.23.

Each answer reports its steps. Two other sources are not used. `spec_accept_length` counts the token after the prompt
too, and the Prometheus gauges cover only the last moments.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dflash_cli.probing.served.served_answer import ServedAnswer, ServedSteps, as_id, ids_of
from dflash_cli.probing.served.told_logprobs import ToldLogprobs
from dflash_cli.probing.servers.inference_server import MEASURED, SERVERS, Asked, InferenceServer, Variant, new_salt
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_cli.probing.servers.shown_settings import adapters_of, lossy_settings, own_penalties, parent_of
from dflash_runtime.json_values import is_int

GENERATE, TOKENIZE = "/generate", "/tokenize"
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
"""Numbers of steps by accepted draft tokens. Here and below, 0.5.23 has the first name, earlier releases the others."""
ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")


@SERVERS.register("sglang")
class SglangServer(InferenceServer):
    """Drafts if it names an algorithm of speculation. Its number of draft tokens includes the anchor: K + 1.

    A seed counts only with `enable_deterministic_inference`. Other requests that name one may be refused.
    `context_length` is an option, null by default. `max_req_input_len` is what the server holds, less a few tokens. A
    server with `allow_auto_truncate` cuts longer prompts without an error, so longer prompts are asked too.
    """

    name = "sglang"
    title = "SGLang"
    owner = "sglang"
    own_fields: ClassVar[Mapping[str, str]] = {
        "/server_info": "speculative_algorithm", "/get_server_info": "speculative_algorithm",
    }  # fmt: skip
    counter_names: ClassVar[Mapping[str, str]] = {
        "num_drafts": "sglang:spec_verify_calls",
        "num_requests": "sglang:num_requests",
        "num_tokens": "sglang:generation_tokens",
        "num_cached_tokens": "sglang:cached_tokens",
    }
    load_names: ClassVar[Mapping[str, str]] = {
        "running": "sglang:num_running_reqs",
        "waiting": "sglang:num_queue_reqs",
        "queue_s": "sglang:queue_time_seconds_sum",
    }
    can_score = True
    takes_seed = False
    keeps_seed = False
    neutral: ClassVar[Mapping[str, Any]] = {
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    definition = "sglang"
    how_to_report = "--speculative-algorithm DFLASH and --speculative-draft-model-path"
    how_to_report_steps = "a release that has spec_accept_histogram or spec_correct_drafts_histogram"

    _parent: str | None = None
    _adapters: tuple[str, ...] = ()
    """The parent of the asked model if it is an adapter, and the names of adapters that requests can use."""

    def without_adapter(self) -> InferenceServer | None:
        return self.with_model(self._parent)

    def describe(self) -> ServerFacts:
        found = self.find("/server_info") or self.find("/get_server_info")
        models = self.find("/v1/models").get("data")
        self._parent = parent_of(models, self.model)
        self._adapters = (self.model,) if self._parent else adapters_of(models, self.model)
        block = found.get("speculative_num_draft_tokens")
        self.takes_seed = found.get("enable_deterministic_inference") is True
        return ServerFacts(
            engine=self.name,
            release=found.get("version"),
            model=self.model,
            is_drafting=bool(found["speculative_algorithm"]) if "speculative_algorithm" in found else None,
            num_draft_tokens=block - 1 if is_int(block) else None,
            target=found.get("model_path"),
            draft=found.get("speculative_draft_model_path"),
            method=found.get("speculative_algorithm"),
            max_concurrency=found.get("max_running_requests"),
            max_queued=found.get("max_queued_requests"),
            max_len=_longest(found),
            kv_dtype=found.get("kv_cache_dtype"),
            has_prefix_cache=_opposite(found.get("disable_radix_cache")),
            cache_block=found.get("page_size"),
            lossy=lossy_settings(found),
            adapters=() if self._parent else self._adapters,
            active_adapter=self.model if self._parent else None,
            own_penalties=own_penalties(found.get("preferred_sampling_params"), self.neutral),
        )

    def answer(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ServedAnswer:
        return self.post(GENERATE, self._body(prompt_ids, asked, variant), _read_answer)

    def told_logprobs(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ToldLogprobs:
        return self.post(GENERATE, {**self._body(prompt_ids, asked, variant), "return_logprob": True}, _read_told)

    def _body(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant) -> dict[str, Any]:
        sampling: dict[str, Any] = {
            "max_new_tokens": asked.max_new_tokens,
            "ignore_eos": asked.ignore_eos,
            **self.sampling_fields(asked, variant),
        }
        if self.takes_seed and sampling["temperature"]:
            sampling["sampling_seed"] = asked.seed
        if variant.json_schema is not None:
            sampling["json_schema"] = json.dumps(variant.json_schema)
        fresh = {"extra_key": new_salt()} if variant.is_fresh else {}
        return {"input_ids": list(prompt_ids), "sampling_params": sampling, **fresh, **self._adapter_fields()}

    def _adapter_fields(self) -> Mapping[str, str]:
        """The field that names an adapter, because requests of token ids cannot name a model."""
        return {"lora_path": self.model} if self.model in self._adapters else {}

    def next_logprobs(self, text_ids: Sequence[int]) -> Mapping[int, float]:
        body = {
            "input_ids": list(text_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "top_logprobs_num": 5,
            **self._adapter_fields(),
        }
        return self.post(GENERATE, body, _read_logprobs)

    def score(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[dict[int, float]]:
        # Without a key of its own the request would read the prompt from the prefix cache, which may be at fault.
        body = {
            "input_ids": [*prompt_ids, *answer_ids],
            "extra_key": new_salt(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": max(0, len(prompt_ids) - 1),
            "top_logprobs_num": 1,
            **self._adapter_fields(),
        }
        return self.post(GENERATE, body, lambda document: _read_scores(document, len(answer_ids)))

    def encode(self, text: str) -> list[int]:
        return self.post(TOKENIZE, {"model": self.model, "prompt": text}, ids_of)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        body = {"model": self.model, "messages": list(messages), "chat_template_kwargs": dict(options)}
        return self.post(TOKENIZE, body, ids_of)


def _read_answer(document: Any) -> ServedAnswer:
    meta = document["meta_info"]
    histogram = _first(meta, HISTOGRAMS)
    return ServedAnswer(
        token_ids=tuple(ids_of(document, "output_ids")),
        text=document["text"],
        finish_reason=meta["finish_reason"]["type"],
        end_id=as_id(meta["finish_reason"].get("matched")),
        steps=ServedSteps.of_histogram(histogram) if histogram else None,
        num_steps=meta.get("spec_verify_ct"),
        num_accepted=_first(meta, ACCEPTED),
        num_drafted=_first(meta, PROPOSED),
        num_cached=meta.get("cached_tokens"),
        num_prompt=meta.get("prompt_tokens"),
        id=meta.get("id"),
    )


def _read_told(document: Any) -> ToldLogprobs:
    found = document["meta_info"].get("output_token_logprobs") or ()
    return ToldLogprobs.of(
        ids_of(document, "output_ids"), [item[0] for item in found], [int(item[1]) for item in found]
    )


def _read_logprobs(document: Any) -> dict[int, float]:
    return {int(item[1]): float(item[0]) for item in document["meta_info"]["output_top_logprobs"][0]}


def _longest(found: Mapping[str, Any]) -> int | None:
    length = found.get("context_length")
    return length if found.get("allow_auto_truncate") else found.get("max_req_input_len", length)


def _opposite(value: object) -> bool | None:
    return not value if isinstance(value, bool) else None


def _read_scores(document: Any, count: int) -> list[dict[int, float]]:
    meta = document["meta_info"]
    own, top = meta["input_token_logprobs"][-count:], meta["input_top_logprobs"][-count:]
    places = [[*likeliest, token] for token, likeliest in zip(own, top, strict=True)]
    return [{int(item[1]): float(item[0]) for item in place} for place in places]


def _first(meta: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value of the first of these names that exists. Names differ between releases."""
    return next((meta[name] for name in names if meta.get(name) is not None), None)
