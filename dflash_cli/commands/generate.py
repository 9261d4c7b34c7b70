"""`dflash generate`: complete prompts with a pair."""

import time
from contextlib import ExitStack
from typing import Annotated

import typer

from dflash_cli import console
from dflash_cli.options import (
    ChatOption,
    DeviceOption,
    DraftOption,
    DTypeOption,
    IgnoreEosOption,
    JsonOption,
    KOption,
    MaxModelLenOption,
    MaxNewTokensOption,
    MaxNumRequestsOption,
    PromptsOption,
    SeedOption,
    StopTokenIdsOption,
    TargetOption,
    TemperatureOption,
    TemplateOption,
    TopKOption,
    TopPOption,
)
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.request import SamplingParams

PromptArg = Annotated[
    list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Text to complete; - reads it from stdin.")
]
OutputOption = Annotated[
    str | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write a JSON row a request; - writes them to stdout."),
]


def generate(
    prompt: PromptArg = None,
    draft: DraftOption = None,
    target: TargetOption = None,
    prompts: PromptsOption = None,
    output: OutputOption = None,
    max_new_tokens: MaxNewTokensOption = 256,
    num_speculative_tokens: KOption = None,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    ignore_eos: IgnoreEosOption = False,
    stop_token_id: StopTokenIdsOption = None,
    chat: ChatOption = False,
    chat_template_kwargs: TemplateOption = None,
    dtype: DTypeOption = "auto",
    device: DeviceOption = "auto",
    max_num_requests: MaxNumRequestsOption = 16,
    max_model_len: MaxModelLenOption = None,
    as_json: JsonOption = False,
) -> None:
    """Complete prompts: text to stdout as it is committed, one line of statistics to stderr.

    Without --draft and --target the bundled pair runs: dflash generate "def fibonacci(n):"
    """
    if as_json and output == "-":
        raise UsageError("--json and --output - both write to stdout")
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    config = EngineConfig(
        dtype=dtype,
        device=device,
        num_draft_tokens=num_speculative_tokens,
        max_num_requests=max_num_requests,
        max_model_len=max_model_len,
    )
    from dflash_cli.prompts import gather_rows

    rows = gather_rows(prompt or [], prompts)
    from dflash_cli.generation import Tally, answer_rows
    from dflash_cli.session import open_session
    from dflash_cli.sinks import ProgressSink, Sink, TextSink, open_row_sink

    session = open_session(draft, target, config, template_options=chat_template_kwargs)
    params = params.with_stops(session.stop_token_ids)
    tally = Tally(session.llm.num_draft_tokens)
    started = time.perf_counter()
    with ExitStack() as stack:
        sinks: list[Sink] = [tally.add]
        if output is not None:
            sinks.append(open_row_sink(rows, output, stack))
        if output is None and not as_json:
            sinks.append(TextSink(rows))
        else:
            sinks.append(ProgressSink(tally, sum(row.num_turns for row in rows), "generating", stack))
        for event in answer_rows(session, rows, lambda row: params, chat=chat):
            for sink in sinks:
                sink(event)
    seconds = time.perf_counter() - started
    if as_json:
        console.result_json(tally.to_json(session, seconds))
    console.status(tally.figures(seconds))
