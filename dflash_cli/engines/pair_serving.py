"""Which engines serve a pair, and with which commands. Nothing is run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from dflash_cli.checkpoints.pair_references import PairReferences, complete_pair, served_name
from dflash_cli.checkpoints.references import Location, find_checkpoint
from dflash_cli.engines.serving_engine import ServeCommand, ServedPair, ServingEngine
from dflash_cli.formats.dialect import named_architectures
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.rules.report import Report
from dflash_cli.rules.rule import Finding
from dflash_cli.rules.subject import Subject, ValidationPlan, open_subject
from dflash_cli.rules.validator import validate_subject
from dflash_cli.rules.verdict import Verdict
from dflash_runtime.documents import INLINE
from dflash_runtime.errors import CheckpointError, UnsupportedError, UsageError
from dflash_runtime.json_values import is_int

Refusal = UnsupportedError | CheckpointError


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """The commands of one engine."""

    engine: str
    command: Annotated[ServeCommand, INLINE]
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ServeCommandDocument:
    """Result of `dflash serve-command`."""

    KIND: ClassVar[str] = "serve-command"

    serve_commands: tuple[ServedEngine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """A pair, its report, and for each engine the reason why it does not serve the pair, or None."""

    subject: Subject
    report: Report
    target_name: str
    locations: tuple[Location, Location]
    refusals: Mapping[str, Refusal | None]

    @property
    def first_refusal(self) -> Refusal | None:
        return next((error for error in self.refusals.values() if error is not None), None)

    @property
    def served(self) -> ServedPair:
        """The pair as input of a serve command.

        Raises:
            UsageError: the user asks for more drafted tokens than the block has, or the block size is not known.
            CheckpointError, UnsupportedError: the config cannot be read, although no engine stops at it.
        """
        subject = self.subject
        assert subject.target is not None
        asked = subject.plan.num_speculative_tokens
        most = self._most_draft_tokens()
        if asked is not None and asked > most:
            raise UsageError(
                id="too-many-drafts",
                field="--num-speculative-tokens",
                found=asked,
                expected=f"at most {most}: the draft was trained for blocks of {most + 1}",
            )
        limit, named = subject.stated.body.get("max_position_embeddings"), named_architectures(subject.config)
        kind = subject.format if isinstance(subject.format, Kind) else None
        config = subject.parsed.config if subject.parsed is not None else None
        flags = {item.serve_flag for item in self.report.findings} | (kind.serve_flags if kind is not None else set())
        return ServedPair(
            draft=subject.served_name,
            target=self.target_name,
            max_position_embeddings=limit if is_int(limit) else None,
            target_facts=subject.target,
            num_draft_tokens=most if asked is None else asked,
            flags=frozenset(flag for flag in flags if flag is not None),
            method=subject.format.serve_method,
            architecture=named[0] if subject.is_other_kind and named else None,
            is_chain=kind is not None and kind.is_chain,
            settings=kind.serve_settings if kind is not None else {},
            target_layer_ids=config.target_layer_ids if config is not None else (),
            mask_token_id=config.mask_token_id if config is not None else None,
            tensor_parallel=subject.plan.tensor_parallel,
        )

    def _most_draft_tokens(self) -> int:
        """The number of draft tokens that the draft was trained for.

        Raises:
            UsageError: neither the config nor the user says it.
            CheckpointError, UnsupportedError: the config cannot be read, although no engine stops at it.
        """
        subject, asked = self.subject, self.subject.plan.num_speculative_tokens
        block = subject.stated.block_size
        if subject.parsed is not None:
            return subject.parsed.config.num_draft_tokens
        if isinstance(subject.format, Kind) and subject.format.is_chain:
            return self._draft_tokens_of_chain()
        if subject.is_other_kind and block is not None:
            return block if subject.format.samples_from_anchor else block - 1
        if block is None and asked is not None:
            return asked
        assert subject.parse_error is not None
        if block is None:
            raise UsageError(
                "block_size is missing, so the number of draft tokens is not known",
                id="block-size-unknown",
                path=subject.path,
                field="block_size",
                hint="add -k with the number of draft tokens in training",
            ) from subject.parse_error
        raise subject.parse_error

    def _draft_tokens_of_chain(self) -> int:
        """The number of tokens that the user or the config asks a draft for that proposes one after another.

        Raises:
            UsageError: neither says it.
        """
        subject = self.subject
        asked = subject.plan.num_speculative_tokens
        if asked is not None:
            return asked
        stated = subject.kind_reading.draft_tokens if subject.kind_reading is not None else None
        if stated is not None:
            return stated
        raise UsageError(
            f"{subject.format.title} drafts propose any number of tokens, and the config does not state one",
            id="draft-tokens-unknown",
            path=subject.path,
            field="--num-speculative-tokens",
            hint="add -k with the number of draft tokens per step",
        )


def judge_pair(
    pair: PairReferences[Location],
    engines: Sequence[ServingEngine],
    num_speculative_tokens: int | None,
    tensor_parallel: int = 1,
) -> JudgedPair:
    """Validate a complete pair for some engines on `tensor_parallel` GPUs, from its headers.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError, UsageError: the pair cannot be opened.
    """
    location, target_location = pair.draft_location, pair.find_target(find_checkpoint)
    assert location is not None
    assert pair.draft is not None
    assert pair.target is not None
    plan = ValidationPlan(
        draft=location,
        draft_reference=pair.draft,
        target=target_location,
        target_reference=pair.target,
        engines=tuple(engines),
        num_speculative_tokens=num_speculative_tokens,
        tensor_parallel=tensor_parallel,
    )
    subject = open_subject(plan)
    report = validate_subject(subject)
    return JudgedPair(
        subject=subject,
        report=report,
        target_name=served_name(pair.target, target_location),
        locations=(location, target_location),
        refusals={
            engine.name: _refusal(verdict, report, subject)
            for engine, verdict in zip(engines, report.verdicts, strict=True)
        },
    )


def find_serve_commands(
    draft: str | None,
    target: str | None,
    engines: Sequence[ServingEngine],
    num_speculative_tokens: int,
    *,
    names: tuple[str | None, str | None],
) -> tuple[dict[str, str], list[str]]:
    """The command of each engine that serves a pair, and the reasons of the other engines.

    `names` replace the names of draft and target in the commands.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError, UsageError: the pair cannot be opened.
    """
    judged = judge_pair(complete_pair(draft, target, find=find_checkpoint), engines, num_speculative_tokens)
    refusals = [error.message for error in judged.refusals.values() if error is not None]
    serving = [engine for engine in engines if judged.refusals[engine.name] is None]
    if not serving:
        return {}, refusals
    served = judged.served
    served = replace(served, draft=names[0] or served.draft, target=names[1] or served.target)
    return {str(engine): engine.serve_command(served).text for engine in serving}, refusals


def _refusal(verdict: Verdict, report: Report, subject: Subject) -> Refusal | None:
    """The refusal of a serve command: the engine does not support the draft, or the draft is faulty; else None."""
    if verdict.outcome == "unknown":
        unread = f"{verdict.engine}: dflash prints no command for {subject.format.title} drafts"
        text = verdict.text if verdict.kind else unread
        return UnsupportedError(text, id="no-serve-command", found=subject.format.name)
    if verdict.outcome != "stops":
        return None
    errors = [item for item in report.findings if item.severity == "error" and item.concerns(verdict.name)]
    stopping = [item for item in errors if item.outcome == "stops" and item.id in verdict.reasons]
    if isinstance(subject.parse_error, CheckpointError) and all(item.stage == "unexplained" for item in stopping):
        return subject.parse_error
    about_engine = [item for item in stopping if item.engines or item.stage == "identity"]
    first: Finding = (about_engine or stopping)[0]
    text = f"{verdict.engine} cannot serve the draft: {first.id} {first.location}: {first.message}"
    kind = UnsupportedError if about_engine and len(about_engine) == len(stopping) else CheckpointError
    return kind(text, id="not-served", field=first.id, hint=first.fix)
