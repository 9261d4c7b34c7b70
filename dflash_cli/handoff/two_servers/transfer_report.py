"""Whether the draft's context arrives at the decode server: every rule on two servers, and a verdict."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import Role, find_checkpoint, open_checkpoint
from dflash_cli.engines.serving_engine import ServingEngine
from dflash_cli.handoff.two_servers.launch import read_launch
from dflash_cli.handoff.two_servers.server import ServedDraft, Server, ServerEntry
from dflash_cli.handoff.two_servers.server_readers import ENGINE_SERVERS
from dflash_cli.handoff.two_servers.transfer import Transfer
from dflash_cli.rules.report import Findings
from dflash_cli.rules.rule import SEVERITIES, Finding, rules_of
from dflash_cli.rules.subject import Subject, ValidationPlan, open_subject
from dflash_runtime.config import TargetFacts
from dflash_runtime.documents import HIDDEN, computed_key
from dflash_runtime.errors import DFlashError, UsageError

Outcome = Literal["arrives", "lost", "refused", "unknown"]
TEXTS: Mapping[Outcome, str] = {
    "arrives": "the draft's context arrives",
    "lost": "the draft's context does not arrive, and acceptance falls",
    "refused": "the servers do not work together",
    "unknown": "not known whether the draft's context arrives",
}


@dataclass(frozen=True, slots=True)
class TransferVerdict:
    """What becomes of the draft's context KV."""

    outcome: Annotated[Outcome, "refused: the servers do not work together"]
    reasons: Annotated[tuple[str, ...], "ids of rules"]
    joined: Annotated[str, HIDDEN]

    @property
    @computed_key
    def text(self) -> str:
        because = f" ({', '.join(self.reasons)})" if self.reasons else ""
        return f"{self.joined}: {TEXTS[self.outcome]}{because}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TransferReport(Findings):
    """Every finding about two servers, worst first. `notes` say which arguments and checkpoints were not judged."""

    transfer: Transfer
    verdict: TransferVerdict

    @property
    def document(self) -> "TransferDocument":
        prefill, decode = (
            next(ServerEntry.of(item) for item in self.transfer.servers if item.role == role)
            for role in ("prefill", "decode")
        )
        return TransferDocument(
            passed=not self.fails(),
            engine=str(self.transfer.named),
            servers=ServerEntries(prefill, decode),
            num_rules=self.num_rules,
            num_errors=self.num_errors,
            num_warnings=self.num_warnings,
            findings=self.findings,
            verdict=self.verdict,
            notes=self.notes,
        )


@dataclass(frozen=True, slots=True)
class ServerEntries:
    """Both servers by role."""

    prefill: ServerEntry
    decode: ServerEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferDocument:
    """Result of `dflash validate-handoff`."""

    KIND: ClassVar[str] = "validate-handoff"

    passed: bool
    engine: str
    servers: ServerEntries
    num_rules: int
    num_errors: int
    num_warnings: int
    findings: tuple[Finding, ...]
    verdict: TransferVerdict
    notes: tuple[str, ...]


def validate_transfer(
    prefill: Path, decode: Path, engine: ServingEngine, *, ignored: Collection[str] = ()
) -> TransferReport:
    """Judge two servers by how they are started.

    Raises:
        CheckpointNotFound: a file is not there.
        UsageError: an engine without such servers, or a file that says no arguments of it.
    """
    if engine.name not in ENGINE_SERVERS:
        expected = " or ".join(ENGINE_SERVERS)
        raise UsageError(
            field="--engine", found=str(engine), expected=f"an engine with rules on two servers: {expected}"
        )
    known = ENGINE_SERVERS[engine.name]
    opened = _Opened(takes_drafts=known.takes_drafts)
    first, second = (
        opened.with_facts(known.read(role, read_launch(path, known.keys), engine.release))
        for role, path in (("prefill", prefill), ("decode", decode))
    )
    return _judge(Transfer(named=engine, known=known, prefill=first, decode=second), ignored, tuple(opened.notes))


def _judge(transfer: Transfer, ignored: Collection[str], notes: tuple[str, ...]) -> TransferReport:
    rules = [rule for rule in rules_of("kv-transfer") if transfer.named.name in rule.engines]
    found = [finding for rule in rules if rule.id not in ignored for finding in rule.findings(transfer)]
    found.sort(key=lambda item: (SEVERITIES.index(item.severity), item.id, item.location))
    return TransferReport(
        transfer=transfer,
        findings=tuple(found),
        num_rules=len(rules),
        verdict=_verdict(transfer, found),
        notes=(*notes, *_unread(transfer)),
    )


