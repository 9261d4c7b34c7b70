"""A server of completions on this machine that speaks as vLLM, SGLang or llama.cpp does, and has faults on request.

Texts of metrics are in the shape that each engine prints: `prometheus_client` behind vLLM and SGLang, which adds
`_total`, `_created` and labels, and `server-task.cpp` of llama.cpp. What it answers is given, as by our engine.
"""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

Fault = Literal["500", "timeout", "garbage", "cut", "400"]
Reports = Literal["nothing", "summary", "detailed"]
K = 7
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """An answer, and how many drafts each of its steps accepted."""

    token_ids: Ids
    accepted: Ids
    is_stopped: bool = False

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
    """What the server is and does.

    reports        what answers bring of their steps
    has_draft      whether it was started with a draft; without, it has no counters of one
    is_engaged     whether it drafts at all
    has_metrics    whether it shows counters
    faults         by the number of the request for an answer, from 0 on; the first is the probe's trial
    resets_at      the request before which counters fall to 0
    is_shared      every request comes with one of somebody else
    worse_loaded   how many fewer drafts are accepted while more than one request runs
    changes_at     the place at which an answer differs while more than one request runs
    gap            nats between the two tokens there
    old_names      SGLang's names of earlier releases
    metrics_text   shown in place of its own
    missing        names whose lines it leaves out of its metrics
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
    worse_loaded: int = 0
    changes_at: int | None = None
    gap: float = 0.05
    old_names: bool = False
    key: str | None = None
    metrics_text: str | None = None
    missing: tuple[str, ...] = ()
    pause_s: float = 0.002
    url: str = ""
    num_answers: int = 0
    num_active: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts = {"drafts": 0, "drafted": 0, "accepted": 0, "positions": [0] * K, "requests": 0, "tokens": 0}

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

    def likeliest(self, ids: Ids) -> dict[int, float]:
        """What may follow a text that begins with a known prompt."""
        prompts = [tuple(body["ids"]) for body in self.bodies if body["num_tokens"] > 1]
        prompt = next(item for item in prompts if ids[: len(item)] == item)
        token = self.text_of(prompt, 10**4 if prompt in self.texts else 48, is_loaded=False).token_ids[
            len(ids) - len(prompt)
        ]
        return {token: -0.1, token + 1: -0.1 - self.gap, 5: -9.0}

    def count(self, text: Text) -> None:
        counts, steps = self.counts, text.accepted
        for _ in range(2 if self.is_shared else 1):
            counts["requests"] += 1
            counts["tokens"] += len(text.token_ids)
            counts["drafts"] += len(steps)
            counts["drafted"] += K * len(steps)
            counts["accepted"] += sum(steps)
            for number in steps:
                for place in range(number):
                    counts["positions"][place] += 1


class Handler(BaseHTTPRequestHandler):
    """Answers for the server's `engine`."""

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def engine(self) -> FakeEngine:
        engine: FakeEngine = self.server.engine  # type: ignore[attr-defined]
        return engine

    def do_GET(self) -> None:
        engine = self.engine
        if self._is_closed():
            return
        if self.path == "/metrics" and engine.has_metrics:
            text = engine.metrics_text or METRICS[engine.style](engine)
            lines = [
                line for line in text.splitlines(keepends=True) if not any(name in line for name in engine.missing)
            ]
            self._send(200, "".join(lines).encode())
        elif (found := documents(engine).get(self.path)) is not None:
            self._send_json(found)
        else:
            self._send(404, b'{"detail":"Not Found"}')

    def do_POST(self) -> None:
        engine = self.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self._is_closed():
            return
        engine.headers.append(dict(self.headers))
        if self.path == "/tokenize":
            self._send_json({"tokens": engine.encode(body.get("prompt") or body.get("content") or said(body))})
        elif self.path == "/apply-template":
            self._send_json({"prompt": said(body)})
        elif self.path == PATHS[engine.style]:
            self._complete(read_body(engine, body))
        else:
            self._send(404, b'{"detail":"Not Found"}')

    def _complete(self, body: dict[str, Any]) -> None:
        engine, ids = self.engine, tuple(body["ids"])
        if body["wants_logprobs"]:
            self._send_json(LOGPROBS[engine.style](engine.likeliest(ids)))
            return
        with engine.lock:
            number, engine.num_answers = engine.num_answers, engine.num_answers + 1
            engine.num_active += 1
            engine.bodies.append(body)
            if engine.resets_at == number:
                engine.reset()
        try:
            time.sleep(engine.pause_s)
            if number in engine.faults:
                self._fail(engine.faults[number])
                return
            text = engine.text_of(ids, body["num_tokens"], is_loaded=engine.num_active > 1)
            with engine.lock:
                engine.count(text)
            self._send_json(ANSWERS[engine.style](engine, text))
        finally:
            with engine.lock:
                engine.num_active -= 1

    def _fail(self, fault: Fault) -> None:
        if fault == "timeout":
            time.sleep(0.6)
        elif fault == "garbage":
            self._send(200, b"<html>a proxy")
        elif fault == "cut":
            self._send(200, b'{"choices": [{}], "meta_info": {}}')
        elif fault == "400":
            self._send(400, b'{"error": {"message": "the prompt is longer than the model reads"}}')
        else:
            self._send(500, b"trouble")

    def _is_closed(self) -> bool:
        key = self.engine.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self._send(401, b'{"error": "Unauthorized"}')
        return True

    def _send_json(self, document: Any) -> None:
        self._send(200, json.dumps(document).encode())

    def _send(self, status: int, data: bytes) -> None:
        with suppress(ConnectionError):  # whoever asked has given up
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)


