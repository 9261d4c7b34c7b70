"""vLLM's server. Sources: `vllm/entrypoints/openai/completion/serving.py`, `vllm/v1/metrics/stats.py` and
`docs/features/speculative_decoding/acceptance_metrics.md` of vLLM 0.33.

From release 0.29 on, each answer reports its steps if the server was started with this option. `summary` counts the
steps by accepted draft tokens. `detailed` lists each step in order. Earlier releases have counters only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dflash_cli.probing.served.served_answer import ServedAnswer, ServedSteps, as_id, ids_of, steps_of
from dflash_cli.probing.served.told_logprobs import ToldLogprobs
from dflash_cli.probing.servers.inference_server import MEASURED, SERVERS, Asked, InferenceServer, Variant, new_salt
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_cli.probing.servers.shown_settings import adapters_of, lossy_settings, parent_of
from dflash_runtime.json_values import as_index, as_object

COMPLETIONS, TOKENIZE = "/v1/completions", "/tokenize"
SETTINGS = "/server_info?config_format=json"
ID_PREFIX = "token_id:"
CACHE_CONFIG = "vllm:cache_config_info"


@SERVERS.register("vllm")
class VllmServer(InferenceServer):
    """Has speculative counters if and only if a draft is configured, with one position per drafted token."""

    name = "vllm"
    title = "vLLM"
    owner = "vllm"
    schema_field = "structured_outputs"
    own_fields: ClassVar[Mapping[str, str]] = {SETTINGS: "vllm_config"}
    counter_names: ClassVar[Mapping[str, str]] = {
        "num_drafts": "vllm:spec_decode_num_drafts",
        "num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
        "num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
        "per_pos_accepted": "vllm:spec_decode_num_accepted_tokens_per_pos",
        "num_requests": "vllm:request_success",
        "num_tokens": "vllm:generation_tokens",
        "num_cached_tokens": "vllm:prefix_cache_hits",
    }
    load_names: ClassVar[Mapping[str, str]] = {
        "running": "vllm:num_requests_running",
        "waiting": "vllm:num_requests_waiting",
        "queue_s": "vllm:request_queue_time_seconds_sum",
    }
    can_score = True
    neutral: ClassVar[Mapping[str, Any]] = {
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip
    how_to_report = "--speculative-config, and without --disable-log-stats"
    how_to_report_steps = "--per-request-spec-decode-metrics detailed (vLLM 0.29 or newer)"

    _parent: str | None = None
    """The parent of the asked model if it is an adapter."""

    def without_adapter(self) -> InferenceServer | None:
        return self.with_model(self._parent)

    def describe(self) -> ServerFacts:
        metrics = self.metrics()
        counters, cache = metrics.counters, metrics.infos.get(CACHE_CONFIG, {})
        models = self.find("/v1/models").get("data")
        model = _first_of(models, self.model)
        self._parent = parent_of(models, self.model)
        return ServerFacts(
            engine=self.name,
            release=self.find("/version").get("version"),
            model=self.model,
            is_drafting=counters is not None,
            num_draft_tokens=len(counters.per_pos_accepted) or None if counters is not None else None,
            target=model.get("root"),
            adapters=adapters_of(models, self.model),
            active_adapter=self.model if self._parent else None,
            max_len=model.get("max_model_len"),
            kv_dtype=cache.get("cache_dtype"),
            has_prefix_cache={"true": True, "false": False}.get(cache.get("enable_prefix_caching", "").lower()),
            cache_block=as_index(cache.get("block_size", "")),
            lossy=lossy_settings(self.find(SETTINGS) or self.find("/server_info")),
        )

    def answer(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ServedAnswer:
        return self.post(COMPLETIONS, self._body(prompt_ids, asked, variant), _read_answer)

    def told_logprobs(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ToldLogprobs:
        more = {"logprobs": 1, "return_tokens_as_token_ids": True}
        return self.post(COMPLETIONS, {**self._body(prompt_ids, asked, variant), **more}, _read_told)

    def _body(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant) -> dict[str, Any]:
        sampling = self.sampling_fields(asked, variant)
        body = {
            "model": self.model,
            "prompt": list(prompt_ids),
            "max_tokens": asked.max_new_tokens,
            "ignore_eos": asked.ignore_eos,
            "return_token_ids": True,
            **sampling,
        } | ({"seed": asked.seed} if sampling["temperature"] else {})
        if variant.is_fresh:
            body["cache_salt"] = new_salt()
        if variant.json_schema is not None and variant.by_own_field:
            body[self.schema_field] = {"json": variant.json_schema}
        elif variant.json_schema is not None:
            schema = {"name": "answer", "schema": variant.json_schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def next_logprobs(self, text_ids: Sequence[int]) -> Mapping[int, float]:
        body = {
            "model": self.model,
            "prompt": list(text_ids),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 5,
            "return_tokens_as_token_ids": True,
        }
        return self.post(COMPLETIONS, body, _read_logprobs)

    def score(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[dict[int, float]]:
        body = {
            "model": self.model,
            "prompt": [*prompt_ids, *answer_ids],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 1,
        }
        return self.post(COMPLETIONS, body, lambda document: _read_scores(document, len(answer_ids)))

    def encode(self, text: str) -> list[int]:
        return self.post(TOKENIZE, {"model": self.model, "prompt": text}, ids_of)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        body = {"model": self.model, "messages": list(messages), "add_generation_prompt": True}
        return self.post(TOKENIZE, {**body, "chat_template_kwargs": dict(options)}, ids_of)


def _read_answer(document: Any) -> ServedAnswer:
    choice, usage = document["choices"][0], as_object(document.get("usage"))
    return ServedAnswer(
        token_ids=tuple(ids_of(choice, "token_ids")),
        text=choice["text"],
        finish_reason=choice["finish_reason"],
        end_id=as_id(choice.get("stop_reason")),
        steps=_steps(document),
        num_draft_tokens=_acceptance(document).get("num_spec_tokens"),
        num_cached=as_object(usage.get("prompt_tokens_details")).get("cached_tokens"),
        num_prompt=usage.get("prompt_tokens"),
        id=document.get("id"),
    )


def _read_told(document: Any) -> ToldLogprobs:
    choice = document["choices"][0]
    found = as_object(choice.get("logprobs"))
    names = [str(name).removeprefix(ID_PREFIX) for name in found.get("tokens") or ()]
    ids = [int(name) for name in names] if names and all(map(str.isdecimal, names)) else None
    return ToldLogprobs.of(ids_of(choice, "token_ids"), found.get("token_logprobs") or (), ids)


def _read_logprobs(document: Any) -> dict[int, float]:
    top = document["choices"][0]["logprobs"]["top_logprobs"][0]
    return {int(name.removeprefix(ID_PREFIX)): float(value) for name, value in top.items()}


def _read_scores(document: Any, count: int) -> list[dict[int, float]]:
    found = document["choices"][0]["prompt_logprobs"][-count:]
    return [{int(token): float(item["logprob"]) for token, item in place.items()} for place in found]


def _first_of(models: Any, name: str) -> Mapping[str, Any]:
    items = [as_object(item) for item in models] if isinstance(models, list) else []
    return next((item for item in items if item.get("id") == name), {})


def _acceptance(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return (document.get("metrics") or {}).get("speculative_decoding") or {}


def _steps(document: Mapping[str, Any]) -> ServedSteps | None:
    """The steps from the most detailed field: in order, by draft length, or by accepted draft tokens only."""
    found = _acceptance(document)
    if not found:
        return None
    if found.get("per_step_accepted"):
        return ServedSteps(
            accepted=tuple(found["per_step_accepted"]), drafted=tuple(found["per_step_drafted"]), is_ordered=True
        )
    by_length = found.get("acceptance_histogram_by_draft_length")
    if not by_length:
        return ServedSteps.of_histogram(found["acceptance_histogram"])
    pairs = [(accepted, int(drafted)) for drafted, accepted in steps_of(by_length)]
    return ServedSteps(accepted=tuple(pair[0] for pair in pairs), drafted=tuple(pair[1] for pair in pairs))
