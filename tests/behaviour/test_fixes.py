"""Every rule's fix is tried on the faulty draft: its command runs, and then the finding is gone.

A fix that begins with a command is that command; words after ` # ` are for the reader. Every other fix is an
instruction to a person, who knows what no tool can know.
"""

import json
import shlex
from pathlib import Path

import pytest

from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_config
from dflash_testing.rule_cases.base import Case, build, nothing
from dflash_testing.rule_cases.collected import CASES

LOOKS = ("--level run", "ORG/REPO", "dflash eval-acceptance")
"""Parts of commands that measure, or that the user must complete. Such commands repair no file."""


def write_target(case: Case, directory: Path) -> Path:
    """Write the case's target, or a target that fits the draft."""
    config, arrays = support.target_config(case.shape), support.target_arrays(case.shape)
    (case.target or nothing)(config)
    case.target_tensors(arrays)
    target = support.write_checkpoint(directory / "target", config, arrays)
    for name, content in case.target_files.items():
        (target / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return target


def settings(case: Case) -> list[str]:
    engines = ["--engine", case.engines] if case.engines else []
    asked = ["-k", str(case.k)] if case.k is not None else []
    return [*engines, *asked, "--level", case.level, "--json"]


def find(draft: Path, case: Case, target: Path | None) -> list[dict[str, str]]:
    """The findings of the case's rule."""
    against = ["--target", str(target)] if target is not None else []
    outcome = invoke("validate", draft, *against, *settings(case))
    if outcome.code == 4:  # there is no report on a directory without a config
        assert (case.rule, case.location) == ("S19", "config.json")
        assert "config.json: not found" in outcome.err
        return []
    report = json.loads(outcome.out)
    return [item for item in report["findings"] if case.is_named(item["id"], item["message"])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_fix_that_is_a_command_fixes(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draft, target = build(case, tmp_path / case.name), write_target(case, tmp_path)
    given = target if case.target is not None and case.target_name is None else None
    for number, found in enumerate(find(draft, case, given)):
        command, _, _ = found["fix"].partition(" # ")
        if not command.startswith("dflash ") or any(mark in command for mark in LOOKS):
            assert found["fix"]
            continue
        _, *words = [str(target) if word == "TARGET" else word for word in shlex.split(command)]
        out = tmp_path / f"{case.name}-{number}-fixed"
        words = [str(out) if word == f"{case.name}-fixed" else word for word in words]
        is_mending = str(out) in words
        outcome = invoke(*words)
        if words[0] in ("inspect", "serve-command"):
            assert outcome.code == 0 or (words[0], outcome.code, case.rule) == ("inspect", 5, "C01"), outcome.err
            continue
        assert is_mending or words[0] == "validate", command
        assert outcome.code in (0, 3), (command, outcome.err)
        if is_mending:
            assert out.is_dir(), (command, outcome.err)
            assert not find(out, case, given), command


@pytest.mark.parametrize("rule", ["P08", "P16"])
def test_a_copy_that_names_another_target_mends_no_training(rule: str, tmp_path: Path) -> None:
    """--fix-out states the target that is given, and so silences the rule; it is not counted as fixed."""
    case = next(item for item in CASES if item.rule == rule)
    draft, target = build(case, tmp_path / case.name), write_target(case, tmp_path)
    edit_config(draft, sliding_window_non_causal=False)
    command = ("validate", draft, "--target", target, "-e", "vllm", "--fix-out", tmp_path / "out", "--json")
    document = json.loads(invoke(*command).out)
    assert {rule, "C20"} <= {item["id"] for item in document["findings"]}
    assert document["repaired"]["fixed"] == ["C20"]