PATHS = {"vllm": "/v1/completions", "sglang": "/generate", "llama.cpp": "/completion"}


def said(body: Mapping[str, Any]) -> str:
    """A conversation as one text."""
    return "".join(f"<{item['role']}>{item['content']}" for item in body["messages"]) + "<assistant>"


def read_body(engine: FakeEngine, body: Mapping[str, Any]) -> dict[str, Any]:
    """What a request asks, whatever the engine."""
    sampling = body.get("sampling_params", {})
    return {
        "ids": body.get("prompt") or body.get("input_ids"),
        "num_tokens": body.get("max_tokens") or body.get("n_predict") or sampling.get("max_new_tokens"),
        "wants_logprobs": any(body.get(name) for name in ("logprobs", "n_probs", "return_logprob")),
        "temperature": body.get("temperature", sampling.get("temperature")),
    }


def documents(engine: FakeEngine) -> dict[str, Any]:
    """What is at each path, besides metrics."""
    owner = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp"}[engine.style]
    found: dict[str, Any] = {"/v1/models": {"object": "list", "data": [{"id": "org/model", "owned_by": owner}]}}
    if engine.style == "vllm":
        found["/version"] = {"version": engine.release}
    elif engine.style == "sglang":
        found["/get_server_info" if engine.old_names else "/server_info"] = {
            "version": engine.release,
            "speculative_algorithm": "DFLASH" if engine.has_draft else None,
            "speculative_num_draft_tokens": K + 1 if engine.has_draft else None,
            "speculative_draft_model_path": "org/draft" if engine.has_draft else None,
            "max_running_requests": 256,
        }
    else:
        params = {"speculative.type": "draft-dflash" if engine.has_draft else "none", "speculative.n_max": K}
        found["/props"] = {
            "default_generation_settings": {"params": params},
            "total_slots": 4,
            "build_info": "b10902-0a1b2c3",
        }
    return found


def vllm_answer(engine: FakeEngine, text: Text) -> dict[str, Any]:
    reason = "stop" if text.is_stopped else "length"
    choice = {"index": 0, "text": "...", "token_ids": list(text.token_ids), "finish_reason": reason, "logprobs": None}
    answer: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "choices": [choice], "metrics": None}
    if engine.has_draft and engine.reports != "nothing":
        answer["metrics"] = {"speculative_decoding": vllm_steps(text, with_order=engine.reports == "detailed")}
    return answer


def vllm_steps(text: Text, *, with_order: bool) -> dict[str, Any]:
    """As `RequestSpecDecodeMetrics.to_dict` of vLLM 0.33 says it."""
    steps, accepted = len(text.accepted), sum(text.accepted)
    found: dict[str, Any] = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / (K * steps) if steps else 0.0,
        "acceptance_histogram": [text.accepted.count(number) for number in range(K + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": K * steps,
        "num_spec_tokens": K,
    }
    if with_order:
        found |= {"per_step_accepted": list(text.accepted), "per_step_drafted": [K] * steps}
    return found


def sglang_answer(engine: FakeEngine, text: Text) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "stop" if text.is_stopped else "length"},
        "prompt_tokens": 9,
        "completion_tokens": len(text.token_ids),
    }
    steps = len(text.accepted)
    if steps:
        names = (
            ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram")
            if engine.old_names
            else ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram")
        )
        histogram = [text.accepted.count(number) for number in range(max(text.accepted) + 1)]
        meta |= dict(zip(names, (sum(text.accepted), K * steps, histogram), strict=True))
        meta |= {"spec_verify_ct": steps, "spec_accept_length": len(text.token_ids) / steps}
    return {"text": "...", "output_ids": list(text.token_ids), "meta_info": meta}


def llama_answer(engine: FakeEngine, text: Text) -> dict[str, Any]:
    timings: dict[str, Any] = {"prompt_n": 9, "predicted_n": len(text.token_ids), "predicted_ms": 12.5}
    if text.accepted:
        timings |= {"draft_n": K * len(text.accepted), "draft_n_accepted": sum(text.accepted)}
    return {
        "content": "...",
        "tokens": list(text.token_ids),
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
    labels, counts = 'model_name="org/model",tp_rank="0"', engine.counts
    return "\n".join(
        [
            *family("sglang:num_requests", "Number of requests processed.", {labels: counts["requests"]}),
            *family("sglang:generation_tokens", "Number of generation tokens processed.", {labels: counts["tokens"]}),
            *family(
                "sglang:spec_verify_calls",
                "Number of speculative decoding verification calls.",
                {labels: counts["drafts"]},
            ),
            "# HELP sglang:spec_accept_length Mean acceptance length of speculative decoding.",
            "# TYPE sglang:spec_accept_length gauge",
            f"sglang:spec_accept_length{{{labels}}} 3.25",
            "",
        ]
    )


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


@contextmanager
def serving(engine: FakeEngine, port: int = 0) -> Iterator[FakeEngine]:
    """The engine behind a URL on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.engine = engine  # type: ignore[attr-defined]
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def prompt_rows(count: int) -> list[dict[str, Sequence[int] | str]]:
    """Prompts as ids, which no tokenizer is needed for."""
    return [{"id": f"p{index}", "prompt_token_ids": [7, 8, 9 + index]} for index in range(count)]
