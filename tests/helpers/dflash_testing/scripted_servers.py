"""A server in this process with the protocol and metrics of an engine: scripted answers, counters and faults.

It stands in for the HTTP client, so that a whole probe takes a fraction of a second.
"""

import json
import math
import random
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

import dflash_cli
from dflash_cli.probing import probe_options
from dflash_cli.probing.probe_result import Probed
from dflash_cli.probing.runs import counter_watch
from dflash_runtime.errors import RequestError
from dflash_testing.fake_engines import FakeEngine, Ids, Text
from dflash_testing.server_forms import ANSWERS, LOGPROBS, METRICS, PATHS, documents, said

NUM_PROMPTS, ANSWER_LEN = 16, 64
V, S, L = (dict[str, Any](style=style) for style in ("vllm", "sglang", "llama.cpp"))
"""Changes of a script for each engine."""
STEPS: dict[str, Any] = {**V, "reports": "detailed"}
"""vLLM with each step in its answers."""

Json = Literal["sound", "broken", "broken with drafts", "free text", "undrafted", "cut", "thinking", "goes on", "marks",
    "refused",
]  # fmt: skip
Tools = Literal["sound", "stream loses text", "broken", "as text", "undrafted", "absent", "cut", "refused"]

SOUND_JSON = json.dumps({"name": "oak", "kind": "plant", "count": 1, "tags": ["tall", "green"]})
TEXT = "Rivers shape the land they cross. They carry water, sand and life to the sea."
ARGUMENTS = json.dumps({"city": "Lisbon", "days": 3})
LONG, SPLIT, TRIAL_LEN = 1000, 6, 16
"""A prompt of LONG tokens is long. Answers with other tokens differ at position SPLIT."""


