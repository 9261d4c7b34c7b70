"""`dflash explain`: explain a validation rule, offline."""

import re
import textwrap
from dataclasses import dataclass
from typing import Annotated

from dflash_cli.engines.engine_names import known_engines, parse_engines
from dflash_cli.rules.rule import GENERIC_WORDS, Rule, Severity, all_rules, fill
from dflash_cli.rules.rule_document import ExplainDocument, RuleEntry, RuleListDocument
from dflash_cli.terminal import console
from dflash_cli.terminal.options import refuse_beside
from dflash_cli.terminal.parameters import ESSENTIALS, Argument, Option
from dflash_cli.terminal.requests import Request, verb
from dflash_cli.terminal.shown import Shown, Table
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import guess

WIDTH = 78


@dataclass(frozen=True, kw_only=True)
class ExplanationRequest(Request):
    """Explain a rule that `dflash validate` checks, or list all rules by theme."""

    rule: Annotated[str | None, Argument(metavar="ID", help="Id of a rule, such as C20. Default: list all rules.")] = (
        None
    )
    engine: Annotated[
        tuple[str, ...],
        Option(
            short="-e", metavar="NAME,...", group=ESSENTIALS,
            help=f"List only the rules about these engines: {known_engines()}.",
        ),
    ] = ()  # fmt: skip
    severity: Annotated[Severity | None, Option(group=ESSENTIALS, help="List only the rules of one severity.")] = None

    def check(self) -> None:
        super().check()
        if self.rule is not None:
            refuse_beside(self, ("engine", "severity"), "ID: it filters the list of rules")


class Rules(Shown, list[Rule]):
    """Rules, by id."""

    def summary(self) -> list[str]:
        return (
            [f"{item.id} {item.severity}: {item.title}" for item in self] if len(self) == 1 else [f"{len(self)} rules"]
        )

    def shown_tables(self) -> dict[str, Table]:
        rows = [(item.id, item.severity, item.title) for item in self]
        return {"": (("rule", "severity", "title"), rows)} if len(self) > 1 else {}

    @property
    def document(self) -> RuleListDocument:
        """The document of `dflash explain --json`."""
        return RuleListDocument(tuple(map(RuleEntry.of, self)))


@verb(ExplanationRequest)
def explain(request: ExplanationRequest) -> Rules:
    """The rule with the given id, or all rules that match the filters.

    Raises:
        UsageError: an unknown rule or engine.
    """
    if request.rule is not None:
        return Rules([_find(request.rule)])
    names = {item.name for item in parse_engines(",".join(request.engine))}
    return Rules(
        item
        for item in all_rules()
        if (not names or names & set(item.engines)) and request.severity in (None, item.severity)
    )


def command(request: ExplanationRequest) -> None:
    """Print one rule in full, or the list."""
    rules = explain(request)
    if request.rule is None:
        _list(rules, as_json=console.is_json())
        return
    (found,) = rules
    if console.is_json():
        console.result_json(ExplainDocument(RuleEntry.of(found)))
        return
    console.result(f"{found.id}  {found.title}", "")
    for label, text in (
        ("severity", severity_text(found)),
        ("level", found.level),
        ("effect", found.effect),
        ("fix", fill(found.fix, GENERIC_WORDS)),
        ("source", found.source),
    ):
        width = WIDTH if label != "fix" else 10 + len(text)  # a command to copy is on one line
        console.result(
            *textwrap.wrap(console.as_typed(text), width, initial_indent=f"{label:10}", subsequent_indent=" " * 10)
        )
    if found.text:
        console.result("", *(line for part in found.text.split("\n\n") for line in textwrap.wrap(part, WIDTH)))


def severity_text(rule: Rule) -> str:
    """`error if vllm is named; otherwise warning` for a rule about engines."""
    if not rule.engines:
        return rule.severity
    otherwise = f"; otherwise {rule.unnamed}" if rule.unnamed is not None else ""
    return f"{rule.severity} if {' or '.join(rule.engines)} is named by --engine{otherwise}"


def _find(name: str) -> Rule:
    rules = {rule.id: rule for rule in all_rules()}
    if name.upper() in rules:
        return rules[name.upper()]
    padded = re.sub(r"(?<=[a-zA-Z])(?=\d$)", "0", name)
    raise UsageError(
        f"unknown rule {name!r}{guess(padded, rules)}",
        id="unknown-rule",
        field="ID",
        found=name,
        hint="dflash explain lists every rule",
    )


def _list(rules: Rules, *, as_json: bool) -> None:
    """The rules under their themes, in order of id."""
    if as_json:
        console.result_json(rules.document)
        return
    for theme in dict.fromkeys(rule.theme for rule in rules):
        console.result(theme)
        for rule in rules:
            if rule.theme == theme:
                console.severity_line(f"  {rule.id}  ", f"{rule.severity:7}", f"  {rule.title}")
