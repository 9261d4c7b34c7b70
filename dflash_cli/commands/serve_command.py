"""`dflash serve-command`: print the command that starts an engine with a pair. Nothing is run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import find_checkpoint
from dflash_cli.engines.pair_serving import judge_pair
from dflash_cli.engines.serving_engine import ServeCommand, ServingEngine, known_engines, parse_engines
from dflash_cli.rules.report import Report
from dflash_cli.rules.verdict import Verdict
from dflash_cli.terminal import console
from dflash_cli.terminal.options import DraftArg, JsonOption, TargetOption
from dflash_runtime.errors import UsageError

EngineOption = Annotated[
    str,
    typer.Option(
        "--engine", "-e", metavar="NAME[@RELEASE],...", help=f"Engines to print the command for: {known_engines()}."
    ),
]
TokensOption = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        min=1,
        metavar="K",
        help="Tokens to draft in each step. Default: the draft's block size minus one.",
    ),
]


def serve_command(
    engine: EngineOption,
    draft: DraftArg,
    target: TargetOption = None,
    num_speculative_tokens: TokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the command that serves a pair with an engine. Nothing is run.

    Engines count drafted tokens differently; each command has the number that its engine expects.
    """
    engines = parse_engines(engine)
    if not engines:
        raise UsageError(f"--engine {engine!r}, expected an engine (known: {known_engines()})")
    pair = complete_pair(draft, target, find=find_checkpoint)
    if pair.note is not None:
        console.note(pair.note)
    judged = judge_pair(pair, engines, num_speculative_tokens)
    first = judged.first_refusal
    if first is not None and None not in judged.refusals.values():
        raise first
    served = judged.served
    for item in judged.locations:
        if not isinstance(item, Path):
            console.status(f"{item.path}: {item.traffic.text}")
    for finding in judged.report.findings:
        if finding.severity != "info":
            console.warn(f"{finding.id} {finding.location}: {finding.message}; {finding.effect}")
    commands = {item: item.serve_command(served) for item in engines if judged.refusals[item.name] is None}
    _print(commands, judged.report, as_json=as_json)
    if first is not None:
        raise first


def _print(commands: dict[ServingEngine, ServeCommand], report: Report, *, as_json: bool) -> None:
    """The commands; under the engine's name, as a comment of the shell, where there are several."""
    verdicts = {verdict.engine.name: verdict for verdict in report.verdicts}
    if as_json:
        found = [_document(engine, command, verdicts[engine.name]) for engine, command in commands.items()]
        console.result_json({"serve_commands": found})
        return
    for engine, command in commands.items():
        label = f"# {engine}\n" if len(verdicts) > 1 else ""
        console.result(label + command.text)


def _document(engine: ServingEngine, command: ServeCommand, verdict: Verdict) -> dict[str, Any]:
    return {"engine": str(engine), **command.to_json(), "verdict": verdict.to_json()}
