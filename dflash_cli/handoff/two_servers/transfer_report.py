"""Whether the draft's context arrives at the decode server: the findings of all rules on two servers, and a verdict."""

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
from dflash_runtime.documents import HIDDEN, computed_key
from dflash_runtime.errors import DFlashError, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural
from dflash_runtime.target_config import TargetFacts

SHOWN_ARGUMENTS = 4
"""The most ignored arguments that a note names."""

Outcome = Literal["arrives", "lost", "refused", "unknown"]
TEXTS: Mapping[Outcome, str] = {
    "arrives": "the draft's context arrives",
    "lost": "the draft's context does not arrive, and acceptance falls",
    "refused": "the servers do not work together",
    "unknown": "the draft's context may not arrive",
}


@dataclass(frozen=True, slots=True)
class TransferVerdict:
    """Whether the draft's context KV arrives."""

    outcome: Annotated[Outcome, "refused: the servers do not work together"]
    reasons: Annotated[tuple[str, ...], "ids of rules"]
    joined: Annotated[str, HIDDEN]

    @property
    @computed_key
    def text(self) -> str:
        because = f" ({', '.join(self.reasons)})" if self.reasons else ""
        return f"{self.joined}: {TEXTS[self.outcome]}{because}"


@dataclass(frozen=True, slots=True)
class ServerEntries:
    """Both servers by role."""

    prefill: ServerEntry
    decode: ServerEntry


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TransferReport(Findings):
    """Result of `dflash validate-handoff`: all findings about two servers, worst first."""

    KIND: ClassVar[str] = "validate-handoff"

    transfer: Annotated[Transfer, HIDDEN]
    verdict: TransferVerdict
    notes: Annotated[tuple[Notice, ...], "what was not checked"] = ()
    strict: Annotated[bool, HIDDEN] = False

    @property
    @computed_key
    def passed(self) -> bool:
        """Whether the report lacks errors and, with --strict, warnings."""
        return not self.fails(strict=self.strict)

    @property
    @computed_key
    def engine(self) -> str:
        return str(self.transfer.named)

    @property
    @computed_key
    def servers(self) -> ServerEntries:
        return ServerEntries(*map(ServerEntry.of, self.transfer.servers))


def validate_transfer(
    prefill: Path, decode: Path, engine: ServingEngine, *, ignored: Collection[str] = (), strict: bool = False
) -> TransferReport:
    """Check two servers by the files of their arguments. With `strict`, a warning fails the pair too.

    Raises:
        CheckpointNotFound: a file does not exist.
        UsageError: no rule knows two servers of this engine, or a file does not contain arguments of a server.
    """
    if engine.name not in ENGINE_SERVERS:
        raise UsageError(field="--engine", found=str(engine), expected=" or ".join(ENGINE_SERVERS))
    known = ENGINE_SERVERS[engine.name]
    opened = _Opened(takes_drafts=known.takes_drafts)
    first, second = (
        opened.with_facts(known.read(role, read_launch(path, known.keys), engine.release))
        for role, path in (("prefill", prefill), ("decode", decode))
    )
    transfer = Transfer(named=engine, known=known, prefill=first, decode=second)
    rules = [rule for rule in rules_of("kv-transfer") if engine.name in rule.engines]
    found = [finding for rule in rules if rule.id not in ignored for finding in rule.findings(transfer)]
    found.sort(key=lambda item: (SEVERITIES.index(item.severity), item.id, item.location))
    return TransferReport(
        transfer=transfer,
        findings=tuple(found),
        num_rules=len(rules),
        checked=tuple(rule for rule in rules if rule.id not in ignored),
        verdict=_verdict(transfer, found),
        notes=(*opened.notes, *_ignored_arguments(transfer)),
        strict=strict,
    )


def _verdict(transfer: Transfer, findings: list[Finding]) -> TransferVerdict:
    """The worst outcome of any finding. A warning that may lower acceptance makes the outcome unknown."""
    errors = [item for item in findings if item.severity == "error"]
    names = dict.fromkeys(link.name for link in transfer.links or ())
    joined = ", ".join([str(transfer.named), *filter(None, [" to ".join(names)])])
    causes: dict[Outcome, list[Finding]] = {
        "refused": [item for item in errors if item.outcome == "stops"],
        "lost": errors,
        "unknown": [item for item in findings if item.severity == "warning" and item.outcome != "serves"],
    }
    for outcome, chosen in causes.items():
        if chosen:
            return TransferVerdict(outcome, tuple(dict.fromkeys(item.id for item in chosen)), joined)
    return TransferVerdict("arrives", (), joined)


def _ignored_arguments(transfer: Transfer) -> Iterator[Notice]:
    for server in transfer.servers:
        names = server.launch.ignored
        if names:
            some = ", ".join(names[:SHOWN_ARGUMENTS]) + (", ..." if len(names) > SHOWN_ARGUMENTS else "")
            text = f"{server.launch.path}: no rule reads {plural(len(names), 'argument')}: {some}"
            yield Notice(text, id="arguments-ignored")


class _Opened:
    """Opens each draft and target once. `notes` has the reasons why others could not be opened."""

    def __init__(self, *, takes_drafts: bool) -> None:
        self.notes: list[Notice] = []
        self._takes_drafts = takes_drafts
        self._drafts: dict[str | None, Subject | None] = {None: None}
        self._targets: dict[str | None, TargetFacts | None] = {None: None}

    def with_facts(self, server: Server) -> Server:
        """The server with the facts that its checkpoints state."""
        server = self._with_own_draft(server)
        draft = None if server.draft is None else _reference(server.draft.name, server.draft.revision)
        target = _reference(server.target, server.target_revision)
        if draft is not None and draft not in self._drafts:
            self._drafts[draft] = self._open_draft(draft)
        if target is not None and target not in self._targets:
            self._targets[target] = self._open_target(target)
        return replace(server, subject=self._drafts[draft], target_facts=self._targets[target])

    def _with_own_draft(self, server: Server) -> Server:
        """The server with its model as the draft, if its model is a draft that names a target."""
        reference = _reference(server.target, server.target_revision)
        if not self._takes_drafts or server.draft is not None or reference is None:
            return server
        try:
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
            if reason := subject.config_error or subject.parse_error:
                raise reason
            return subject
        except DFlashError as error:
            self._note("draft", name, error)
            return None

    def _open_target(self, name: str) -> TargetFacts | None:
        try:
            return open_target(open_checkpoint(find_checkpoint(name, Role.TARGET))).facts
        except DFlashError as error:
            self._note("target", name, error)
            return None

    def _note(self, role: str, name: str, error: DFlashError) -> None:
        text = f"cannot read the {role} {name}, so its layers were not checked: {error.message}"
        self.notes.append(Notice(text, id=f"{role}-not-read"))


def _open_subject(reference: str) -> Subject:
    return open_subject(ValidationPlan(draft=find_checkpoint(reference, Role.DRAFT), draft_reference=reference))


def _reference(name: str | None, revision: str | None) -> str | None:
    """`name@revision` of a repository, or the path of a local checkpoint."""
    return f"{name}@{revision}" if name is not None and revision is not None and not Path(name).exists() else name
