"""Adding is one file: each test writes one into a folder of its own and uses it through the command line.

The command line runs in a process of its own, in which the folder is one more place of a package, so that nothing of it
is left afterwards.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT

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
    dialect = "toy-native"
    strictness = 3
    follows_reference = True

    def served_causality(self, subject):
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
    if subject.block_size is not None and subject.block_size > 2:
        yield Problem(subject.location("block_size"), f"{subject.block_size}")


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

RULE = '''
"""A rule on names."""

from dflash_cli.rules.rule import FIX_COPY, Problem, check


@check("TOY02", "warning", effect="none", fix=FIX_COPY, source="this test's own rule")
def nobody_is_named(subject):
    """No key is called toy."""
    if "toy" in subject.config:
        yield Problem(subject.location("toy"), "present")
'''


def run(package: str, folder: Path, *args: object) -> support.Outcome:
    """Run the command line with a folder more in one of its packages."""
    code = (
        "import importlib, sys\n"
        f"importlib.import_module({package!r}).__path__.append({str(folder)!r})\n"
        f"sys.argv = {['dflash', *map(str, args)]!r}\n"
        "from dflash_cli.main import main\n"
        "main()\n"
    )
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "runtime", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
        check=False,
    )
    return support.Outcome(done.returncode, done.stdout, done.stderr)


class TestEngine:
    """An engine is a file in engines/."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = tmp_path / "engines"
        folder.mkdir()
        (folder / "toy.py").write_text(ENGINE)
        return folder

    def toy(self, folder: Path, *args: object) -> support.Outcome:
        return run("dflash_cli.engines", folder, *args)

    def test_validate_judges_for_it(self, folder: Path) -> None:
        outcome = self.toy(folder, "validate", "tiny", "--engine", "toy")
        assert outcome.code == 0, outcome.err
        assert "toy 1.1: loads, runs all 3 layers non-causally\n" in outcome.out
        assert "TOY01 warning config.json:block_size: 8 [toy]\n    effect: Toy 1.1 drafts slowly\n" in outcome.out
        assert "    fix: dflash convert tiny tiny-fixed --to toy-native --target tiny\n" in outcome.out
        assert "TOY01" not in self.toy(folder, "validate", "tiny").out

    def test_rules_about_what_it_has_in_common_with_others_hold_for_it(self, folder: Path, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft")
        outcome = self.toy(folder, "validate", draft, "--engine", "toy@1.0")
        assert outcome.code == 3
        assert "toy 1.0: cannot serve the draft (S14)\n" in outcome.out
        assert "expected the native one [toy]\n" in outcome.out

    def test_its_command_is_printed_with_what_rules_call_for(self, folder: Path) -> None:
        outcome = self.toy(folder, "serve-command", "tiny", "--engine", "toy")
        assert outcome.code == 0, outcome.err
        assert outcome.out.startswith("toy serve ")
        assert outcome.out.endswith("--k 7 --bfloat16\n")

    def test_help_and_messages_list_it(self, folder: Path) -> None:
        for command in ("validate", "serve-command", "explain"):
            assert "toy@1.0..1.1" in " ".join(self.toy(folder, command, "--help").out.split())
        outcome = self.toy(folder, "validate", "tiny", "--engine", "toy@2")
        assert outcome.code == 2
        assert "unknown release toy 2" in outcome.err

    def test_its_rules_are_explained(self, folder: Path) -> None:
        outcome = self.toy(folder, "explain", "toy01")
        assert outcome.out.startswith("TOY01  block_size is at most 2.\n")
        assert "dflash convert DRAFT OUT --to toy-native --target TARGET" in outcome.out
        listed = json.loads(self.toy(folder, "explain", "--engine", "toy", "--json").out)["rules"]
        assert {rule["id"] for rule in listed} == {"TOY01", "S14", "S17"}

    def test_a_corrected_copy_is_written_in_its_dialect(self, folder: Path, tmp_path: Path) -> None:
        draft, out = support.make_native(tmp_path / "draft"), tmp_path / "out"
        outcome = self.toy(folder, "validate", draft, "--engine", "toy,vllm", "--fix-out", out)
        assert outcome.code == 0, outcome.err
        assert "written as toy-native" in outcome.out
        assert json.loads((out / "config.json").read_text())["toy"] is True

    def test_a_draft_is_converted_to_its_dialect(self, folder: Path, tmp_path: Path) -> None:
        outcome = self.toy(folder, "convert", "tiny", tmp_path / "out", "--to", "toy-native")
        assert outcome.code == 0, outcome.err
        assert json.loads((tmp_path / "out" / "config.json").read_text())["toy"] is True
        assert "toy-native" in self.toy(folder, "convert", "--help").out

    def test_without_the_file_it_is_unknown(self, tmp_path: Path) -> None:
        outcome = self.toy(tmp_path, "validate", "tiny", "--engine", "toy")
        assert outcome.code == 2
        assert "unknown engine 'toy'" in outcome.err


class TestRule:
    """A rule is a decorated function in a file of validation/rules/."""

    def test_it_runs_and_is_explained(self, tmp_path: Path) -> None:
        folder = tmp_path / "rules"
        folder.mkdir()
        (folder / "names.py").write_text(RULE)
        draft = support.make_native(tmp_path / "it's a draft", toy=1)
        outcome = run("dflash_cli.rules.themes", folder, "validate", draft)
        assert outcome.code == 0, outcome.err
        assert "TOY02 warning config.json:toy: present\n" in outcome.out
        assert run("dflash_cli.rules.themes", folder, "explain", "TOY02").out.startswith("TOY02  No key is called")
        listed = run("dflash_cli.rules.themes", folder, "explain").out
        assert "\nnames\n  TOY02  warning  No key is called toy.\n" in listed
        assert "TOY02" not in support.invoke("validate", draft).out