@dataclass
class Script(FakeEngine):
    """The script of a server. Without a change it is a sound server.

    loaded_rate    acceptance of a draft token in the second answer to a measured prompt, with more requests at a time
    off_loaded     no drafts in these answers
    long_rate      acceptance after long prompts
    first_rate     acceptance of the first draft token
    undrafted_from length of prompts from which answers are not drafted
    cache          also `unused`: nothing is found; `prompts`: no second turn is found; `wrong`: other tokens;
                   `draftless`: hardly anything is accepted
    split_nats     how much less likely the token at SPLIT is than the target's own choice; 0: it is the choice
    loaded_split   the same in answers with more requests at a time
    repeat_nats    the same for the second answer to a long prompt
    has_scores     whether the server gives log-probabilities
    unlike         changes of the other replicas
    replicas       servers behind the address, of which a random one answers
    ends_after     number of answers after which the draft is not engaged any more
    is_unsteady    a wrong prefix cache is wrong in another way each time
    adaptive       the server chooses draft lengths by itself
    """

    loaded_rate: float | None = None
    off_loaded: bool = False
    long_rate: float | None = None
    first_rate: float | None = None
    undrafted_from: int | None = None
    max_accepted: int | None = None
    split_nats: float = 0.0
    loaded_split: float = 0.0
    repeat_nats: float = 4.0
    has_scores: bool = True
    json: Json = "sound"
    tools: Tools = "sound"
    replicas: int = 1
    unlike: Mapping[str, Any] = field(default_factory=dict)
    grows_alone: int = 0
    adaptive: bool = False
    ends_after: int | None = None
    is_unsteady: bool = False
    num_asked: dict[Ids, int] = field(default_factory=dict)
    now: threading.local = field(default_factory=threading.local)

    @property
    def body(self) -> Mapping[str, Any]:
        """The request of this thread."""
        return getattr(self.now, "body", {})

    def as_document(self, path: str, document: Any) -> Any:
        """The document at a path as the server shows it."""
        return document

    def as_stream(self, pieces: list[str]) -> list[str]:
        """The pieces of a text as the server streams them."""
        return pieces

    def as_thought(self, message: Mapping[str, Any]) -> str:
        """The reasoning before a message as the server streams it."""
        return ""

    def misses_stop(self, stop: str) -> bool:
        """Whether an answer goes on after the string at which it must end."""
        return False

    def as_metrics(self, text: str) -> str:
        """The metrics as the server prints them."""
        return text

    def told_logprob(self, place: int, value: float) -> float:
        """The log-probability that the server tells of a token of a drafted answer; its position is `place`."""
        return value

    def kept_logprobs(self, places: Sequence[int], accepted: Ids) -> Sequence[int]:
        """The positions of an answer with log-probabilities. `accepted` has the answer's steps."""
        return places

    def as_events(self, events: list[Any]) -> list[Any]:
        """The events of a chat as the server streams them."""
        return events

    def as_stream_text(self, text: str) -> str:
        """The text of a stream as it comes to the client."""
        return text

    def early_answer(self, path: str, body: Mapping[str, Any]) -> Any | None:
        """An answer that comes before the engine's own, or None. It may raise the errors of a client."""
        return None

    def as_answer(self, path: str, answer: Any) -> Any:
        """The answer to the request of this thread as the server gives it."""
        return answer

    def complete(self, ids: Ids, num_tokens: int, *, is_plain: bool, uses_cache: bool) -> Text:
        """The answer to a prompt of tokens, counted."""
        is_long = len(ids) >= LONG
        if self.ends_after is not None and self.num_answers >= self.ends_after:
            self.is_engaged = False
        if num_tokens != TRIAL_LEN and not is_plain:
            self.num_asked[ids] = self.num_asked.get(ids, 0) + 1
        number = self.num_asked.get(ids, 0)
        is_warm = number > 1 and uses_cache and is_long
        is_loaded = number == 2 and not is_long
        finds = is_warm and self.cache not in ("off", "unused")
        begun = self.prompt_of(ids) if is_plain else ids
        done = len(ids) - len(begun)
        tokens = list(self.tokens(begun, done + num_tokens))
        if self.is_sampled:
            draw = random.Random(self.sampling_seed)
            tokens = [token + draw.randrange(3) for token in tokens]
        is_other = (is_warm and self.cache == "wrong") or (is_plain and self.split_nats)
        if (is_other or (is_loaded and self.loaded_split)) and len(tokens) > SPLIT:
            tokens[SPLIT] += number if self.is_unsteady else 1
        rate = self.rate if not is_loaded or self.loaded_rate is None else self.loaded_rate
        rate = self.long_rate if is_long and self.long_rate is not None else rate
        rate = 0.05 if finds and self.cache == "draftless" else rate
        is_off = is_plain or (is_loaded and self.off_loaded) or len(ids) >= (self.undrafted_from or math.inf)
        accepted = () if is_off else self.steps(ids, num_tokens, rate)
        cached = (len(ids) - 1) // self.block * self.block if finds else self.find_turn(ids) if uses_cache else 0
        tokens = tokens[done:]
        return self.counted(Text(tuple(tokens), accepted, num_cached=cached, num_prompt=len(ids)))

    @property
    def is_sampled(self) -> bool:
        """Whether the request of this thread samples. A small temperature does not."""
        sampling = self.body.get("sampling_params", self.body)
        return bool(sampling.get("temperature", 0) > 0.1 and sampling.get("top_k") != 1)

    @property
    def sampling_seed(self) -> int:
        """The request's seed, or one that no other request has."""
        sampling = self.body.get("sampling_params", {})
        seed: int = self.body.get("seed", sampling.get("sampling_seed", -1 - self.num_answers))
        return seed

    def find_turn(self, ids: Ids) -> int:
        """Cached tokens of a prompt that goes on from an earlier one."""
        earlier = [
            len(item) for item in list(self.num_asked) if LONG <= len(item) < len(ids) and ids[: len(item)] == item
        ]
        return 0 if self.cache in ("off", "unused", "prompts") else max(earlier, default=0) // self.block * self.block

    def tokens(self, ids: Ids, num_tokens: int) -> Ids:
        draw = random.Random(f"{ids[:64]} {ids[-64:]}")
        return tuple(100 + draw.randrange(900) for _ in range(num_tokens))

    def steps(self, ids: Ids, num_tokens: int, rate: float) -> Ids:
        """How many draft tokens each step accepts until an answer has its tokens."""
        if not (self.is_engaged and self.has_draft):
            return ()
        draw, accepted, left = random.Random(f"steps {ids[-64:]}"), [], num_tokens - 1
        most = min(self.k, self.drafted or self.k, self.max_accepted if self.max_accepted is not None else self.k)
        while left > 0:
            number = 0
            while number < most and draw.random() < (self.first_rate if not number and self.first_rate else rate):
                number += 1
            accepted.append(number)
            left -= number + 1
        return tuple(accepted)

    def counted(self, text: Text) -> Text:
        with self.lock:
            if self.resets_at == self.num_answers:
                self.reset()
            self.num_answers += 1
            self.count(text)
            if self.adaptive:
                self.counts["drafted"] -= len(text.accepted) * 3 // 2
        return text

    def scores(self, ids: Ids) -> list[dict[int, float]]:
        """The log-probabilities of each token after a known prompt."""
        prompt = self.prompt_of(ids)
        found = []
        for position, token in enumerate(ids[len(prompt) :]):
            gap = self.split_nats if position == SPLIT else 0.0
            found.append({token: -0.1 - gap} | ({token + 1: -0.1} if gap else {}))
        return found

    def next_of(self, ids: Ids) -> dict[int, float]:
        prompt = self.prompt_of(ids)
        token = self.tokens(prompt, len(ids) - len(prompt) + 1)[-1]
        gap = self.repeat_nats if len(prompt) >= LONG else self.split_nats or self.loaded_split
        return {token: -0.1, token + 1: -0.1 - gap, 5: -9.0}

    def prompt_of(self, ids: Ids) -> Ids:
        return max((item for item in list(self.num_asked) if ids[: len(item)] == item), key=len, default=ids)

    def json_answer(self, ids: Ids, *, is_plain: bool) -> Text:
        is_broken = self.json == "broken" or (self.json == "broken with drafts" and not is_plain)
        text = SOUND_JSON.replace("[", "", 1) if is_broken else SOUND_JSON
        others = {"free text": "An oak is a tree.", "cut": SOUND_JSON[:20], "thinking": f"Hm.</think>\n{SOUND_JSON}"}
        others |= {"goes on": f'{SOUND_JSON}\n{{"name', "marks": f"```json\n{SOUND_JSON}\n```<|im_end|>"}
        text = others.get(self.json, text)
        accepted = () if is_plain or self.json == "undrafted" else self.steps(ids, 40, self.rate)
        return self.counted(Text(self.tokens(ids, 40), accepted, is_stopped=self.json != "cut", text=text))

    def tool_call(self) -> tuple[dict[str, Any], str, int]:
        """A message with a call, the reason of its end, and its number of tokens."""
        text = self.counted(
            Text(tuple(range(30)), () if self.tools == "undrafted" else self.steps((1, 2), 30, self.rate))
        )
        if "tools" not in self.body:
            return {"role": "assistant", "content": TEXT}, "length", len(text.token_ids)
        arguments = {"broken": ARGUMENTS[:-6], "cut": ARGUMENTS[:9]}.get(self.tools, ARGUMENTS)
        call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
        if self.tools in ("as text", "absent"):
            content = (
                f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}' if self.tools == "as text" else "Sun."
            )
            message = {"role": "assistant", "content": content}
        return message, "length" if self.tools == "cut" else "tool_calls", len(text.token_ids)


