"""`dflash explain`: every rule, offline, and the table in the documents that is made from the same rules."""

import json
import runpy

import pytest

from dflash_cli.rules.rule import GENERIC_WORDS, Rule, all_rules, fill
from dflash_cli.terminal import documentation
from dflash_testing.command_line import invoke
from dflash_testing.paths import ROOT


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.id)
def test_each_rule_is_explained(rule: object) -> None:
    assert isinstance(rule, Rule)
    outcome = invoke("explain", rule.id)
    assert outcome.code == 0
    assert outcome.out.startswith(f"{rule.id}  {rule.title}\n")
    for label in ("severity", "level", "effect", "fix", "source"):
        assert f"\n{label} " in outcome.out
    (fix,) = [line for line in outcome.out.splitlines() if line.startswith("fix ")]
    assert fix.split(maxsplit=1)[1] == fill(rule.fix, GENERIC_WORDS)  # on one line, because it has a command to copy
    assert max(len(line) for line in outcome.out.splitlines()[1:] if line != fix) <= 80


def test_the_long_text_is_printed() -> None:
    rule = next(rule for rule in all_rules() if rule.id == "C20")
    assert len(rule.text) > 100
    assert " ".join(rule.text.split()) in " ".join(invoke("explain", "c20").out.split())


def test_without_an_id_all_are_listed_under_their_themes() -> None:
    lines = invoke("explain").out.splitlines()
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(listed) == [rule.id for rule in all_rules()]
    assert {line for line in lines if not line.startswith("  ")} == {rule.theme for rule in all_rules()}
    assert lines.index("vllm") < next(at for at, line in enumerate(lines) if line.startswith("  S01"))


def test_the_list_can_be_narrowed() -> None:
    listed = invoke("explain", "--engine", "vllm", "--severity", "error", "--json")
    rules = json.loads(listed.out)["rules"]
    assert {"C20", "S07"} <= {rule["id"] for rule in rules}
    assert all("vllm" in rule["engines"] and rule["severity"] == "error" for rule in rules)
    assert invoke("explain", "C20", "--engine", "vllm").code == 2
    assert invoke("explain", "--engine", "vlm").code == 2


def test_commands_are_shown_with_generic_words() -> None:
    for rule in all_rules():
        assert not {"{draft}", "{target}", "{out}"} & set(invoke("explain", rule.id).out.split())
    assert {"validate", "DRAFT", "--fix-out", "OUT"} <= set(invoke("explain", "C20").out.split())


def test_json() -> None:
    one = json.loads(invoke("explain", "C20", "--json").out)
    assert one["engines"] == ["vllm"]
    assert one["schema_version"] == 1
    everything = json.loads(invoke("explain", "--json").out)
    assert len(everything["rules"]) == len(all_rules())


def test_a_wrong_id_gets_a_guess() -> None:
    outcome = invoke("explain", "C200")
    assert (outcome.code, outcome.error_id) == (2, "unknown-rule")
    assert " C20?" in outcome.err
    assert " S09?" in invoke("explain", "s9").err


def test_the_table_in_the_documents_is_true() -> None:
    """The page of checks equals the output of `python scripts/rule_table.py`."""
    render = runpy.run_path(str(ROOT / "scripts" / "rule_table.py"))["render"]
    assert documentation.text("checks") == render()
