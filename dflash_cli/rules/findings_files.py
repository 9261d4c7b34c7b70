"""Files of findings for CI: JUnit XML, in which every checked rule is a test case, and SARIF 2.1.0.

Source: the schema of SARIF 2.1.0 (OASIS); the JUnit files that Jenkins, GitLab and GitHub actions read.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args
from urllib.parse import quote

from dflash_cli.documents.atomic_file import check_output, write_whole
from dflash_cli.documents.junit import Case, junit
from dflash_cli.rules.report import Findings
from dflash_cli.rules.rule import GENERIC_WORDS, Finding, Rule, Severity, fill
from dflash_cli.terminal import console
from dflash_cli.terminal.options import FindingsFileOptions
from dflash_cli.version import __version__
from dflash_runtime.errors import UsageError
from dflash_runtime.read_files import read_all

FindingsFormat = Literal["junit", "sarif"]
FindFile = Callable[[str], Path]
SUFFIXES: Mapping[str, FindingsFormat] = {".xml": "junit", ".sarif": "sarif"}
SARIF_LEVELS: Mapping[Severity, str] = {"error": "error", "warning": "warning", "info": "note"}


def choose_format(output: Path | None, asked: FindingsFormat | None) -> FindingsFormat | None:
    """The format `asked` for; without it, the format of the file's suffix, and None for text on stdout.

    Raises:
        UsageError: no format has this suffix.
    """
    if asked is not None or output is None:
        return asked
    if output.suffix.lower() not in SUFFIXES:
        raise UsageError(
            id="unknown-suffix", path=output, field="suffix", found=output.suffix,
            expected=f"one of {', '.join(SUFFIXES)}", hint=f"or pass --format {' or '.join(get_args(FindingsFormat))}",
        )  # fmt: skip
    return SUFFIXES[output.suffix.lower()]


@dataclass(frozen=True, slots=True)
class FindingsFile:
    """A file that a command may write beside its text, or print instead of it."""

    path: Path | None
    form: FindingsFormat | None
    command: str

    @classmethod
    def of(cls, request: FindingsFileOptions, command: str) -> Self:
        """The file that a request asks for, checked before anything is read.

        Raises:
            UsageError: the file exists, its suffix is unknown, or --json writes to stdout too.
        """
        form = choose_format(request.output, request.format)
        if form is not None and request.output is None and console.is_json():
            raise UsageError(
                f"--json and --format {form} both write to stdout", id="two-results-on-stdout", field="--format",
                hint="name a file with -o",
            )  # fmt: skip
        if request.output is not None:
            check_output(request.output, force=request.force)
        return cls(request.output, form, command)

    @property
    def leaves_text(self) -> bool:
        """Whether the command prints its text on stdout."""
        return not console.is_json() and (self.form is None or self.path is not None)

    def write(self, report: Findings, find: FindFile, *, strict: bool) -> None:
        """Write or print the findings. `find` gives the path of a file that a finding names."""
        if self.form is None:
            return
        text = findings_file(report, self.form, self.command, find, strict=strict)
        if self.path is None:
            console.result_text(text)
        else:
            write_whole(self.path, text.encode())


def findings_file(report: Findings, chosen: FindingsFormat, command: str, find: FindFile, *, strict: bool) -> str:
    """The text of the file. `find` gives the path of a file that a finding names."""
    if chosen == "junit":
        return junit(command, _cases(report, command, strict=strict))
    return json.dumps(_sarif(report, find), indent=2, ensure_ascii=False) + "\n"


def _cases(report: Findings, command: str, *, strict: bool) -> list[Case]:
    """A test case for each checked rule. Warnings fail it with `strict` only; findings that do not fail are output."""
    found: dict[str, list[Finding]] = {rule.id: [] for rule in report.checked}
    for item in report.findings:
        found.setdefault(item.id, []).append(item)
    titles = {rule.id: rule.title for rule in report.checked}
    cases = []
    for id, items in found.items():
        failing = [item for item in items if item.severity == "error" or (strict and item.severity == "warning")]
        others = [item for item in items if item not in failing]
        cases.append(
            Case(
                name=f"{id} {titles.get(id, '')}".strip(),
                group=command,
                failures=tuple(f"{item.location}: {item.message}" for item in failing),
                details=tuple(line for item in failing for line in _details(item)),
                output=tuple(line for item in others for line in (f"{item.severity}: {item.message}", *_details(item))),
            )
        )
    return cases


def _details(item: Finding) -> list[str]:
    named = {"place": item.location, "effect": item.effect, "fix": item.fix, "engines": ", ".join(item.engines)}
    return [f"{name}: {text}" for name, text in named.items() if text]


def _sarif(report: Findings, find: FindFile) -> dict[str, Any]:
    rules: dict[str, dict[str, Any]] = {rule.id: _sarif_rule(rule) for rule in report.checked}
    for item in report.findings:
        rules.setdefault(item.id, {"id": item.id})
    order = list(rules)
    driver = {"name": "dflash", "version": __version__, "semanticVersion": __version__, "rules": [*rules.values()]}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "results": [_sarif_result(item, order.index(item.id), find) for item in report.findings],
            }
        ],
    }


def _sarif_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.effect},
        "help": {"text": f"{fill(rule.fix, GENERIC_WORDS)}\ndflash explain {rule.id}"},
        "defaultConfiguration": {"level": SARIF_LEVELS[rule.severity]},
    }


def _sarif_result(item: Finding, index: int, find: FindFile) -> dict[str, Any]:
    text = "\n".join([item.message, *_details(item)])
    file, _, key = item.location.partition(":")
    path = find(file)
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(path)}, "region": {"startLine": _line(path, key)}}
    location: dict[str, Any] = {"physicalLocation": physical}
    if key:
        location["logicalLocations"] = [{"fullyQualifiedName": key}]
    level = SARIF_LEVELS[item.severity]
    return {
        "ruleId": item.id, "ruleIndex": index, "level": level, "message": {"text": text}, "locations": [location],
    }  # fmt: skip


def _uri(path: Path) -> str:
    """A relative path stays relative, because GitHub reads it from the root of the repository."""
    return path.as_uri() if path.is_absolute() else quote(path.as_posix(), errors="surrogateescape")


def _line(path: Path, key: str) -> int:
    """The line of a JSON file with the last part of a dotted key, or 1."""
    if path.suffix != ".json" or not key or not path.is_file():
        return 1
    wanted = re.compile(rf'^\s*"{re.escape(key.rpartition(".")[2])}"\s*:')
    lines: Sequence[str] = read_all(path).decode(errors="replace").splitlines()
    return next((number for number, line in enumerate(lines, 1) if wanted.match(line)), 1)