def probe_script(patch: pytest.MonkeyPatch, script: Script, **options: Any) -> Probed:
    """The outcome of a probe of a script with NUM_PROMPTS prompts."""
    patch.setattr(counter_watch, "COUNTER_PAUSE_S", 0.0)
    patch.setattr(probe_options, "HttpClient", lambda *args, **kwargs: ScriptedClient(script))
    prompts = [[20 + place for place in range(8 + index)] + [200 + index] for index in range(NUM_PROMPTS)]
    return dflash_cli.probe(url="scripted", prompts=prompts, max_new_tokens=ANSWER_LEN, **options)


def probe_named(patch: pytest.MonkeyPatch, script: Script, ids: set[str], **options: Any) -> Probed:
    """Probe a scripted server, and require errors and warnings with these ids."""
    found = probe_script(patch, script, **options)
    assert named(found) == ids, [(item.id, item.seen) for item in found.findings]
    return found


def named(found: Probed) -> set[str]:
    """Ids of the errors and warnings of a probe."""
    return {item.id for item in found.findings if item.severity != "info"}


class ScriptedClient:
    """A client whose server is a script, or one of several scripts."""

    def __init__(self, script: Script) -> None:
        self.url, self.num_retried, self.ends_at = "http://scripted", 0, math.inf
        self.refusals: Counter[int] = Counter()
        self._scripts = [script]
        for place in range(1, script.replicas):
            more: dict[str, Any] = {
                name: getattr(script, name) for name in ("style", "rate", "reports", "k", "cache", "has_metrics")
            }
            started = None if script.started_s is None else script.started_s + 100.0 * place
            more |= script.unlike
            self._scripts.append(type(script)(**more, started_s=started, num_asked=script.num_asked))
            self._scripts[-1].counts["tokens"] = self._scripts[-1].counts["drafts"] = 900
        self._draw = random.Random(3)

    @property
    def script(self) -> Script:
        """The server that answers the next request."""
        return self._draw.choice(self._scripts)

    def close(self) -> None:
        """Nothing is open."""

    def find(self, path: str) -> Any:
        script = self.script
        return script.as_document(path, documents(script).get(path))

    def find_text(self, path: str) -> str | None:
        script = self.script
        if path != "/metrics" or not script.has_metrics:
            return None
        script.counts["tokens"] += script.grows_alone
        lines = METRICS[script.style](script).splitlines(keepends=True)
        return script.as_metrics("".join(line for line in lines if not any(name in line for name in script.missing)))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        script = self.script
        script.now.body = body
        early = script.early_answer(path, body)
        return script.as_answer(path, self._answer(script, path, body)) if early is None else early

    def _answer(self, script: Script, path: str, body: Mapping[str, Any]) -> Any:
        if path == "/tokenize":
            return {"tokens": script.encode(body.get("prompt") or body.get("content") or said(body))}
        if path == "/apply-template":
            return {"prompt": said(body)}
        if path == "/v1/chat/completions":
            message, reason, count = self._call(script)
            return {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": count}}
        if path != PATHS[script.style]:
            raise RequestError("answered 404", id="server-refused", found=404)
        return _complete(script, body)

    def post_text(self, path: str, body: Mapping[str, Any]) -> str:
        script = self.script
        script.now.body = body
        message, reason, _ = self._call(script)
        calls = message.get("tool_calls")
        content = message["content"] or ""
        parts = script.as_stream([content[place : place + 9] for place in range(0, len(content), 9)])
        thought = script.as_thought(message)
        pieces: list[Any] = [{"role": "assistant"}, *({"reasoning_content": part} for part in thought.split(" "))]
        pieces += [{"content": part} for part in parts]
        if calls:
            name, arguments = (calls[0]["function"][key] for key in ("name", "arguments"))
            pieces.append({"tool_calls": [{"index": 0, "id": "c1", "type": "function", "function": {"name": name}}]})
            places = range(0, len(arguments), 7)
            parts = [arguments[place : place + 7] for place in places]
            kept = parts[::2] if self._scripts[0].tools == "stream loses text" else parts
            pieces += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in kept]
        events = [{"choices": [{"index": 0, "delta": piece, "finish_reason": None}]} for piece in pieces]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        events = script.as_events(events)
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return script.as_stream_text(f"{text}data: [DONE]\n\n")

    def _call(self, script: Script) -> tuple[dict[str, Any], str, int]:
        if script.tools == "refused":
            raise RequestError("answered 400: tools need a parser", id="server-refused", found=400)
        message, reason, count = script.tool_call()
        content, stop = message.get("content"), (script.body.get("stop") or [None])[0]
        if content and stop and stop in content and not script.misses_stop(stop):
            message, reason = message | {"content": content.partition(stop)[0]}, "stop"
        return message, reason, count


