"""What a user says of a probe, and the request that comes of it."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dflash_cli.acceptance.prompt_choice import choose_rows
from dflash_cli.generation.prompt_sets import PromptSet, default_prompts
from dflash_cli.generation.tokenizer import Tokenizer, find_tokenizer, template_arguments
from dflash_cli.probing.http_client import HttpClient
from dflash_cli.probing.inference_server import Asked, InferenceServer, ServerTokenizer, open_server
from dflash_cli.probing.server_probe import ProbeRequest
from dflash_cli.probing.server_run import ServerRequest
from dflash_cli.probing.token_equality import NEAR_TIE_NATS
from dflash_cli.terminal.parameters import ESSENTIALS, MEASURING, SAMPLING
from dflash_runtime.errors import UsageError

ANY_TARGET = "the target that is served"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """How a server is reached and asked, and what it is held against."""

    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="NAME",
            help="vllm, sglang or llama.cpp; auto is what the server's list of models says.",
            rich_help_panel=ESSENTIALS,
        ),
    ] = "auto"
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Model to ask for. Default: the server's first.", rich_help_panel=ESSENTIALS
        ),
    ] = None
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            metavar="N,...",
            help="Requests at a time, one run for each; later ones are held against the first.",
            rich_help_panel=ESSENTIALS,
        ),
    ] = "1,8"
    result: Annotated[
        Path | None,
        typer.Option(
            "--result",
            metavar="FILE",
            help="Our own number to hold it against: what eval-acceptance wrote with --rows, or with --json.",
            rich_help_panel=ESSENTIALS,
        ),
    ] = None
    beside: Annotated[
        str | None,
        typer.Option(
            "--beside",
            metavar="URL",
            help="Another server to ask the same and hold it against.",
            rich_help_panel=ESSENTIALS,
        ),
    ] = None
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "-d",
            metavar="DRAFT",
            help="The draft that is served: rules say what this engine and release are known to make of it.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="TARGET",
            help="The target that is served: prompts are rendered with its tokenizer, and not with the server's.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    near_tie: Annotated[
        float,
        typer.Option(
            "--near-tie",
            min=0.0,
            metavar="NATS",
            help="The largest gap between two tokens that rounding explains.",
            rich_help_panel=MEASURING,
        ),
    ] = NEAR_TIE_NATS
    confidence: Annotated[
        float,
        typer.Option("--confidence", metavar="X", help="Confidence level of intervals.", rich_help_panel=MEASURING),
    ] = 0.95
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout", min=0.001, metavar="S", help="Seconds to wait for one answer.", rich_help_panel=MEASURING
        ),
    ] = 300.0
    retries: Annotated[
        int,
        typer.Option(
            "--retries",
            min=0,
            metavar="N",
            help="Try so often again after a timeout, a broken connection or a status of 500 or more.",
            rich_help_panel=MEASURING,
        ),
    ] = 3
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env",
            metavar="NAME",
            help="Environment variable that holds the server's key; it is sent to URL alone, and shown nowhere.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    beside_api_key_env: Annotated[
        str | None,
        typer.Option(
            "--beside-api-key-env",
            metavar="NAME",
            help="Environment variable that holds the key of --beside.",
            rich_help_panel=MEASURING,
        ),
    ] = None
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            min=0.0,
            metavar="X",
            help="Sampling temperature; answers are compared at 0 only.",
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0
    seed: Annotated[
        int, typer.Option("--seed", min=0, metavar="N", help="Seed for sampling.", rich_help_panel=SAMPLING)
    ] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Keep generating past stop tokens.", rich_help_panel=SAMPLING)
    ] = False

    def __post_init__(self) -> None:
        if not 0.5 < self.confidence < 1:
            raise UsageError(f"--confidence {self.confidence:g}, expected a number between 0.5 and 1")
        if not self.concurrencies or min(self.concurrencies) < 1:
            raise UsageError(f"--concurrency {self.concurrency!r}: expected numbers of 1 or more, such as 1,8")
        if len(set(self.concurrencies)) < len(self.concurrencies):
            raise UsageError(f"--concurrency {self.concurrency!r}: a number is given twice")

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """The numbers, in the order given; empty where one is none."""
        parts = self.concurrency.split(",")
        return tuple(map(int, parts)) if all(part.strip().isdecimal() for part in parts) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePrompts:
    """What is asked, and where the answers are kept. Without `target_path` the server renders the prompts.

    `given` is None for the bundled set: chats, or for the bundled target pieces of Python.
    """

    given: PromptSet | None = None
    num_prompts: int | None = None
    max_new_tokens: int = 128
    chat: bool | None = None
    template_options: str | None = None
    target_path: Path | None = None
    journal: Path | None = None
    resume: bool = False
    force: bool = False


@contextmanager
def open_probe(url: str, options: ProbeOptions, prompts: ProbePrompts) -> Iterator[ProbeRequest]:
    """The request, with connections that are closed at the end.

    Raises:
        ServerUnreachable, UnsupportedError, UsageError: a server does not answer, or is of no known engine.
    """
    with ExitStack() as clients:

        def connect(place: str, key: str | None, engine: str, model: str | None) -> InferenceServer:
            client = HttpClient(place, key=key, timeout_s=options.timeout, num_retries=options.retries)
            clients.callback(client.close)
            return open_server(client, engine=engine, model=model)

        server = connect(url, _key(options.api_key_env, "--api-key-env"), options.engine, options.model)
        beside = None
        if options.beside is not None:
            key = _key(options.beside_api_key_env, "--beside-api-key-env")
            beside = connect(options.beside, key, "auto", None)
        tokenizer = _tokenizer(server, prompts)
        choice = choose_rows(
            prompts.given or default_prompts(options.target or ANY_TARGET), tokenizer, chat=prompts.chat,
            count=prompts.num_prompts, seed=options.seed, is_default=prompts.given is None,
        )  # fmt: skip
        asking = ServerRequest(
            rows=choice.rows,
            asked=Asked(
                max_new_tokens=prompts.max_new_tokens,
                temperature=options.temperature,
                seed=options.seed,
                ignore_eos=options.ignore_eos,
            ),
            tokenizer=tokenizer,
            chat=choice.chat,
            confidence=options.confidence,
            journal=prompts.journal,
            resume=prompts.resume,
            force=prompts.force,
        )
        yield ProbeRequest(
            server=server,
            asking=asking,
            source=choice.source,
            concurrencies=options.concurrencies,
            result=options.result,
            beside=beside,
            near_tie_nats=options.near_tie,
        )


def _tokenizer(server: InferenceServer, prompts: ProbePrompts) -> Tokenizer:
    if prompts.target_path is None:
        return ServerTokenizer(server, template_arguments(prompts.template_options))
    found = find_tokenizer(prompts.target_path, prompts.template_options)
    if found is None:
        raise UsageError(f"{prompts.target_path}: has no tokenizer", hint="without --target the server's is asked")
    return found


def _key(name: str | None, option: str) -> str | None:
    """The key in an environment variable.

    Raises:
        UsageError: the variable is not set.
    """
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise UsageError(f"{option} {name}: the environment has no such variable, or it is empty")
    return key