def _verdict(transfer: Transfer, findings: list[Finding]) -> TransferVerdict:
    """The worst that any finding leads to; a warning that may lower acceptance leaves it open."""
    errors = [item for item in findings if item.severity == "error"]
    doubts = [item for item in findings if item.severity == "warning" and item.outcome != "serves"]
    names = dict.fromkeys(item.name for pair in (transfer.carriers or ()) for item in pair[:1])
    joined = ", ".join([str(transfer.named), " to ".join(names)]) if names else str(transfer.named)
    causes: dict[Outcome, list[Finding]] = {
        "refused": [item for item in errors if item.outcome == "stops"],
        "lost": errors,
        "unknown": doubts,
    }
    for outcome, chosen in causes.items():
        if chosen:
            return TransferVerdict(outcome, tuple(dict.fromkeys(item.id for item in chosen)), joined)
    return TransferVerdict("arrives", (), joined)


def _unread(transfer: Transfer) -> Iterator[str]:
    for server in transfer.servers:
        ignored = server.launch.ignored
        if ignored:
            some = ", ".join(ignored[:4]) + (", ..." if len(ignored) > 4 else "")
            yield f"{server.launch.path}: arguments that are not looked at ({len(ignored)}): {some}"


class _Opened:
    """Drafts and targets that were opened, each once, and why others could not be."""

    def __init__(self, *, takes_drafts: bool) -> None:
        self.notes: list[str] = []
        self._takes_drafts = takes_drafts
        self._drafts: dict[str, Subject | None] = {}
        self._targets: dict[str, TargetFacts | None] = {}

    def with_facts(self, server: Server) -> Server:
        """The server with what is read from its checkpoints."""
        server = self._of_its_draft(server)
        draft = server.draft
        name = _reference(draft.name, draft.revision) if draft is not None else None
        target = _reference(server.target, server.target_revision)
        if name is not None and name not in self._drafts:
            self._drafts[name] = self._open_draft(name)
        if target is not None and target not in self._targets:
            self._targets[target] = self._open_target(target)
        return replace(
            server,
            subject=self._drafts[name] if name is not None else None,
            target_facts=self._targets[target] if target is not None else None,
        )

    def _of_its_draft(self, server: Server) -> Server:
        """A server that is given a draft for its target, as one of the target that the draft names."""
        if not self._takes_drafts or server.draft is not None or server.target is None:
            return server
        try:
            reference = _reference(server.target, server.target_revision) or ""
            subject = _open_subject(reference)
        except DFlashError:
            return server
        if subject.parsed is None or "verifier" not in subject.format.keys:
            return server
        config = subject.parsed.config
        draft = ServedDraft(
            name=server.target,
            revision=server.target_revision,
            method="dflash",
            num_draft_tokens=config.num_draft_tokens,
        )
        target = config.verifier.name_or_path if config.verifier is not None else None
        return replace(server, draft=draft, target=target, target_revision=None)

    def _open_draft(self, name: str) -> Subject | None:
        try:
            subject = _open_subject(name)
        except DFlashError as error:
            self._tell(f"the draft {name}", error)
            return None
        reason = subject.config_error or subject.parse_error
        if reason is None:
            return subject
        self._tell(f"the draft {name}", reason)
        return None

    def _open_target(self, name: str) -> TargetFacts | None:
        try:
            return open_target(open_checkpoint(find_checkpoint(name, Role.TARGET))).facts
        except DFlashError as error:
            self._tell(f"the target {name}", error)
            return None

    def _tell(self, what: str, error: DFlashError) -> None:
        self.notes.append(f"{what} could not be read here, and its layers were not judged: {error.message}")


def _open_subject(reference: str) -> Subject:
    return open_subject(ValidationPlan(draft=find_checkpoint(reference, Role.DRAFT), draft_reference=reference))


def _reference(name: str | None, revision: str | None) -> str | None:
    """What opens a checkpoint; a revision is that of a repository."""
    return f"{name}@{revision}" if name is not None and revision is not None and not Path(name).exists() else name
