"""The interface of a running server of any engine: its description, its answers and its counters.

Each engine is one file in `servers/` with a class decorated `@SERVERS.register(name)`. No other code names an engine.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing.asking.chat_findings import AnsweredChat
from dflash_cli.probing.counters.server_counters import ServerCounters, ServerMetrics, read_metrics
from dflash_cli.probing.served.chat_answers import ServedToolCall, read_call, read_streamed_call
from dflash_cli.probing.served.told_logprobs import ToldLogprobs
from dflash_cli.probing.servers.http_client import HttpClient
from dflash_runtime.documents import NOT_REQUIRED, Limits, from_json, to_json
from dflash_runtime.errors import InvalidConfig, RequestError, UnsupportedError
from dflash_runtime.json_values import as_object, is_int
from dflash_runtime.metrics import MAX_DRAFT_TOKENS
from dflash_runtime.phrases import shorten
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.probing.servers"
CHAT = "/v1/chat/completions"
Read = TypeVar("Read")

MAX_STEPS = 200_000
"""More steps than any answer has."""
MAX_CONCURRENCY = 1_000_000
MAX_LEN = 1 << 31
UNQUANTISED = {"auto", "bfloat16", "bf16", "float16", "fp16", "half", "float32", "fp32", "float", "none", ""}
LOOKUPS = ("ngram", "lookup", "lookahead", "suffix")
"""Words in the names of methods that draft without a model."""
MAX_MODELS, MAX_SHOWN_CHARS = 1000, 200

Decoding = Literal["asked", "likeliest", "flat", "whole"]
LIKELIEST: Mapping[str, Any] = {"temperature": 0.01, "top_k": 1}
FLAT: Mapping[str, Any] = {"temperature": 2.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
WHOLE: Mapping[str, Any] = {**FLAT, "temperature": 1.0}
"""Fields of these ways of decoding, under the names that all engines share."""

Drafts = Annotated[int, Limits(least=0, below=MAX_DRAFT_TOKENS + 1)]
Steps = Annotated[int, Limits(least=0, below=MAX_STEPS * MAX_DRAFT_TOKENS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """A server's description of itself. A field is None if the server does not report it."""

    engine: Annotated[str, "a key of `SERVERS`"]
    release: Annotated[str | None, "as the server writes it, such as 0.33.0"]
    model: Annotated[str, "the name that requests give"]
    is_drafting: Annotated[bool | None, "whether a draft is configured"]
    num_draft_tokens: Annotated[int | None, "tokens drafted per step, K"] = None
    target: Annotated[str | None, NOT_REQUIRED, "the model that the server was started with"] = None
    draft: Annotated[str | None, "the draft that the server was started with"] = None
    method: Annotated[str | None, NOT_REQUIRED, "the way of drafting, as the server writes it"] = None
    max_concurrency: Annotated[int | None, "requests that the server runs at the same time"] = None
    max_queued: Annotated[int | None, NOT_REQUIRED, "requests that wait at most; the server refuses more"] = None
    max_len: Annotated[int | None, NOT_REQUIRED, "longest prompt and answer, in tokens"] = None
    end_ids: Annotated[tuple[int, ...], NOT_REQUIRED, "tokens that end an answer, as the server tells"] = ()
    recognised_by: Annotated[str | None, NOT_REQUIRED, "the sign of the engine"] = None
    kv_dtype: Annotated[str | None, NOT_REQUIRED, "data type of keys and values, as the server writes it"] = None
    has_prefix_cache: Annotated[bool | None, NOT_REQUIRED, "whether the prefix cache is switched on"] = None
    cache_block: Annotated[int | None, NOT_REQUIRED, "tokens of a block of the prefix cache"] = None
    undrafted_slots: Annotated[int | None, NOT_REQUIRED, "slots that the server says cannot draft"] = None
    lossy: Annotated[str | None, NOT_REQUIRED, "settings that make verification lossy, with their values"] = None
    adapters: Annotated[tuple[str, ...], NOT_REQUIRED, "adapters of the model that requests can name"] = ()
    active_adapter: Annotated[str | None, NOT_REQUIRED, "adapters that the server applies to measured requests"] = None
    own_penalties: Annotated[str | None, NOT_REQUIRED, "penalties that the server shows as its own, with values"] = None

    @property
    def is_lookup(self) -> bool:
        """Whether drafts are looked up in the text, so that no draft model runs. A list of methods may hold both."""
        names = re.findall(r"[\w-]+", (self.method or "").lower())
        return bool(names) and all(any(word in name for word in LOOKUPS) for name in names)

    @property
    def is_quantised(self) -> bool:
        """Whether keys and values are stored in fewer bits than the target computes with."""
        return self.kv_dtype is not None and self.kv_dtype.lower().removeprefix("torch.") not in UNQUANTISED

    def __post_init__(self) -> None:
        """Drop values that no server of the engine reports."""
        names = ("release", "target", "draft", "method", "kv_dtype", "lossy", "active_adapter", "own_penalties")
        texts = {name: isinstance(getattr(self, name), str) for name in names}
        numbers = {
            name: is_int(value := getattr(self, name)) and 0 <= value <= most
            for name, most in (
                ("num_draft_tokens", MAX_DRAFT_TOKENS),
                ("max_concurrency", MAX_CONCURRENCY),
                ("max_queued", MAX_CONCURRENCY),
                ("max_len", MAX_LEN),
                ("cache_block", MAX_LEN),
                ("undrafted_slots", MAX_CONCURRENCY),
            )
        }
        is_known = {name: isinstance(getattr(self, name), bool) for name in ("is_drafting", "has_prefix_cache")}
        for name, is_sound in {**texts, **numbers, **is_known}.items():
            if not is_sound:
                object.__setattr__(self, name, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSteps:
    """The verify steps of one answer, as the server counted them.

    accepted    accepted draft tokens of each step
    drafted     draft tokens of each step; empty if every step had K
    is_ordered  whether the steps are in order of time
    """

    accepted: tuple[Drafts, ...]
    drafted: tuple[Drafts, ...] = ()
    is_ordered: bool = False

    @classmethod
    def of_histogram(cls, histogram: Sequence[int]) -> "ServedSteps":
        """Steps without order, from the numbers of steps that accepted 0, 1, ... draft tokens."""
        return cls(accepted=tuple(accepted for _, accepted in steps_of({"": histogram})))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """One answer. A field is None if the answer does not report it.

    finish_reason     `length`, one of ABORTED, or another word for `stop`
    end_id            the token that ended the answer, by the server
    steps             the verify steps
    num_steps         sums over the steps, for servers that report sums only; the engine's file says more
    num_accepted
    num_drafted
    num_draft_tokens  K
    num_cached        prompt tokens that the prefix cache held
    num_prompt        prompt tokens that the server read
    id                the name that the server gives this answer alone
    decode_ms         time of decoding without the prompt, by the server
    method            method of drafting, by the answer's settings
    started_s         when the request was sent, by this client's `time.perf_counter`
    seconds           time from the request to the end of the answer, by this client
    """

    token_ids: tuple[Annotated[int, Limits(least=0, below=1 << 31)], ...]
    text: str
    finish_reason: str
    end_id: Annotated[int, Limits(least=0, below=1 << 31)] | None = None
    steps: ServedSteps | None = None
    num_steps: Steps | None = None
    num_accepted: Steps | None = None
    num_drafted: Steps | None = None
    num_draft_tokens: Drafts | None = None
    num_cached: Annotated[int, Limits(least=0, below=MAX_LEN)] | None = None
    num_prompt: Annotated[int, Limits(least=0, below=MAX_LEN)] | None = None
    id: str | None = None
    decode_ms: Annotated[float, Limits(least=0)] | None = None
    method: str | None = None
    started_s: float | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a request differs from a measured one.

    is_plain         drafts nothing, if the server `can_switch_off`, or `can_answer_plainly` without a schema
    uses_cache       reads the prefix cache, also on a server that needs a field for it
    leaves_defaults  names no penalty, so that the server's own sampling settings apply
    json_schema      the answer is an instance of this schema
    decoding         `likeliest` asks for the likeliest tokens without a temperature of 0; `flat` asks for tokens at a
                     high temperature of the whole vocabulary, `whole` at temperature 1
    """

    is_plain: bool = False
    uses_cache: bool = False
    leaves_defaults: bool = False
    json_schema: Mapping[str, Any] | None = None
    decoding: Decoding = "asked"


MEASURED = Variant()
ABORTED = ("abort", "error")
"""Reasons of an answer's end that are neither the model's nor a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Sampling options of a request."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


class InferenceServer(ABC):
    """A server of one engine. `title` is the engine's usual name."""

    name: ClassVar[str]
    title: ClassVar[str]
    owner: ClassVar[str]
    """`owned_by` of the models that such a server lists at `/v1/models`."""
    own_fields: ClassVar[Mapping[str, str]]
    """Path -> a field that only this engine's document there has."""
    counter_names: ClassVar[Mapping[str, str]]
    """The engine's names for fields of `ServerCounters`."""
    load_names: ClassVar[Mapping[str, str]] = {}
    """The engine's names of gauges `running` and `waiting`, and of the sum of its queue times in seconds, `queue_s`."""
    definition: ClassVar[str] = "vllm"
    """The definition of acceptance length that the engine uses, a key of `statistics.DEFINITIONS`."""
    how_to_report: ClassVar[str]
    """The server's options for reporting acceptance."""
    how_to_report_steps: ClassVar[str]
    """The options for reporting the steps of each answer."""
    drafts_every_step: ClassVar[bool] = True
    """Whether a sound server drafts in every step. Some drop drafts of low probability."""
    takes_seed: bool = True
    """Whether a sampled request names its seed."""
    keeps_seed: ClassVar[bool] = True
    """Whether drafted answers to one prompt with one seed should be the same."""
    can_score: ClassVar[bool] = False
    """Whether `score` works."""
    neutral: ClassVar[Mapping[str, Any]] = {}
    """Fields of a greedy request that switch off penalties, which the server's own settings may bring."""
    can_answer_plainly: ClassVar[bool] = False
    """Whether `answer` and `told_logprobs` can draft nothing, and read no cache."""

    def __init__(self, client: HttpClient, model: str, *, recognised_by: str | None = None) -> None:
        self.client = client
        self.model = model
        self.recognised_by = recognised_by
        self.readings: list[ServerMetrics] = []
        self.chats: list[AnsweredChat] = []
        """Every reading of the metrics, in order of time."""

    @property
    def plain_fields(self) -> Mapping[str, Any]:
        """Fields of a request that switch drafts off; empty if no request can, or before the first answer."""
        return {}

    @property
    def can_switch_off(self) -> bool:
        """Whether a request can switch drafts off."""
        return bool(self.plain_fields)

    def num_requests_of(self, num_tokens: int, variant: Variant) -> int:
        """The number of requests for an answer of `num_tokens` tokens."""
        return 1

    def sampling_fields(self, asked: Asked, variant: Variant) -> Mapping[str, Any]:
        """The temperature, and for a greedy request that does not leave the server's own settings `neutral`."""
        neutral = {} if asked.temperature or variant.leaves_defaults else self.neutral
        fields = {"likeliest": LIKELIEST, "flat": FLAT, "whole": {**self.neutral, **WHOLE}}
        return {**fields.get(variant.decoding, {"temperature": asked.temperature}), **neutral}

    def without_adapter(self) -> "InferenceServer | None":
        """The same server, asked without its active adapter. None if requests cannot leave the adapter out."""
        return None

    @abstractmethod
    def describe(self) -> ServerFacts:
        """The server's description of itself."""

    @abstractmethod
    def answer(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ServedAnswer:
        """The server's answer to a prompt. Raises the errors of `post`."""

    @abstractmethod
    def next_logprobs(self, text_ids: Sequence[int]) -> Mapping[int, float]:
        """Token id -> log-probability in nats, for the most likely tokens after a text."""

    @abstractmethod
    def told_logprobs(self, prompt_ids: Sequence[int], asked: Asked, variant: Variant = MEASURED) -> ToldLogprobs:
        """An answer with the log-probabilities that the server tells of its tokens."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model's tokenizer adds."""

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation in the server's chat template with the arguments `options`."""

    def score(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> list[dict[int, float]]:
        """The target's log-probabilities at each token of an answer, of that token and of the likeliest one."""
        raise NotImplementedError

    def call_tool(
        self, messages: Sequence[Mapping[str, Any]], tool: Mapping[str, Any] | None, *, max_new_tokens: int,
        is_streamed: bool = False, variant: Variant = MEASURED, stop: str | None = None,
    ) -> ServedToolCall:  # fmt: skip
        """The server's answer to a chat, which must call the tool if one is given, and ends at the string `stop`.

        Raises the errors of `post`.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            **({} if tool is None else {"tools": [tool], "tool_choice": "required"}),
            "max_tokens": max_new_tokens,
            "temperature": 0,
            "stream": is_streamed,
            **(self.plain_fields if variant.is_plain else {}),
            **({} if stop is None else {"stop": [stop]}),
        }
        if is_streamed:
            text = self.client.post_text(CHAT, body)
            answer = self.read(lambda _: read_streamed_call(text), None, CHAT)
        else:
            answer = self.post(CHAT, body, read_call)
        self.chats.append(AnsweredChat(repr((messages, stop)), is_streamed, answer))
        return answer

    def counters(self) -> ServerCounters | None:
        """The server's counters, or None if it does not report any of drafts."""
        return self.metrics().counters

    def metrics(self) -> ServerMetrics:
        """The server's metrics, which are also kept in `readings`."""
        # Some servers answer only to the path with a slash.
        text = self.client.find_text("/metrics") or self.client.find_text("/metrics/")
        if text is None:
            return ServerMetrics()
        self.readings.append(read_metrics(text, self.counter_names, f"{self.client.url}/metrics", self.load_names))
        return self.readings[-1]

    def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Read]) -> Read:
        """The part of the answer to a request that `read` takes from the answer's JSON document.

        Raises:
            RequestError: the server refuses or aborts the request.
            ServerUnreachable: the server does not answer.
            UnsupportedError: the answer lacks a field or has another form.
        """
        return self.read(read, self.client.post(path, body), path)

    def read(self, read: Callable[[Any], Read], document: Any, path: str) -> Read:
        """What `read` takes from a document at a path.

        Raises:
            RequestError: the document is an answer that the server aborted.
            UnsupportedError: the document lacks a field or has another form.
        """
        try:
            answer = read(document)
            if not isinstance(answer, ServedAnswer):
                return answer
            if answer.finish_reason in ABORTED:
                where, found = f"{self.client.url}{path}", answer.finish_reason
                raise RequestError(f"ended the answer: {found}", id="server-refused", path=where, found=found)
            # An answer is read like a document, so that each field has its type and its limits.
            return from_json(type(answer), to_json(answer))
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, InvalidConfig) as error:
            found = f"no {error.args[0]!r}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
            found = shorten(found, MAX_SHOWN_CHARS)
            expected = f"an answer of {self.title}"
            raise UnsupportedError(
                f"found {found}, expected {expected}",
                id="foreign-answer",
                path=f"{self.client.url}{path}",
                found=found,
                expected=expected,
                hint="another engine or a proxy may have answered; name the engine with --engine",
            ) from error

    def find(self, path: str) -> Mapping[str, Any]:
        """The JSON object at a path, or an empty object."""
        return as_object(self.client.find(path))


