"""Adding an engine or a rule is adding one file: each test uses such a file through the command line.

The command line runs in a process of its own, so nothing of the file is left afterwards.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_testing import checkpoints as support
from dflash_testing.added_files import rule_table_with, run_with
from dflash_testing.command_line import Outcome, invoke

ENGINE = '''
"""Toy: its releases, its serve command, its rule and its dialect."""

import shlex

from dflash_cli.engines.serving_engine import ENGINES, ServeCommand, ServingEngine, causality_by_kind, release_text
from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import Native
from dflash_cli.rules.rule import BFLOAT16, Problem, check

NAME = "toy"
RELEASES = ((1, 0), (1, 1))


@ENGINES.register(NAME)
class ToyEngine(ServingEngine):
    name = NAME
    releases = RELEASES
    reads = (Native,)
    dialect = "toy-native"
    strictness = 3
    follows_reference = True

    def causality(self, subject):
        return causality_by_kind(subject)

    def serve_command(self, pair):
        words = ["toy", "serve", pair.target, "--draft", pair.draft, "--k", str(pair.num_draft_tokens)]
        if BFLOAT16 in pair.flags:
            words.append("--bfloat16")
        return ServeCommand((shlex.join(words),), pair.num_draft_tokens)


@check(
    "TOY01",
    "warning",
    effect=f"Toy {release_text(RELEASES[-1])} drafts slowly",
    fix="dflash convert {draft} {out} --to toy-native --target {target}",
    source="toy serve.py",
    engines=(NAME,),
    serve_flag=BFLOAT16,
)
def blocks_are_small(subject):
    """block_size is at most 2."""
    block = subject.stated.block_size
    if block is not None and block > 2:
        yield Problem(subject.at("block_size"), f"{block}")


@FORMATS.register("toy-native")
class ToyNative(Native):
    """The native dialect with a key more."""

    name = "toy-native"
    title = "DFlash, native dialect for Toy"
    priority = 300

    def evidence(self, config, tensor_names):
        return None

    def write_config(self, config, carried):
        return {**super().write_config(config, carried), "toy": True}
'''

BUILDS = "RELEASES = ((4071,), (4300,))"
WITH_BUILDS = (
    "    def causality(self, subject):",
    """    @classmethod
    def read_release(cls, text):
        return (int(text[1:]),) if text[:1] == "b" and text[1:].isdigit() else None

    @classmethod
    def write_release(cls, release):
        return "".join(f"b{number}" for number in release)

    def causality(self, subject):""",
)
"""A part of `ENGINE`, and its replacement for an engine whose releases are builds such as b4071."""

RULE = '''
"""A rule on names."""

from dflash_cli.formats.fields import REMOVED
from dflash_cli.rules.rule import BFLOAT16, FIX_COPY, Problem, check


@check("TOY02", "warning", effect="none", fix=FIX_COPY, source="this test's own rule", serve_flag=BFLOAT16)
def nobody_is_named(subject):
    """No key is called toy."""
    if "toy" in subject.config:
        yield Problem(subject.location("toy"), "present", repair={"toy": REMOVED})
'''


class TestEngine:
    """An engine is a file in engines/."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "engines"
        folder.mkdir()
        (folder / "toy.py").write_text(ENGINE)
        return folder

    def toy(self, folder: Path, *args: object) -> Outcome:
        return run_with("dflash_cli.engines", folder, *args)

    def report(self, folder: Path, *args: object, code: int = 0) -> Any:
        outcome = self.toy(folder, "validate", *args, "--json")
        assert outcome.code == code, outcome.err
        return json.loads(outcome.out)

    def test_validate_judges_for_it(self, folder: Path) -> None:
        report = self.report(folder, "tiny", "--engine", "toy")
        (verdict,), (finding,) = report["verdicts"], report["findings"]
        assert (verdict["engine"], verdict["outcome"], verdict["causal"]) == ("toy 1.1", "serves", [False] * 3)
        assert (finding["id"], finding["location"]) == ("TOY01", "config.json:block_size")
        assert (finding["severity"], finding["engines"]) == ("warning", ["toy"])
        assert finding["fix"] == "dflash convert tiny tiny-fixed --to toy-native --target tiny"
        assert "TOY01" not in self.toy(folder, "validate", "tiny").out

    def test_rules_about_what_it_has_in_common_with_others_hold_for_it(self, folder: Path, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft")
        report = self.report(folder, draft, "--engine", "toy@1.0", code=3)
        (verdict,) = report["verdicts"]
        assert (verdict["engine"], verdict["outcome"], verdict["reasons"]) == ("toy 1.0", "stops", ["S14"])
        assert verdict["causal"] is None
        assert [item["engines"] for item in report["findings"] if item["id"] == "S14"] == [["toy"]]

    def test_its_command_is_printed_with_what_rules_call_for(self, folder: Path) -> None:
        outcome = self.toy(folder, "serve-command", "tiny", "--engine", "toy")
        assert outcome.code == 0, outcome.err
        assert outcome.out.startswith("toy serve ")
        assert outcome.out.endswith("--k 7 --bfloat16\n")

    def test_help_and_messages_list_it(self, folder: Path) -> None:
        for command in ("validate", "serve-command", "explain"):
            assert "toy@1.0..1.1" in " ".join(self.toy(folder, command, "--help").out.split())
        outcome = self.toy(folder, "validate", "tiny", "--engine", "toy@0.5")
        assert outcome.code == 2
        assert "toy@0.5" in outcome.err

    def test_its_releases_may_be_written_in_their_own_way(self, folder: Path) -> None:
        (folder / "toy.py").write_text(ENGINE.replace(*WITH_BUILDS, 1).replace("RELEASES = ((1, 0), (1, 1))", BUILDS))
        report = self.report(folder, "tiny", "--engine", "toy@b4071")
        assert report["verdicts"][0]["engine"] == "toy b4071"
        assert "toy@b4071..b4300" in " ".join(self.toy(folder, "validate", "--help").out.split())
        assert self.toy(folder, "validate", "tiny", "--engine", "toy@4071").code == 2

    def test_its_rules_are_explained(self, folder: Path) -> None:
        outcome = self.toy(folder, "explain", "toy01")
        assert outcome.out.startswith("TOY01  block_size is at most 2.\n")
        assert "dflash convert DRAFT OUT --to toy-native --target TARGET" in outcome.out
        listed = json.loads(self.toy(folder, "explain", "--engine", "toy", "--json").out)["rules"]
        assert {rule["id"] for rule in listed} == {"TOY01", "S14", "S17", "S32", "S33", "S34", "S35", "S42"}

    def test_the_table_of_rules_lists_it(self, folder: Path) -> None:
        table = rule_table_with("dflash_cli.engines", folder)
        assert "toy@1.0..1.1" in table
        assert "| TOY01 | warning | headers | toy | block_size is at most 2 | `engines/toy.py` |" in table

    def test_a_corrected_copy_is_written_in_its_dialect(self, folder: Path, tmp_path: Path) -> None:
        draft, out = support.make_native(tmp_path / "draft", tie_word_embeddings=True), tmp_path / "out"
        report = self.report(folder, draft, "--engine", "toy,vllm", "--fix-out", out)
        assert report["repaired"]["dialect"] == "toy-native"
        assert json.loads((out / "config.json").read_text())["toy"] is True

    def test_a_draft_is_converted_to_its_dialect(self, folder: Path, tmp_path: Path) -> None:
        outcome = self.toy(folder, "convert", "tiny", tmp_path / "out", "--to", "toy-native")
        assert outcome.code == 0, outcome.err
        assert json.loads((tmp_path / "out" / "config.json").read_text())["toy"] is True
        assert "toy-native" in self.toy(folder, "convert", "--help").out

    def test_without_the_file_it_is_unknown(self, tmp_path: Path) -> None:
        outcome = self.toy(tmp_path, "validate", "tiny", "--engine", "toy")
        assert outcome.code == 2
        assert "'toy'" in outcome.err


class TestRule:
    """A rule is a decorated function in a file of rules/themes/."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "rules"
        folder.mkdir()
        (folder / "names.py").write_text(RULE)
        return folder

    def rule(self, folder: Path, *args: object) -> Outcome:
        return run_with("dflash_cli.rules.themes", folder, *args)

    def test_it_runs(self, folder: Path, tmp_path: Path) -> None:
        draft = support.make_native(tmp_path / "it's a draft", toy=1)
        outcome = self.rule(folder, "validate", draft, "--json")
        (found,) = [item for item in json.loads(outcome.out)["findings"] if item["id"] == "TOY02"]
        assert (found["severity"], found["location"]) == ("warning", "config.json:toy")
        assert "TOY02" not in invoke("validate", draft).out

    def test_its_copy_is_corrected(self, folder: Path, tmp_path: Path) -> None:
        draft, out = support.make_native(tmp_path / "draft", toy=1), tmp_path / "out"
        repaired = json.loads(self.rule(folder, "validate", draft, "--fix-out", out, "--json").out)["repaired"]
        assert "TOY02" in repaired["fixed"]
        assert "toy" not in json.loads((out / "config.json").read_text())

    def test_it_is_explained_and_in_the_table_of_rules(self, folder: Path) -> None:
        assert self.rule(folder, "explain", "TOY02").out.startswith("TOY02  No key is called toy.\n")
        assert "\nnames\n  TOY02  warning  No key is called toy.\n" in self.rule(folder, "explain").out
        table = rule_table_with("dflash_cli.rules.themes", folder)
        assert "| TOY02 | warning | headers |  | No key is called toy | `rules/themes/names.py` |" in table

    def test_serve_command_meets_its_need(self, folder: Path) -> None:
        served = self.rule(folder, "serve-command", "tiny", "--engine", "vllm")
        assert "--dtype bfloat16" not in served.out
        (folder / "names.py").write_text(RULE.replace('"toy" in subject.config', "True"))
        assert "--dtype bfloat16" in self.rule(folder, "serve-command", "tiny", "--engine", "vllm").out
