"""The interface of a running server of any engine: its description, its answers and its counters.

Each engine is one file in `servers/` with a class decorated `@SERVERS.register(name)`. No other code names an engine.
"""

import copy
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing.counters.metrics_text import read_metrics
from dflash_cli.probing.counters.server_counters import ServerCounters, ServerMetrics
from dflash_cli.probing.served.chat_answers import AnsweredChat, ServedToolCall, read_call, read_streamed_call
from dflash_cli.probing.served.served_answer import ABORTED, ServedAnswer
from dflash_cli.probing.served.told_logprobs import ToldLogprobs
from dflash_cli.probing.servers.http_client import HttpClient
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.errors import InvalidConfig, RequestError, UnsupportedError
from dflash_runtime.json_values import as_object
from dflash_runtime.phrases import shorten
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.probing.servers"
CHAT = "/v1/chat/completions"
Read = TypeVar("Read")
MAX_MODELS, MAX_SHOWN_CHARS = 1000, 200
Decoding = Literal["asked", "likeliest", "flat", "whole"]
LIKELIEST: Mapping[str, Any] = {"temperature": 0.01, "top_k": 1}
FLAT: Mapping[str, Any] = {"temperature": 2.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
WHOLE: Mapping[str, Any] = {**FLAT, "temperature": 1.0}
"""Fields of these ways of decoding, under the names that all engines share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """How a request differs from a measured one.

    is_plain         drafts nothing, if the server `can_switch_off`, or `can_answer_plainly` without a schema
    uses_cache       reads the prefix cache, also on a server that needs a field for it
    is_fresh         reads nothing from the prefix cache, by a field that a server may ignore
    leaves_defaults  names no penalty, so that the server's own sampling settings apply
    json_schema      the answer is an instance of this schema
    by_own_field     gives the schema in the engine's own field, if it has one beside OpenAI's
    decoding         `likeliest` asks for the likeliest tokens without a temperature of 0; `flat` asks for tokens at a
                     high temperature of the whole vocabulary, `whole` at temperature 1
    """

    is_plain: bool = False
    uses_cache: bool = False
    is_fresh: bool = False
    leaves_defaults: bool = False
    json_schema: Mapping[str, Any] | None = None
    by_own_field: bool = False
    decoding: Decoding = "asked"


MEASURED = Variant()


def new_salt() -> str:
    """A name that no other request has, so that a prefix cache that is kept by names holds nothing for it."""
    return secrets.token_hex(16)


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
    schema_field: ClassVar[str | None] = None
    """The engine's own field for a schema, beside `response_format`; None if requests use no other."""
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

    def with_model(self, model: str | None) -> "InferenceServer | None":
        """The same server with requests for another model; None without one."""
        if model is None:
            return None
        other = copy.copy(self)
        other.model = model
        return other

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
        name = None if tool is None else tool["function"]["name"]
        self.chats.append(AnsweredChat(repr((messages, stop)), is_streamed, answer, stop, name))
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
