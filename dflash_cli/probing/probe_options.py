"""The options of `dflash probe`, and the connections they open."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dflash_cli.acceptance.prompt_choice import choose_rows
from dflash_cli.checkpoints.references import Role, fetch_directory
from dflash_cli.comparing.measured_result import read_result
from dflash_cli.documents.atomic_file import check_parent
from dflash_cli.generation.prompt_sets import default_prompts, read_prompts
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.tokenizer import Tokenizer, find_tokenizer, template_arguments
from dflash_cli.probing.findings.known_faults import known_faults
from dflash_cli.probing.runs.server_run import ServerRequest
from dflash_cli.probing.served.token_equality import NEAR_TIE_NATS
from dflash_cli.probing.servers.http_client import HttpClient
from dflash_cli.probing.servers.inference_server import Asked, InferenceServer, ServerTokenizer
from dflash_cli.probing.servers.recognition import check_engine, open_server
from dflash_cli.terminal import console
from dflash_cli.terminal.options import GateOptions, PromptOptions, ResumableOptions, VerdictOptions
from dflash_cli.terminal.parameters import ESSENTIALS, MEASURING, Option
from dflash_cli.terminal.sampling_options import TemperatureOptions
from dflash_runtime.checkpoint.text.tokenizer import find_stop_ids
from dflash_runtime.errors import UsageError

ANY_TARGET = "the served target"


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(TemperatureOptions, VerdictOptions, PromptOptions, ResumableOptions, GateOptions):
    """Options of `dflash probe`: the connection, the requests and the results to compare with."""

    engine: Annotated[
        str,
        Option(
            short="-e", metavar="NAME", group=ESSENTIALS,
            help="Engine of the server: vllm, sglang or llama.cpp. auto: by its models, metrics, documents or answers.",
        ),
    ] = "auto"  # fmt: skip
    served_model: Annotated[
        str | None,
        Option(metavar="NAME", group=MEASURING, help="Model to ask for. Default: the server's first."),
    ] = None
    concurrency: Annotated[
        tuple[int, ...],
        Option(
            min=1, group=ESSENTIALS,
            help="Numbers of requests at once, one run for each. Later runs are compared with the first.",
        ),
    ] = (1, 8)  # fmt: skip
    result: Annotated[
        Path | None,
        Option(
            is_per_run=True, metavar="FILE", group=ESSENTIALS, is_setting=False,
            help="A local result to compare with: a file of eval-acceptance, written with --output or --json.",
        ),
    ] = None  # fmt: skip
    beside: Annotated[
        str | None,
        Option(
            is_per_run=True,
            metavar="URL",
            group=ESSENTIALS,
            is_setting=False,
            help="Another server to ask the same and compare with.",
        ),
    ] = None
    draft: Annotated[
        str | None,
        Option(
            short="-d", metavar="DRAFT", group=MEASURING,
            help="The served draft. Rules then check it for this engine and release.",
        ),
    ] = None  # fmt: skip
    target: Annotated[
        str | None,
        Option(
            short="-t", metavar="TARGET", group=MEASURING,
            help="The served target. Its tokenizer then renders the prompts instead of the server.",
        ),
    ] = None  # fmt: skip
    near_tie: Annotated[
        float,
        Option(
            min=0, metavar="NATS", group=MEASURING, help="The largest gap between two tokens that rounding explains."
        ),
    ] = NEAR_TIE_NATS
    questions: Annotated[
        bool,
        Option(
            off="--no-questions",
            group=ESSENTIALS,
            help="Also ask about the prefix cache, second turns, plain decoding, defaults, JSON, tools and streams.",
        ),
    ] = True
    max_time: Annotated[
        float,
        Option(
            min=1, metavar="SECONDS", group=MEASURING, is_setting=False,
            help="Longest time of the probe. Prompts and questions without time are left out.",
        ),
    ] = 180.0  # fmt: skip
    timeout: Annotated[
        float,
        Option(min=0.001, metavar="SECONDS", group=MEASURING, is_setting=False, help="Longest wait for one answer."),
    ] = 300.0
    retries: Annotated[
        int,
        Option(
            min=0, group=MEASURING, is_setting=False,
            help="Retries after a timeout, a broken connection, or the status 429, 500, 502, 503 or 504.",
        ),
    ] = 3  # fmt: skip
    api_key_env: Annotated[
        str | None,
        Option(
            is_per_run=True, metavar="NAME", group=MEASURING, is_setting=False,
            help="Environment variable with the server's key. The key is sent to URL only, and never printed.",
        ),
    ] = None  # fmt: skip
    beside_api_key_env: Annotated[
        str | None,
        Option(
            is_per_run=True,
            metavar="NAME",
            group=MEASURING,
            is_setting=False,
            help="Environment variable with the key of --beside.",
        ),
    ] = None

    def check(self) -> None:
        super().check()
        if self.engine != "auto":
            check_engine(self.engine)
        if not self.concurrency or len(set(self.concurrency)) < len(self.concurrency):
            raise UsageError(field="--concurrency", found=list(self.concurrency), expected="each number once")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """The requests to a server, and the results to compare with.

    ends_at        the end of the probe, in seconds of `time.monotonic`
    end_ids        tokens that end a text of the target given as --target
    beside         another server that gets the same requests
    known_faults   findings of rules about the checkpoint on this engine
    """

    server: InferenceServer
    asking: ServerRequest
    source: PromptSource
    options: ProbeOptions
    ends_at: float
    end_ids: tuple[int, ...] = ()
    beside: InferenceServer | None = None
    known_faults: Sequence[str] = ()


@contextmanager
def open_probe(url: str, options: ProbeOptions) -> Iterator[ProbePlan]:
    """The plan of a probe, after all checks of files. Its connections are closed at the end.

    Raises:
        ServerUnreachable: a server does not answer.
        UnsupportedError: a server's engine is unknown.
        CheckpointNotFound: a file does not exist.
        UsageError: an option contradicts the server or another option, or a file cannot be read.
    """
    given = read_prompts(options.prompts, options.dataset, options.dataset_format, count=options.num_prompts)
    key = _key(options.api_key_env, "--api-key-env")
    beside_key = _key(options.beside_api_key_env, "--beside-api-key-env")
    if options.result is not None:
        read_result(options.result)
    if options.output is not None:
        check_parent(options.output)
    console.status(f"asking {url} ...")
    ends_at = time.monotonic() + options.max_time
    with ExitStack() as clients:

        def connect(address: str, key: str | None, engine: str, model: str | None) -> InferenceServer:
            client = HttpClient(address, key=key, timeout_s=options.timeout, num_retries=options.retries)
            client.ends_at = ends_at
            clients.callback(client.close)
            return open_server(client, engine=engine, model=model)

        server = connect(url, key, options.engine, options.served_model)
        beside = None
        if options.beside is not None:
            beside = connect(options.beside, beside_key, "auto", None)
        tokenizer = _tokenizer(server, options)
        choice = choose_rows(
            given or default_prompts(options.target or ANY_TARGET), tokenizer, chat=options.chat,
            count=options.num_prompts, sample=options.sample, seed=options.seed, is_default=given is None,
        )  # fmt: skip
        yield ProbePlan(
            server=server,
            asking=_asking(options, choice.rows, tokenizer, chat=choice.chat),
            source=choice.source,
            options=options,
            ends_at=ends_at,
            end_ids=_end_ids(options),
            beside=beside,
            known_faults=known_faults(options.draft, options.target, server),
        )


def _asking(options: ProbeOptions, rows: Sequence[PromptRow], tokenizer: Tokenizer, *, chat: bool) -> ServerRequest:
    return ServerRequest(
        rows=rows,
        asked=Asked(
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
            ignore_eos=options.ignore_eos,
        ),
        tokenizer=tokenizer,
        chat=chat,
        confidence=options.confidence,
        journal=options.output,
        resume=options.resume,
        force=options.force,
    )


def _tokenizer(server: InferenceServer, options: ProbeOptions) -> Tokenizer:
    if options.target is None:
        return ServerTokenizer(server, template_arguments(options.template_options))
    path = fetch_directory(options.target, Role.TARGET)
    found = find_tokenizer(path, options.template_options)
    if found is None:
        raise UsageError(
            "has no tokenizer",
            path=path,
            id="no-tokenizer",
            field="--target",
            hint="leave out --target to use the server's tokenizer",
        )
    return found


def _end_ids(options: ProbeOptions) -> tuple[int, ...]:
    """The tokens that end a text of the target, by its own files; empty without --target."""
    if options.target is None:
        return ()
    path = fetch_directory(options.target, Role.TARGET)
    # Help pages import this module too, and must stay fast.
    from dflash_cli.checkpoints.opening import open_target

    return find_stop_ids(open_target(path), find_tokenizer(path))


def _key(name: str | None, option: str) -> str | None:
    """The key in an environment variable.

    Raises:
        UsageError: the variable is not set.
    """
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise UsageError(field=option, found=name, expected="an environment variable that is set and not empty")
    return key