def _complete(script: Script, body: Mapping[str, Any]) -> Any:
    sampling = body.get("sampling_params", {})
    ids = tuple(body.get("prompt") or body.get("input_ids") or ())
    num_tokens = body.get("max_tokens") or body.get("n_predict") or sampling.get("max_new_tokens")
    is_plain = is_undrafted(script, body, num_tokens)
    if any(body.get(name) for name in ("logprobs", "n_probs", "return_logprob", "prompt_logprobs")):
        return _logprobs(script, ids, body) if num_tokens == 1 else _told(script, body, ids, num_tokens)
    if any(
        holder.get(name)
        for holder in (body, sampling)
        for name in ("response_format", "json_schema", "structured_outputs")
    ):
        if script.json == "refused":
            raise RequestError("answered 400: no structured output", id="server-refused", found=400)
        return ANSWERS[script.style](script, script.json_answer(ids, is_plain=is_plain))
    uses_cache = body.get("cache_prompt", True)
    text = script.complete(ids, num_tokens, is_plain=is_plain, uses_cache=uses_cache)
    return ANSWERS[script.style](script, text)


def is_undrafted(script: Script, body: Mapping[str, Any], num_tokens: int) -> bool:
    """Whether a request gets no draft: by its field, or from llama.cpp because its answer is too short for one."""
    if script.style != "llama.cpp" or script.old_names:
        return body.get("speculative.n_max") == 0
    return num_tokens <= 2


