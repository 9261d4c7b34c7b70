"""Options that several commands share, written once: single ones as annotations, sets of them as groups.

A command takes a group as one parameter; `flatten` shows Typer the group's fields in its place.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

import typer

from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.scheduling.request import SamplingParams

DraftArg = Annotated[str, typer.Argument(metavar="DRAFT", help="Draft: a directory, org/repo[@rev], or tiny.")]
OptionalDraftArg = Annotated[
    str | None,
    typer.Argument(
        metavar="DRAFT", help="Draft: a directory, org/repo[@rev], tiny or tiny:reduced.", show_default=False
    ),
]
DraftOption = Annotated[
    str | None,
    typer.Option("--draft", "-d", metavar="REF", help="Draft: a directory, org/repo[@rev], tiny or tiny:reduced."),
]
TargetOption = Annotated[
    str | None,
    typer.Option("--target", "-t", metavar="REF", help="Target: a directory, org/repo[@rev], or tiny."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an output that exists already.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
PromptsOption = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        "-p",
        metavar="FILE",
        help="JSON Lines with prompt, messages, turns or prompt_token_ids; - reads stdin.",
    ),
]
CausalityOption = Annotated[
    Literal["causal", "non-causal", "layer-types"] | None,
    typer.Option(help="Read the draft's blocks so, whatever its config says.", show_default=False),
]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Tokens to generate a prompt.")]
ChatOption = Annotated[bool, typer.Option("--chat/--raw", help="Send prompts through the target's chat template.")]
TemplateOption = Annotated[
    str | None,
    typer.Option("--chat-template-kwargs", metavar="JSON", help='For the template, e.g. {"enable_thinking": false}.'),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen."""

    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0 is all.")] = 0
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens that reach p.")] = 1.0
    seed: Annotated[int, typer.Option(help="Seed of all sampling.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past stop tokens.")] = False
    stop_token_id: Annotated[
        list[int] | None, typer.Option(metavar="ID", help="A further id that ends a text; repeatable.")
    ] = None
    verify_width: Annotated[
        int | None, typer.Option(min=1, metavar="ROWS", help="Verify only so many rows of a block, anchor included.")
    ] = None

    def params(self, max_new_tokens: int) -> SamplingParams:
        """The runtime's form."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_id or ()),
            ignore_eos=self.ignore_eos,
            verify_width=self.verify_width,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How the engine runs."""

    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            min=0,
            metavar="K",
            help="Tokens to draft a step; the draft sees K + 1 rows. Default: the trained block less its anchor. "
            "0 decodes plainly.",
        ),
    ] = None
    draft_sampling: Annotated[
        Literal["greedy", "probabilistic"],
        typer.Option(help="Draft the most likely tokens, or draw them and verify with their real distribution."),
    ] = "greedy"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float64"],
        typer.Option(help="Arithmetic; auto is bfloat16 on a GPU and float32 on the CPU."),
    ] = "auto"
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")] = "auto"
    kernels: Annotated[
        Literal["auto", "triton", "reference"], typer.Option(help="auto is triton on a GPU and reference on the CPU.")
    ] = "auto"
    max_num_requests: Annotated[int, typer.Option(min=1, help="Requests in a step at most.")] = 16
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Prompt and output at most. Default: the pair's own limit.")
    ] = None
    max_batched_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens a step prefills at most.")] = 2048
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a KV page.")] = 16
    kv_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory for KV, such as 512M or 20G, in units of 1,024. Default: what is free."
        ),
    ] = None
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to use.")] = 0.9
    prefix_cache: Annotated[bool, typer.Option(help="Reuse KV of prompts that begin alike.")] = True
    scheduling: Annotated[
        Literal["async", "sync"], typer.Option(help="Queue steps ahead of their results, or wait for each.")
    ] = "async"

    def config(self) -> EngineConfig:
        """The runtime's form."""
        return EngineConfig(
            device=self.device,
            dtype=self.dtype,
            kernels=self.kernels,
            num_draft_tokens=self.num_speculative_tokens,
            draft_sampling=self.draft_sampling,
            max_model_len=self.max_model_len,
            max_num_requests=self.max_num_requests,
            max_batched_tokens=self.max_batched_tokens,
            page_size=self.page_size,
            kv_memory_bytes=parse_size(self.kv_memory, "--kv-memory") if self.kv_memory is not None else None,
            gpu_memory_utilization=self.gpu_memory_utilization,
            prefix_cache=self.prefix_cache,
            scheduling=self.scheduling,
        )


GROUPS = (SamplingOptions, EngineOptions)


def one_draft(positional: str | None, option: str | None) -> str:
    """The draft of a command that takes it as its first argument or as `--draft`.

    Raises:
        UsageError: none, or two.
    """
    given = [draft for draft in (positional, option) if draft is not None]
    if not given:
        raise UsageError("no draft is given", hint="name it first: a directory, org/repo[@rev], or tiny")
    if len(given) > 1:
        raise UsageError(f"two drafts are given, {given[0]} and --draft {given[1]}, expected one")
    return given[0]


def flatten(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a group by the group's fields, for Typer; the command still gets the group."""
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    members: dict[str, tuple[type[Any], list[str]]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if kind not in GROUPS:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        members[parameter.name] = (kind, [item.name for item in fields(kind)])
        inner = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=inner[item.name]
            )
            for item in fields(kind)
        ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        groups = {name: kind(**{key: arguments.pop(key) for key in keys}) for name, (kind, keys) in members.items()}
        command(**arguments, **groups)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def parse_size(text: str, option: str) -> int:
    """Bytes of `512M`, `20GB`, `1.5GiB` or a plain number of bytes; every unit is a power of 1,024.

    Raises:
        UsageError: anything else.
    """
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    factor = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(number[-1:], 1)
    try:
        size = float(number.rstrip("KMGT")) * factor
    except ValueError:
        size = 0.0
    if not 1 <= size < 2**63:
        raise UsageError(f"{option} {text!r}, expected a size such as 512M or 20G, in units of 1,024")
    return int(size)
