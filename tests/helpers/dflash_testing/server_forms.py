"""Documents, answers and texts of metrics, in the shape that each engine prints them.

`prometheus_client` is behind the metrics of vLLM and SGLang, and adds `_total` and labels; vLLM's have `_created` too.
llama.cpp's are as `server-task.cpp` writes them.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dflash_testing.fake_engines import FakeEngine, Text

NAME = "speculative.types"
"""llama.cpp's methods of drafting in the settings of an answer."""
PATHS = {"vllm": "/v1/completions", "sglang": "/generate", "llama.cpp": "/completion"}


def said(body: Mapping[str, Any]) -> str:
    """A conversation as one text."""
    return "".join(f"<{item['role']}>{item['content']}" for item in body["messages"]) + "<assistant>"


def read_body(engine: FakeEngine, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a request under one set of names for every engine."""
    sampling = body.get("sampling_params", {})
    return {
        "ids": body.get("prompt") or body.get("input_ids"),
        "num_tokens": body.get("max_tokens") or body.get("n_predict") or sampling.get("max_new_tokens"),
        "wants_logprobs": any(body.get(name) for name in ("logprobs", "n_probs", "return_logprob")),
        "temperature": body.get("temperature", sampling.get("temperature")),
    }


def documents(engine: FakeEngine) -> dict[str, Any]:
    """Return the document at each path except the metrics."""
    owner = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp"}[engine.style]
    found: dict[str, Any] = {
        "/v1/models": {"object": "list", "data": [{"id": "org/model", "owned_by": owner, "max_model_len": 8192}]}
    }
    if engine.style == "vllm":
        found["/version"] = {"version": engine.release}
    elif engine.style == "sglang":
        found["/get_server_info" if engine.old_names else "/server_info"] = {
            "version": engine.release,
            "speculative_algorithm": "DFLASH" if engine.has_draft else None,
            "speculative_num_draft_tokens": engine.k + 1 if engine.has_draft else None,
            "speculative_draft_model_path": "org/draft" if engine.has_draft else None,
            "max_running_requests": 48,
            "context_length": None,
            "max_req_input_len": 8186,
            "kv_cache_dtype": engine.kv_dtype,
            "disable_radix_cache": engine.cache == "off",
            "page_size": engine.block,
        }
    else:
        # The parameters are defaults, whatever the server does.
        params = {"speculative.type": "none", "speculative.n_max": 16} if engine.old_names else {NAME: "none"}
        found["/props"] = {
            "default_generation_settings": {"params": params, "n_ctx": 8192},
            "total_slots": engine.num_slots,
            "build_info": "b10902-0a1b2c3",
        }
        slot = {"n_ctx": 8192, "speculative": engine.has_draft, "is_processing": False}
        found["/slots"] = [{"id": place, **slot} for place in range(engine.num_slots)]
    return found


def vllm_answer(engine: FakeEngine, text: Text) -> dict[str, Any]:
    reason = "stop" if text.is_stopped else "length"
    choice = {
        "index": 0,
        "text": text.text,
        "token_ids": list(text.token_ids),
        "finish_reason": reason,
        "logprobs": None,
    }
    answer: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "metrics": None}
    if engine.has_draft and engine.reports != "nothing":
        answer["metrics"] = {"speculative_decoding": vllm_steps(engine, text)}
    return answer


def vllm_steps(engine: FakeEngine, text: Text) -> dict[str, Any]:
    """As `RequestSpecDecodeMetrics.to_dict` of vLLM 0.33 says it."""
    steps, accepted, drafted = len(text.accepted), sum(text.accepted), engine.drafted or engine.k
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / (drafted * steps) if steps else 0.0,
        "acceptance_histogram": [text.accepted.count(number) for number in range(engine.k + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted * steps,
        "num_spec_tokens": engine.k,
    }
    if engine.reports == "detailed":
        found |= {"per_step_accepted": list(text.accepted), "per_step_drafted": [drafted] * steps}
    return found


def sglang_answer(engine: FakeEngine, text: Text) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": f"r{engine.num_answers}",
        "finish_reason": {"type": "stop", "matched": text.token_ids[-1]}
        if text.is_stopped
        else {"type": "length", "length": len(text.token_ids)},
        "prompt_tokens": text.num_prompt,
        "completion_tokens": len(text.token_ids),
        "cached_tokens": text.num_cached,
    }
    steps = len(text.accepted)
    if steps:
        names = (
            ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram")
            if engine.old_names
            else ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram")
        )
        histogram = [text.accepted.count(number) for number in range(max(text.accepted) + 1)]
        meta |= dict(zip(names, (sum(text.accepted), (engine.drafted or engine.k) * steps, histogram), strict=True))
        meta |= {"spec_verify_ct": steps, "spec_accept_length": len(text.token_ids) / steps}
    return {"text": text.text, "output_ids": list(text.token_ids), "meta_info": meta}


def llama_answer(engine: FakeEngine, text: Text) -> dict[str, Any]:
    timings: dict[str, Any] = {"cache_n": text.num_cached, "prompt_n": text.num_prompt - text.num_cached}
    timings |= {"predicted_n": len(text.token_ids), "predicted_ms": 12.5}
    if text.accepted:
        timings |= {
            "draft_n": (engine.drafted or engine.k) * len(text.accepted),
            "draft_n_accepted": sum(text.accepted),
        }
    method = engine.method if engine.has_draft else "none"
    settings = {"speculative.type": method, "speculative.n_max": engine.k} if engine.old_names else {NAME: method}
    return {
        "content": text.text,
        "tokens": list(text.token_ids),
        "id_slot": 0,
        "tokens_predicted": len(text.token_ids),
        "tokens_evaluated": text.num_prompt,
        "generation_settings": settings,
        "stop_type": "eos" if text.is_stopped else "limit",
        "timings": timings,
    }


ANSWERS = {"vllm": vllm_answer, "sglang": sglang_answer, "llama.cpp": llama_answer}
LOGPROBS: Mapping[str, Callable[[Mapping[int, float]], Any]] = {
    "vllm": lambda found: {
        "choices": [{"logprobs": {"top_logprobs": [{f"token_id:{item}": value for item, value in found.items()}]}}]
    },
    "sglang": lambda found: {
        "meta_info": {"output_top_logprobs": [[[value, item, None] for item, value in found.items()]]}
    },
    "llama.cpp": lambda found: {
        "completion_probabilities": [
            {"top_logprobs": [{"id": item, "token": "x", "logprob": value} for item, value in found.items()]}
        ]
    },
}


def vllm_metrics(engine: FakeEngine) -> str:
    labels, counts = 'engine="0",model_name="org/model"', engine.counts
    lines = [
        *family("vllm:generation_tokens", "Number of generation tokens processed.", {labels: counts["tokens"]}),
        *family(
            "vllm:request_success",
            "Count of successfully processed requests.",
            {
                f'engine="0",finished_reason="{reason}",model_name="org/model"': counts["requests"]
                * (reason == "length")
                for reason in ("stop", "length", "abort", "error", "repetition")
            },
        ),
    ]
    if engine.cache != "untold":
        lines += family("vllm:prefix_cache_hits", "Prefix cache hits, in tokens.", {labels: counts["cached"]})
        config = f'block_size="{engine.block}",cache_dtype="{engine.kv_dtype}",enable_prefix_caching'
        lines += [f'vllm:cache_config_info{{{config}="{engine.cache != "off"}"}} 1.0']
    if engine.started_s is not None:
        lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {engine.started_s}"]
    if engine.has_draft:
        lines += family("vllm:spec_decode_num_drafts", "Number of spec decoding drafts.", {labels: counts["drafts"]})
        lines += family("vllm:spec_decode_num_draft_tokens", "Number of draft tokens.", {labels: counts["drafted"]})
        lines += family(
            "vllm:spec_decode_num_accepted_tokens", "Number of accepted tokens.", {labels: counts["accepted"]}
        )
        lines += family(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens per draft position.",
            {f'{labels},position="{place}"': count for place, count in enumerate(counts["positions"])},
        )
    return "\n".join(lines) + "\n"


def sglang_metrics(engine: FakeEngine) -> str:
    """Several processes write them. A counter is there from its first rise on."""
    labels, counts = 'engine_type="unified",model_name="org/model"', engine.counts
    streamed, cached = f'{labels},is_streaming="false"', f'cache_source="device",{labels}'
    rows = [
        ("num_requests", streamed, counts["requests"]),
        ("generation_tokens", streamed, counts["tokens"]),
        ("spec_verify_calls", labels, 0 if engine.old_names else counts["drafts"]),
        ("cached_tokens", cached, counts["cached"]),
    ]
    lines = []
    for name, own, value in rows:
        head = [f"# HELP sglang:{name}_total Multiprocess metric", f"# TYPE sglang:{name}_total counter"]
        lines += [*head, f"sglang:{name}_total{{{own}}} {float(value)}"] if value else []
    head = ["# HELP sglang:spec_accept_length Multiprocess metric", "# TYPE sglang:spec_accept_length gauge"]
    return "\n".join([*lines, *head, f"sglang:spec_accept_length{{{labels}}} 3.25", ""])


def family(name: str, text: str, values: Mapping[str, int]) -> list[str]:
    """A counter as `prometheus_client` prints it."""
    head = [f"# HELP {name}_total {text}", f"# TYPE {name}_total counter"]
    created = [f"# HELP {name}_created {text}", f"# TYPE {name}_created gauge"]
    return [
        *head,
        *(f"{name}_total{{{labels}}} {float(value)}" for labels, value in values.items()),
        *created,
        *(f"{name}_created{{{labels}}} 1.7900000001e+09" for labels in values),
    ]


def llama_metrics(engine: FakeEngine) -> str:
    """Without labels, but for positions, which are there from the first drafted answer on."""
    counts = engine.counts
    items = {
        "prompt_tokens_total": 90,
        "tokens_predicted_total": counts["tokens"],
        "spec_decode_num_draft_tokens_total": counts["drafted"],
        "spec_decode_num_accepted_tokens_total": counts["accepted"],
        "spec_decode_num_drafts_total": counts["drafts"],
    }
    lines = [
        line
        for name, value in items.items()
        for line in (
            f"# HELP llamacpp:{name} Counted.",
            f"# TYPE llamacpp:{name} counter",
            f"llamacpp:{name} {value}",
        )
    ]
    if counts["drafts"]:
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f"# HELP {name} By position.", f"# TYPE {name} counter"]
        lines += [f'{name}{{position="{place}"}} {count}' for place, count in enumerate(counts["positions"])]
    return "\n".join(lines) + "\n"


METRICS = {"vllm": vllm_metrics, "sglang": sglang_metrics, "llama.cpp": llama_metrics}
