"""What a running server is asked, whatever its engine: what it is, an answer, its counters.

An engine is one file in `servers/` with a class decorated `@SERVERS.register(name)`; nothing else goes by its name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing.http_client import HttpClient
from dflash_cli.probing.server_counters import CounterNames, ServerCounters, read_counters
from dflash_runtime.errors import RequestError, UnsupportedError, UsageError
from dflash_runtime.registry import Registry

PACKAGE = "dflash_cli.probing.servers"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says about itself; None where it does not say it."""

    engine: Annotated[str, "a key of `SERVERS`"]
    release: Annotated[str | None, "as the server writes it, such as 0.33.0"]
    model: Annotated[str, "the name that requests give"]
    is_drafting: Annotated[bool | None, "whether a draft is configured"]
    num_draft_tokens: Annotated[int | None, "tokens drafted per step, K"] = None
    draft: Annotated[str | None, "the draft that the server was started with"] = None
    max_concurrency: Annotated[int | None, "requests that the server runs at the same time"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSteps:
    """The verify steps of one answer, as the server counted them.

    `accepted` has the drafts that each accepted, and `drafted` those that it had, empty where all had K. With
    `is_ordered` they stand in the order in which they were done.
    """

    accepted: tuple[int, ...]
    drafted: tuple[int, ...] = ()
    is_ordered: bool = False

    @classmethod
    def of_histogram(cls, histogram: Sequence[int]) -> "ServedSteps":
        """Steps of which is known how many accepted 0, 1, ... drafts."""
        return cls(accepted=tuple(place for place, count in enumerate(histogram) for _ in range(count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """One answer. `steps` is None where the server does not report them with it.

    `num_steps`, `num_accepted` and `num_drafted` are there where it reports sums only; see the engine's file.
    `num_draft_tokens` is K, where the answer says it; `finish_reason` is `stop` or `length`.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    steps: ServedSteps | None = None
    num_steps: int | None = None
    num_accepted: int | None = None
    num_drafted: int | None = None
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How an answer is asked for."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False


class InferenceServer(ABC):
    """A server of one engine. `title` is what people call the engine."""

    name: ClassVar[str]
    title: ClassVar[str]
    owner: ClassVar[str]
    """What `/v1/models` calls the owner of the models that such a server lists."""
    counter_names: ClassVar[CounterNames]
    definition: ClassVar[str] = "vllm"
    """The acceptance length that the engine itself shows, a key of `statistics.DEFINITIONS`."""
    how_to_report: ClassVar[str]
    """What the server is to be started with, so that acceptance can be read."""
    how_to_report_steps: ClassVar[str]
    """What it is to be started with, so that each answer brings its steps."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self.client = client
        self.model = model

    @abstractmethod
    def describe(self) -> ServerFacts:
        """What the server says of itself."""

    @abstractmethod
    def answer(self, prompt_ids: Sequence[int], asked: Asked) -> ServedAnswer:
        """Let the server answer a prompt.

        Raises:
            RequestError, ServerUnreachable, UnsupportedError: it does not, or with something else than an answer.
        """

    @abstractmethod
    def next_logprobs(self, text_ids: Sequence[int]) -> Mapping[int, float]:
        """Log-probabilities, in nats, of the likeliest tokens after a text, by id."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the special tokens that the model's tokenizer adds by itself."""

    @abstractmethod
    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Ids of a conversation in the server's chat template, which is given `options`."""

    def counters(self) -> ServerCounters | None:
        """What the server has counted so far; None where it counts no drafts, or does not show it."""
        # An application that is mounted there may want the slash.
        text = self.client.find_text("/metrics") or self.client.find_text("/metrics/")
        return None if text is None else read_counters(text, self.counter_names, f"{self.client.url}/metrics")

    def no_answer(self, path: str, error: Exception) -> UnsupportedError:
        """An error to be raised: what came back lacks a field of an answer, or has it in another form."""
        what = f"no {error.args[0]!r}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        return UnsupportedError(
            f"{self.client.url}{path}: found {what}, expected an answer of {self.title}",
            hint="is it another engine, or a proxy? --engine says which one is meant",
        )


SERVERS: Registry[type[InferenceServer]] = Registry("engine of a server")


def server_engines() -> list[str]:
    """The names of the engines whose servers can be asked."""
    SERVERS.discover(PACKAGE)
    return sorted(SERVERS)


def open_server(client: HttpClient, *, engine: str = "auto", model: str | None = None) -> InferenceServer:
    """The server at the client's URL, of a named engine or of the one that its list of models says.

    Raises:
        UnsupportedError: it is of no known engine.
        UsageError: the name is that of none, or it does not serve the model.
        ServerUnreachable: it does not answer.
    """
    known = server_engines()
    if engine not in ("auto", *known):
        raise UsageError(f"--engine {engine}: no such engine (known: {', '.join(known)})")
    models = _models(client)
    names = [str(item.get("id")) for item in models]
    if model is not None and names and model not in names:
        raise UsageError(f"--model {model}: {client.url} serves {', '.join(names)}")
    chosen = model or (names[0] if names else "default")
    if engine != "auto":
        return SERVERS[engine](client, chosen)
    owners = {str(item.get("owned_by")) for item in models}
    for name in known:
        if SERVERS[name].owner in owners:
            return SERVERS[name](client, chosen)
    found = f"models of {', '.join(sorted(owners))}" if owners else "no list of models at /v1/models"
    raise UnsupportedError(
        f"{client.url}: found {found}, expected a server of {', '.join(known)}", hint="name it with --engine"
    )


def _models(client: HttpClient) -> list[Mapping[str, Any]]:
    document = client.find("/v1/models")
    data = document.get("data") if isinstance(document, dict) else None
    return [item for item in data if isinstance(item, dict)] if isinstance(data, list) else []


class ServerTokenizer(Tokenizer):
    """The tokenizer and chat template of a server, asked for each text."""

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
            hint = "with --target the conversation is rendered here"
            raise RequestError(f"{where}: {error.message}", hint=hint) from error


def ids_of(document: Any, name: str) -> list[int]:
    """The list of ids in a document's field.

    Raises:
        KeyError, TypeError: there is none.
    """
    found = document[name]
    if not isinstance(found, list) or not all(isinstance(item, int) for item in found):
        raise TypeError(f"{name} is no list of ids")
    return found
