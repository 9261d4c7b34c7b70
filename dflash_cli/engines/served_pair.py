"""A validated pair as a serve command is made of it, or why an engine would not serve it."""

from dataclasses import replace

from dflash_cli.engines.serving_engine import ServeCommand, ServedPair, ServingEngine
from dflash_cli.validation.report import Report
from dflash_cli.validation.rule import Finding
from dflash_cli.validation.subject import Subject
from dflash_cli.validation.validator import ValidationRequest, open_requested, validate_subject
from dflash_cli.validation.verdict import Verdict
from dflash_runtime.errors import CheckpointError, DFlashError, UnsupportedError, UsageError


def served_pair(subject: Subject, report: Report, target: str) -> ServedPair:
    """The pair as the engines are told of it.

    Raises:
        UsageError: more speculative tokens than the trained block has, or neither is known.
        CheckpointError, UnsupportedError: a config that cannot be read, though no engine would stop at it.
    """
    if subject.parsed is None and subject.parse_error is not None:
        if subject.block_size is None and subject.num_speculative_tokens is None:
            raise UsageError(
                f"{subject.path}: states no block_size, so how many tokens to draft is not known",
                hint="pass -k with the number that it was trained to draft",
            ) from subject.parse_error
        raise subject.parse_error
    assert subject.parsed is not None
    assert subject.target is not None
    config, asked = subject.parsed.config, subject.num_speculative_tokens
    most = config.num_draft_tokens
    if asked is not None and asked > most:
        raise UsageError(
            f"{asked} speculative tokens, expected at most {most}: the draft was trained for blocks of {most + 1}"
        )
    return ServedPair(
        draft=subject.served_name,
        target=target,
        config=config,
        target_facts=subject.target,
        num_draft_tokens=most if asked is None else asked,
        flags=frozenset(item.serve_flag for item in report.findings if item.serve_flag is not None),
    )


def refusal_of(verdict: Verdict, report: Report) -> UnsupportedError | CheckpointError | None:
    """Why the engine would not serve the pair: it is not for this engine, or not sound, or not for this target."""
    errors = [item for item in report.findings if item.severity == "error" and item.concerns(verdict.engine.name)]
    stopping = [item for item in errors if item.outcome == "stops"]
    if not stopping:
        return None
    about_engine = [item for item in stopping if item.engines or item.stage == "identity"]
    first: Finding = (about_engine or stopping)[0]
    text = f"{verdict.engine} cannot serve the draft: {first.id} {first.location}: {first.message}"
    kind = UnsupportedError if about_engine and len(about_engine) == len(stopping) else CheckpointError
    return kind(text, hint=first.fix)


def engine_settings(
    request: ValidationRequest, target: str, schedule: tuple[tuple[int, int, int], ...] = ()
) -> dict[ServingEngine, ServeCommand | DFlashError]:
    """The command that starts each of the request's engines with its K, or why the engine would not serve the pair.

    `target` is its name as engines take it; `schedule` is that of a `ServedPair`.
    """
    subject = open_requested(request)
    report = validate_subject(subject, request)
    refusals = {verdict.engine.name: refusal_of(verdict, report) for verdict in report.verdicts}
    served = replace(served_pair(subject, report, target), schedule=schedule)
    engines = [item for item in request.engines if isinstance(item, ServingEngine)]
    return {item: refusals[item.name] or item.serve_command(served) for item in engines}
