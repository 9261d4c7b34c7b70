"""Check a draft, alone or against a target: every finding at once, from JSON and headers alone by default."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflash_cli.checks.base import CONFIG_FILE, Finding, Severity, Subject, all_rules, is_int
from dflash_cli.checks.engines import Engine
from dflash_cli.formats.base import Reading, detect_from
from dflash_cli.loading import open_target
from dflash_runtime.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, TensorInfo
from dflash_runtime.config import DraftConfig, RopeConfig
from dflash_runtime.errors import CheckpointError, InvalidConfig, TensorMismatch, UnsupportedError, located

Level = Literal["headers", "weights"]
ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "info": 2}
IDENTITY = "C01"
UNREADABLE = "C00"
"""The finding of a config that cannot be read, where no rule says why."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, worst first. `num_rules` counts the rules that ran."""

    path: Path
    dialect: str | None
    target: str | None
    engines: tuple[str, ...]
    level: Level
    findings: tuple[Finding, ...]
    num_rules: int

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
            "engines": list(self.engines),
            "level": self.level,
            "num_rules": self.num_rules,
            "num_errors": self.count("error"),
            "num_warnings": self.count("warning"),
            "findings": [asdict(finding) for finding in self.findings],
        }


@dataclass(frozen=True, slots=True)
class _Opened:
    """A draft as far as it could be opened. `problem` is why its config cannot be read."""

    subject: Subject | None
    findings: list[Finding]
    dialect: str | None = None
    problem: CheckpointError | UnsupportedError | None = None


def validate_draft(
    path: Path,
    *,
    target: Path | None = None,
    target_reference: str | None = None,
    engines: Sequence[Engine] = (),
    level: Level = "headers",
    ignored: Collection[str] = (),
) -> Report:
    """Run every rule of the level.

    Raises:
        CheckpointNotFound: the draft or the target is not there.
        CheckpointError, UnsupportedError: the target, not the draft, cannot be read.
    """
    source = open_target(target) if target is not None else None
    opened = _open(path)
    findings, num_rules = opened.findings, 0
    if opened.subject is not None:
        subject = replace(
            opened.subject,
            target=source.config if source is not None else None,
            target_path=target,
            target_reference=target_reference,
            engines=engines,
        )
        ran, num_rules = _run_rules(subject, level)
        findings = findings + _settle(ran, opened)
    kept = [finding for finding in findings if finding.id not in ignored]
    kept.sort(key=lambda finding: (ORDER[finding.severity], finding.id, finding.place))
    named = tuple(str(engine) for engine in engines)
    return Report(path, opened.dialect, target_reference, named, level, tuple(kept), num_rules)


def known_ids() -> set[str]:
    """Every id a finding can have."""
    return {rule.id for rule in all_rules()} | {UNREADABLE, "N12", "N16", "S18", "S19"}


def _open(path: Path) -> _Opened:
    try:
        checkpoint = Checkpoint(path)
    except CheckpointError as error:
        rule = "S18" if (path / CONFIG_FILE).exists() else "S19"
        return _Opened(None, [_finding(rule, CONFIG_FILE, error, path)])
    findings: list[Finding] = []
    tensors: dict[str, TensorInfo] | None = None
    try:
        tensors = checkpoint.tensors
    except CheckpointError as error:
        findings.append(_weights_finding(error, path))
    subject = Subject(path=path, config=checkpoint.config, tensors=tensors)
    dialect: str | None = None
    try:
        detection = detect_from(checkpoint.config, frozenset(tensors or ()), checkpoint.config_path)
        dialect = detection.format.name
        with located(checkpoint.config_path):
            reading = detection.format.read_config(checkpoint.config, checkpoint.config_path)
    except (CheckpointError, UnsupportedError) as error:
        return _Opened(replace(subject, dims=_guess_dims(subject)), findings, dialect, error)
    return _Opened(_with_reading(subject, reading), findings, dialect)


def _with_reading(subject: Subject, reading: Reading) -> Subject:
    return replace(subject, reading=reading, dims=reading.config)


def _run_rules(subject: Subject, level: Level) -> tuple[list[Finding], int]:
    """Findings and how many rules ran. A checkpoint of another kind is held to the rule of identity only."""
    rules = all_rules()
    identity = next(rule for rule in rules if rule.id == IDENTITY)
    findings = identity.findings(subject)
    if findings:
        return findings, 1
    has_weights = level == "weights" and subject.tensors is not None
    chosen = [rule for rule in rules if rule.id != IDENTITY and (has_weights or not rule.needs_weights)]
    return [finding for rule in chosen for finding in rule.findings(subject)], len(chosen) + 1


def _settle(findings: list[Finding], opened: _Opened) -> list[Finding]:
    """Add why the config cannot be read, unless a rule has said so already."""
    is_explained = any(item.severity == "error" and item.place.startswith(CONFIG_FILE) for item in findings)
    if opened.problem is None or is_explained or opened.subject is None:
        return findings
    return [*findings, _finding(UNREADABLE, CONFIG_FILE, opened.problem, opened.subject.path)]


def _finding(rule: str, place: str, error: CheckpointError | UnsupportedError, path: Path) -> Finding:
    """An error as a finding; the path in front of its message is the place already."""
    message = error.message
    for prefix in (f"{path / CONFIG_FILE}: ", f"{path}: "):
        message = message.removeprefix(prefix)
    return Finding(rule, "error", place, message, fix=error.hint or "")


def _weights_finding(error: CheckpointError, path: Path) -> Finding:
    file = error.path if isinstance(error.path, Path) else path
    message = error.message.removeprefix(f"{file}: ")
    if file.name == INDEX_FILE or isinstance(error, TensorMismatch):
        return Finding("N12", "error", INDEX_FILE, message, fix=error.hint or "")
    if file == path:
        return Finding("S19", "error", SINGLE_FILE, message, fix=error.hint or "")
    return Finding("N16", "error", file.name, message, fix=error.hint or "")


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
    fields = {field: body[key] for key, field in sizes.items()}
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
