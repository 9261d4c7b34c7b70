"""A fault or a fact about a running server, with its evidence and the next thing to do."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

SEVERITIES = ("error", "warning", "info")
Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFinding:
    """A fault or a fact.

    severity  error: the server is wrong; warning: it probably does not do what its user wants; info: a fact
    seen      figures of this probe
    follows   a conclusion from them, or that the cause is not known
    next      a command or a change that tests the conclusion
    """

    id: Annotated[str, "docs/how-to/probe.md lists the ids"]
    severity: Severity
    seen: str
    follows: str
    next: str


def sort_findings(findings: Iterable[ServedFinding]) -> tuple[ServedFinding, ...]:
    """Errors first, then warnings, then facts. Of several findings with one id the first is kept."""
    first = {item.id: item for item in reversed(list(findings))}
    return tuple(sorted(reversed(first.values()), key=lambda item: SEVERITIES.index(item.severity)))