def _told(script: Script, body: Mapping[str, Any], ids: Ids, num_tokens: int) -> Any:
    """An answer of several tokens with their log-probabilities."""
    is_plain = is_undrafted(script, body, num_tokens)
    if not script.has_scores:
        raise RequestError("answered 400: no log-probabilities", id="server-refused", found=400)
    text = script.complete(ids, num_tokens, is_plain=is_plain, uses_cache=False)
    scores = script.scores(ids + text.token_ids)[-len(text.token_ids) :]
    own = [item[token] for item, token in zip(scores, text.token_ids, strict=True)]
    told = own if is_plain else [script.told_logprob(place, value) for place, value in enumerate(own)]
    kept = script.kept_logprobs(range(len(told)), text.accepted)
    answer, pairs = ANSWERS[script.style](script, text), [(text.token_ids[place], told[place]) for place in kept]
    if script.style == "vllm":
        names = [f"token_id:{token}" if body.get("return_tokens_as_token_ids") else "x" for token, _ in pairs]
        answer["choices"][0]["logprobs"] = {"tokens": names, "token_logprobs": [value for _, value in pairs]}
    elif script.style == "sglang":
        answer["meta_info"]["output_token_logprobs"] = [[value, token, None] for token, value in pairs]
    else:
        answer["completion_probabilities"] = [{"id": token, "logprob": value} for token, value in pairs]
    return answer


def _logprobs(script: Script, ids: Ids, body: Mapping[str, Any]) -> Any:
    if not script.has_scores:
        raise RequestError("answered 400: no log-probabilities", id="server-refused", found=400)
    if "prompt_logprobs" in body:
        places = [{str(token): {"logprob": value} for token, value in item.items()} for item in script.scores(ids)]
        return {"choices": [{"prompt_logprobs": [None] * (len(ids) - len(places)) + places}]}
    if "logprob_start_len" in body:
        scores, prompt = script.scores(ids), script.prompt_of(ids)
        own = [[item[token], token, None] for item, token in zip(scores, ids[len(prompt) :], strict=True)]
        top = [[[max(item.values()), max(item, key=lambda t: item[t]), None]] for item in scores]
        return {"meta_info": {"input_token_logprobs": [[None, 1, None], *own], "input_top_logprobs": [None, *top]}}
    return LOGPROBS[script.style](script.next_of(ids))