SERVERS: Registry[type[InferenceServer]] = Registry("engine of a server")


def server_engines() -> list[str]:
    """Names of the engines with a file in `servers/`, sorted."""
    SERVERS.discover(PACKAGE)
    return sorted(SERVERS)


class ServerTokenizer(Tokenizer):
    """A tokenizer that sends every text to a server."""

    def __init__(self, server: InferenceServer, template_options: Mapping[str, Any] | None = None) -> None:
        self._server = server
        self._options = dict(template_options or {})

    def encode(self, text: str) -> list[int]:
        return self._server.encode(text)

    @property
    def has_template(self) -> bool:
        return True

    def render(
        self, messages: Sequence[dict[str, Any]], *, where: str, options: Mapping[str, Any] | None = None
    ) -> list[int]:
        try:
            return self._server.render(messages, {**self._options, **(options or {})})
        except RequestError as error:
            hint = "add --target to render the conversation locally"
            raise RequestError(error.message, id=error.id, path=where, found=error.found, hint=hint) from error


def steps_of(histograms: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """The name of its histogram and the number of accepted draft tokens for each step that histograms count.

    Raises:
        ValueError: the counts are not a plausible number of steps.
    """
    counts = [count for histogram in histograms.values() for count in histogram]
    if not all(is_int(count) and count >= 0 for count in counts) or sum(counts) > MAX_STEPS:
        raise ValueError(f"counts of steps, expected 0 or more and at most {MAX_STEPS} in all")
    items = histograms.items()
    return [(name, place) for name, histogram in items for place, count in enumerate(histogram) for _ in range(count)]


def as_id(value: object) -> int | None:
    """The value if it is a token id."""
    return value if is_int(value) and 0 <= value < 1 << 31 else None


def ids_of(document: Any, name: str = "tokens") -> list[int]:
    """The list of token ids in a document's field.

    Raises:
        KeyError: the field is absent.
        TypeError: the field is not a list of integers.
    """
    found = document[name]
    if not isinstance(found, list) or None in map(as_id, found):
        raise TypeError(f"{name} is not a list of token ids")
    return found
