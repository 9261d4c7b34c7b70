"""`dflash explain`: what a validation rule is about, offline."""

import difflib
import textwrap
from typing import Annotated, Any

import typer

from dflash_cli import console
from dflash_cli.options import JsonOption
from dflash_cli.validation.rule import Rule, all_rules
from dflash_runtime.errors import UsageError

WIDTH = 78
RuleArg = Annotated[str | None, typer.Argument(metavar="[ID]", help="A rule, such as C20. Without it, all are listed.")]


def explain(rule: RuleArg = None, as_json: JsonOption = False) -> None:
    """Explain a rule of `dflash validate`, or list them all."""
    if rule is None:
        _list(as_json=as_json)
        return
    found = _find(rule)
    if as_json:
        console.result_json(document(found))
        return
    console.result(f"{found.id}  {found.title}\n")
    for label, text in (
        ("severity", severity_text(found)),
        ("level", found.level),
        ("effect", found.effect),
        ("fix", found.fix),
        ("source", found.source),
    ):
        console.result(textwrap.fill(text, WIDTH, initial_indent=f"{label:10}", subsequent_indent=" " * 10))
    if found.text:
        console.result("\n" + "\n".join(textwrap.fill(part, WIDTH) for part in found.text.split("\n\n")))


def document(rule: Rule) -> dict[str, Any]:
    """A rule as JSON."""
    return {
        "id": rule.id,
        "title": rule.title,
        "severity": rule.severity,
        "engines": list(rule.engines),
        "level": rule.level,
        "effect": rule.effect,
        "fix": rule.fix,
        "source": rule.source,
        "text": rule.text,
    }


def severity_text(rule: Rule) -> str:
    """`error, where vllm is named` for a rule about engines."""
    return f"{rule.severity}, where {' or '.join(rule.engines)} is named" if rule.engines else rule.severity


def _find(name: str) -> Rule:
    rules = {rule.id: rule for rule in all_rules()}
    if name.upper() in rules:
        return rules[name.upper()]
    close = difflib.get_close_matches(name.upper(), rules, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(f"no rule {name!r}{guess}", hint="dflash explain lists every rule")


def _list(*, as_json: bool) -> None:
    if as_json:
        console.result_json({"rules": [document(rule) for rule in all_rules()]})
        return
    for rule in all_rules():
        console.result(f"{rule.id}  {rule.severity:7}  {rule.title}")
