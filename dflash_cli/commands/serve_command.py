"""`dflash launch`: the line that starts an engine with a pair. It prints and never runs anything."""

from pathlib import Path
from typing import Annotated

import typer

from dflash_cli import console
from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import TINY, Role, find_checkpoint, is_bundled, open_checkpoint
from dflash_cli.engines.serve_command import Pair, make_line, notices
from dflash_cli.engines.serving_engine import parse_engines
from dflash_cli.options import DraftArg, JsonOption, TargetOption
from dflash_cli.validation.rule import Finding
from dflash_cli.validation.validator import Question, Report, validate_draft
from dflash_runtime.errors import CheckpointError, UnsupportedError, UsageError

EngineOption = Annotated[
    str,
    typer.Option("--engine", "-e", metavar="NAME[@RELEASE]", help="vllm, sglang, transformers or llama.cpp."),
]
TokensOption = Annotated[
    int | None,
    typer.Option("--num-speculative-tokens", "-k", min=1, metavar="K", help="Default: the trained block less one."),
]


def launch(
    draft: DraftArg,
    engine: EngineOption,
    target: TargetOption = None,
    num_speculative_tokens: TokensOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the command that serves a pair, with the K that the engine counts in."""
    engines = parse_engines(engine)
    if len(engines) != 1:
        raise UsageError(f"--engine {engine!r}, expected one engine")
    target = _target(draft, target)
    place, target_place = find_checkpoint(draft, Role.DRAFT), find_checkpoint(target, Role.TARGET)
    report = validate_draft(
        Question(
            draft=place,
            reference=str(place) if is_bundled(draft) else draft,
            target=target_place,
            target_reference=target,
            engines=engines,
            num_speculative_tokens=num_speculative_tokens,
        )
    )
    _refuse(report)
    config = open_draft(open_checkpoint(place)).config
    asked = config.num_draft_tokens if num_speculative_tokens is None else num_speculative_tokens
    if asked > config.num_draft_tokens:
        raise UsageError(f"{asked} speculative tokens, expected at most {config.num_draft_tokens}: the trained block")
    line = make_line(
        engines[0].name,
        Pair(
            draft=str(place) if is_bundled(draft) else draft,
            target=str(target_place) if is_bundled(target) else target,
            config=config,
            target_config=open_target(open_checkpoint(target_place)).config,
            num_draft_tokens=asked,
            notices=notices(report.findings),
        ),
    )
    for item in (place, target_place):
        if not isinstance(item, Path):
            console.status(f"{item.path}: {item.traffic.text}")
    for finding in report.findings:
        if finding.severity != "info":
            console.warn(f"{finding.id} {finding.place}: {finding.message}; {finding.effect}")
    if as_json:
        console.result_json(
            {
                "engine": str(engines[0]),
                "commands": list(line.commands),
                "env": dict(line.env),
                "num_draft_tokens": line.num_draft_tokens,
                "verdict": report.verdicts[0].document(),
            }
        )
    else:
        console.result(line.text)


def _target(draft: str, target: str | None) -> str:
    """The target that is given, or the one the draft names."""
    if target is not None:
        return target
    if is_bundled(draft):
        return TINY
    verifier = open_draft(open_checkpoint(find_checkpoint(draft, Role.DRAFT))).config.verifier
    if verifier is None or not verifier.name_or_path:
        raise UsageError(f"{draft} names no target of its own", hint="add --target REF")
    return verifier.name_or_path


def _refuse(report: Report) -> None:
    """Stop where the engine would not serve the pair.

    Raises:
        UnsupportedError: the draft is sound, but not for this engine.
        CheckpointError: the draft is not sound, or not for this target.
    """
    stopping = [item for item in report.findings if item.severity == "error" and item.outcome == "stops"]
    if not stopping:
        return
    about_engine = [item for item in stopping if item.engines or item.id == "C01"]
    first: Finding = (about_engine or stopping)[0]
    text = f"{report.verdicts[0].engine} cannot serve it: {first.id} {first.place}: {first.message}"
    kind = UnsupportedError if about_engine and len(about_engine) == len(stopping) else CheckpointError
    raise kind(text, hint=first.fix)
