"""Check a draft, alone or against a target: every finding at once, from JSON and headers alone by default."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import list_files, open_checkpoint
from dflash_cli.engines.serving_engine import Engine
from dflash_cli.formats.dialect import Reading, detect_from
from dflash_cli.validation.rule import CONFIG_FILE, LEVELS, Finding, Level, Rule, Severity, Subject, all_rules, is_int
from dflash_cli.validation.verdict import Verdict, judge
from dflash_runtime.checkpoint.files import Checkpoint, TensorInfo
from dflash_runtime.config import DraftConfig, EngineConfig, RopeConfig
from dflash_runtime.errors import CheckpointError, InvalidConfig, UnsupportedError, UsageError, naming_file

if TYPE_CHECKING:
    from dflash_cli.checkpoints.references import Location
    from dflash_cli.validation.readings import Effort, Observe, Search

ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
FILES = ("S18", "S19")
"""Rules on what must be there before anything else can be said."""
IDENTITY = "C01"
UNREADABLE = "C00"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """How the run level runs. Without prompts it makes its own."""

    config: EngineConfig
    effort: "Effort"
    observe: "Observe"
    prompts: Callable[[], Sequence[Sequence[int]] | None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to check: a draft, and everything it is to be held against."""

    draft: "Location"
    reference: str | None = None
    target: "Location | None" = None
    target_reference: str | None = None
    engines: Sequence[Engine] = ()
    level: Level = "headers"
    ignored: Collection[str] = ()
    num_speculative_tokens: int | None = None
    run: RunPlan | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was found, worst first. `num_rules` counts the rules that ran; `notes` say what could not be done."""

    path: Path
    dialect: str | None
    target: str | None
    engines: tuple[Engine, ...]
    level: Level
    findings: tuple[Finding, ...]
    num_rules: int
    verdicts: tuple[Verdict, ...] = ()
    search: "Search | None" = None
    notes: tuple[str, ...] = field(default=())

    def count(self, severity: Severity) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def fails(self, *, strict: bool = False) -> bool:
        """Whether the draft does not pass; with `strict`, warnings count too."""
        return bool(self.count("error") or (strict and self.count("warning")))

    def document(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "draft": str(self.path),
            "dialect": self.dialect,
            "target": self.target,
            "engines": [str(engine) for engine in self.engines],
            "level": self.level,
            "num_rules": self.num_rules,
            "num_errors": self.count("error"),
            "num_warnings": self.count("warning"),
            "findings": [finding.document() for finding in self.findings],
            "verdicts": [verdict.document() for verdict in self.verdicts],
            "search": self.search.document() if self.search is not None else None,
            "notes": list(self.notes),
        }


def validate_draft(question: Question) -> Report:
    """Run every rule of the level.

    Raises:
        CheckpointNotFound: the draft or the target is not there.
        CheckpointError, UnsupportedError: the target, not the draft, cannot be read.
        UsageError: the run level without a target.
    """
    if question.level == "run" and (question.target is None or question.run is None):
        raise UsageError("--level run needs a target", hint="add --target REF")
    source = open_target(open_checkpoint(question.target)) if question.target is not None else None
    subject = replace(
        _open(question.draft),
        target_source=source,
        target_reference=question.target_reference,
        reference=question.reference,
        engines=tuple(question.engines),
        num_speculative_tokens=question.num_speculative_tokens,
    )
    findings, num_rules = _run_rules(subject, "weights" if question.level == "run" else question.level)
    notes: list[str] = []
    if question.level == "run":
        subject, notes = _search(subject, question, findings)
        ran = _chosen("run", subject)
        findings += _run(ran, subject)
        num_rules += len(ran)
    findings = [item for item in _settle(findings) if item.id not in question.ignored]
    findings.sort(key=lambda item: (ORDER[item.severity], item.id, item.place))
    return Report(
        path=subject.path,
        dialect=_dialect(subject),
        target=question.target_reference,
        engines=tuple(question.engines),
        level=question.level,
        findings=tuple(findings),
        num_rules=num_rules,
        verdicts=judge(subject, findings),
        search=subject.search,
        notes=tuple(notes),
    )


def known_ids() -> set[str]:
    """Every id a finding can have."""
    return {rule.id for rule in all_rules()}


def _open(location: "Location") -> Subject:
    """A draft as far as it can be opened, with the errors that stopped it."""
    path = location if isinstance(location, Path) else location.path
    files = list_files(location)
    try:
        checkpoint = open_checkpoint(location)
    except CheckpointError as error:
        return Subject(path=path, config={}, files=files, config_error=error)
    tensors: dict[str, TensorInfo] | None = None
    weights_error: CheckpointError | None = None
    try:
        tensors = checkpoint.tensors
    except CheckpointError as error:
        weights_error = error
    subject = Subject(
        path=path,
        config=checkpoint.config,
        checkpoint=checkpoint,
        files=files,
        tensors=tensors,
        weights_error=weights_error,
    )
    try:
        return _with_reading(subject, _read(checkpoint, tensors))
    except (CheckpointError, UnsupportedError) as error:
        return replace(subject, dims=_guess_dims(subject), reading_error=error)


def _read(checkpoint: Checkpoint, tensors: dict[str, TensorInfo] | None) -> Reading:
    detection = detect_from(checkpoint.config, frozenset(tensors or ()), checkpoint.config_path)
    with naming_file(checkpoint.config_path):
        return detection.format.read_config(checkpoint.config, checkpoint.config_path)


def _with_reading(subject: Subject, reading: Reading) -> Subject:
    return replace(subject, reading=reading, dims=reading.config)


def _dialect(subject: Subject) -> str | None:
    if subject.config_error is not None:
        return None
    try:
        return detect_from(subject.config, frozenset(subject.tensors or ()), subject.path / CONFIG_FILE).format.name
    except UnsupportedError:
        return None


def _run_rules(subject: Subject, level: Level) -> tuple[list[Finding], int]:
    """Findings and how many rules ran, up to a level.

    Without a config nothing more can be said, and a checkpoint of another kind is held to no other rule.
    """
    gates = [rule for rule in all_rules() if rule.id in FILES]
    findings = _run(gates, subject)
    if subject.config_error is not None:
        return findings, len(gates)
    identity = [rule for rule in all_rules() if rule.id == IDENTITY]
    found = _run(identity, subject)
    if found:
        return found, len(gates) + 1
    levels = LEVELS[: LEVELS.index(level) + 1]
    chosen = [rule for each in levels for rule in _chosen(each, subject)]
    return findings + _run(chosen, subject), len(gates) + 1 + len(chosen)


def _chosen(level: Level, subject: Subject) -> list[Rule]:
    """The rules of one level that can say something about the draft."""
    if (level == "weights" and subject.tensors is None) or (level == "run" and subject.search is None):
        return []
    return [rule for rule in all_rules() if rule.level == level and rule.id not in (*FILES, IDENTITY)]


def _run(rules: Sequence[Rule], subject: Subject) -> list[Finding]:
    return [finding for rule in rules for finding in rule.findings(subject)]


def _settle(findings: list[Finding]) -> list[Finding]:
    """Leave out why the config cannot be read where a rule has said so already."""
    is_explained = any(
        item.severity == "error" and item.place.startswith(CONFIG_FILE) and item.id != UNREADABLE for item in findings
    )
    return [item for item in findings if item.id != UNREADABLE or not is_explained]


def _search(subject: Subject, question: Question, findings: list[Finding]) -> tuple[Subject, list[str]]:
    """Run the interpretation search, unless what was found already keeps the pair from running."""
    from dflash_cli.validation.readings import run_search

    assert question.run is not None
    assert subject.target_source is not None
    reasons = sorted({item.id for item in findings if item.severity == "error" and not item.engines})
    if subject.checkpoint is None or subject.reading is None or any(_keeps_from_running(item) for item in findings):
        return subject, [f"not run: the pair cannot run as it is ({', '.join(reasons)})"]
    plan = question.run
    found = run_search(
        open_draft(subject.checkpoint),
        subject.target_source,
        plan.prompts(),
        config=plan.config,
        effort=plan.effort,
        observe=plan.observe,
    )
    return replace(subject, search=found), []


def _keeps_from_running(finding: Finding) -> bool:
    """Whether this tool's own engine could not run the pair either; engines' rules concern only them."""
    is_about_tensors = finding.id in ("N01", "N02", "N06", "N07", "N13", "M01", "M06", "P02", "C11")
    return finding.severity == "error" and not finding.engines and (is_about_tensors or finding.outcome == "stops")


def _guess_dims(subject: Subject) -> DraftConfig | None:
    """The draft's sizes where the config states them, with stand-ins for everything shapes do not depend on."""
    body = subject.body
    sizes = {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
    }
    if not all(is_int(body.get(key)) and 0 < body[key] < 2**31 for key in sizes) or body["num_hidden_layers"] > 10_000:
        return None
    fields = {name: body[key] for key, name in sizes.items()}
    reduced = subject.config.get("draft_vocab_size")
    try:
        return DraftConfig(
            **fields,
            draft_vocab_size=reduced if is_int(reduced) else fields["vocab_size"],
            rms_norm_eps=1e-6,
            max_position_embeddings=1,
            rope=RopeConfig(theta=1.0),
            block_size=2,
            target_layer_ids=tuple(range(len(subject.taps or (0,)))),
            mask_token_id=0,
            causal=(False,) * fields["num_layers"],
            windows=(None,) * fields["num_layers"],
            attention_bias=body.get("attention_bias") is True,
        )
    except InvalidConfig:
        return None
