"""`dflash serve-command`: print the command that starts an engine with a pair."""

from dataclasses import dataclass
from typing import Annotated

from dflash_cli.checkpoints.pair_references import complete_pair
from dflash_cli.checkpoints.references import find_checkpoint
from dflash_cli.commands.inspect import tell_traffic
from dflash_cli.engines.engine_names import check_tensor_parallel, known_engines, parse_engines
from dflash_cli.engines.pair_serving import ServeCommandDocument, ServedEngine, judge_pair
from dflash_cli.engines.serving_engine import ServeCommand, ServingEngine
from dflash_cli.rules.report import Report
from dflash_cli.terminal import console
from dflash_cli.terminal.options import DraftOptions, ServedOptions, TargetOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Option
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.shown import Shown
from dflash_runtime.errors import DFlashError, UsageError


@dataclass(frozen=True, kw_only=True)
class ServeCommandRequest(ServedOptions, TargetOptions, DraftOptions):
    """Print the command that serves a pair with an engine. Nothing is run.

    Engines count draft tokens differently. Each command has the number that its engine expects.
    """

    engine: Annotated[
        tuple[str, ...],
        Option(
            short="-e", metavar="NAME[@RELEASE],...", group=ESSENTIALS,
            help=f"Engines to print the command for: {known_engines()}.",
        ),
    ]  # fmt: skip

    def check(self) -> None:
        super().check()
        if not self.engine:
            raise UsageError(field="--engine", found=[], expected=f"an engine: {known_engines()}")
        check_tensor_parallel(parse_engines(",".join(self.engine)), self.tensor_parallel)


@dataclass(frozen=True, kw_only=True, repr=False)
class ServeCommands(Shown):
    """The command of each engine that serves the pair; `refusals` says why the others do not."""

    commands: dict[ServingEngine, ServeCommand]
    refusals: dict[str, DFlashError | None]
    report: Report

    @property
    def document(self) -> ServeCommandDocument:
        """The document of `dflash serve-command --json`."""
        verdicts = {verdict.name: verdict for verdict in self.report.verdicts}
        return ServeCommandDocument(
            tuple(ServedEngine(str(engine), item, verdicts[engine.name]) for engine, item in self.commands.items())
        )

    def summary(self) -> list[str]:
        return [line for command in self.commands.values() for line in command.text.splitlines()]


@verb(ServeCommandRequest)
def serve_command(request: ServeCommandRequest) -> ServeCommands:
    """The commands that serve a pair.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: the pair is absent, or no engine serves it.
    """
    engines = parse_engines(",".join(request.engine))
    pair = complete_pair(request.draft, request.target, find=find_checkpoint)
    if pair.note is not None:
        console.note(pair.note)
    judged = judge_pair(pair, engines, request.num_speculative_tokens, request.tensor_parallel)
    first = judged.first_refusal
    if first is not None and None not in judged.refusals.values():
        raise first
    served = judged.served
    tell_traffic(*judged.locations)
    commands = {item: item.serve_command(served) for item in engines if judged.refusals[item.name] is None}
    return ServeCommands(commands=commands, refusals=dict(judged.refusals), report=judged.report)


def command(request: ServeCommandRequest) -> None:
    """Print the commands, then an error if an engine does not serve the pair."""
    found = serve_command(request)
    for finding in found.report.findings:
        if finding.severity != "info":
            console.warn(f"{finding.id} {finding.location}: {finding.message}; {finding.effect}")
    console.show(found, lambda: _print(found))
    refusal = next((item for item in found.refusals.values() if item is not None), None)
    if refusal is not None:
        raise refusal


def _print(found: ServeCommands) -> None:
    for engine, item in found.commands.items():
        label = [f"# {engine}"] if len(found.report.verdicts) > 1 else []
        console.result(*label, *item.text.split("\n"))
