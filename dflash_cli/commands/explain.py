"""`dflash explain`: what a validation rule checks and why; works offline."""

import difflib
import textwrap
from typing import Annotated

import typer

from dflash_cli.engines.serving_engine import known_engines, parse_engines
from dflash_cli.rules.rule import GENERIC_WORDS, Rule, Severity, all_rules, fill
from dflash_cli.terminal import console
from dflash_cli.terminal.options import JsonOption
from dflash_runtime.errors import UsageError

WIDTH = 78
RuleArg = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="Id of a rule, such as C20. Default: list all rules.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine", "-e", metavar="NAME,...", help=f"List only the rules about these engines: {known_engines()}."
    ),
]
SeverityOption = Annotated[
    Severity | None, typer.Option("--severity", help="List only the rules of one severity.", show_default=False)
]


def explain(
    rule: RuleArg = None, engine: EngineOption = None, severity: SeverityOption = None, as_json: JsonOption = False
) -> None:
    """Explain a rule that `dflash validate` checks, or list all rules by theme."""
    if rule is None:
        names = {item.name for item in parse_engines(engine)}
        chosen = [
            item
            for item in all_rules()
            if (not names or names & set(item.engines)) and severity in (None, item.severity)
        ]
        _list(chosen, as_json=as_json)
        return
    if engine is not None or severity is not None:
        raise UsageError("--engine and --severity filter the list of rules; leave them out to explain one rule")
    found = _find(rule)
    if as_json:
        console.result_json(found.to_json())
        return
    console.result(f"{found.id}  {found.title}\n")
    for label, text in (
        ("severity", severity_text(found)),
        ("level", found.level),
        ("effect", found.effect),
        ("fix", fill(found.fix, GENERIC_WORDS)),
        ("source", found.source),
    ):
        console.result(textwrap.fill(text, WIDTH, initial_indent=f"{label:10}", subsequent_indent=" " * 10))
    if found.text:
        console.result("\n" + "\n".join(textwrap.fill(part, WIDTH) for part in found.text.split("\n\n")))


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
    close = difflib.get_close_matches(name.upper(), rules, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(f"no rule {name!r}{guess}", hint="dflash explain lists every rule")


def _list(rules: list[Rule], *, as_json: bool) -> None:
    """The rules under their themes, in order of id."""
    if as_json:
        console.result_json({"rules": [rule.to_json() for rule in rules]})
        return
    for theme in dict.fromkeys(rule.theme for rule in rules):
        console.result(theme)
        for rule in rules:
            if rule.theme == theme:
                console.result(f"  {rule.id}  {rule.severity:7}  {rule.title}")
