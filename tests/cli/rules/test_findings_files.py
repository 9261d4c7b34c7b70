"""Findings as JUnit XML and as SARIF 2.1.0, verdicts of gates as JUnit XML, and the workflow of docs/how-to/ci.md."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.documents.junit import Case, gate_written, junit
from dflash_cli.rules.rule import all_rules
from dflash_runtime.errors import GateFailed, UsageError
from dflash_testing.command_line import Outcome, invoke, run_main
from dflash_testing.edits import edited_config
from dflash_testing.paths import ROOT


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A draft with two errors, beside the working directory's other files."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my draft"
    shutil.copytree(fetch_directory(TINY, Role.DRAFT), folder)
    with edited_config(folder) as config:
        config["dflash_config"]["mask_token_id"] = 99999
        config["architectures"] = ["Foo"]
    return Path("my draft")


def check(*arguments: object) -> Outcome:
    return run_main("validate", *arguments, "--target", "tiny", "--engine", "vllm")


def require_junit(text: str) -> ElementTree.Element:
    """The suite of a JUnit file whose counts are the counts of its elements."""
    root = ElementTree.fromstring(text)
    (suite,) = root
    assert (root.tag, suite.tag) == ("testsuites", "testsuite")
    counts = {"tests": "testcase", "failures": "testcase/failure", "errors": "testcase/error"}
    for element in (root, suite):
        assert {name: int(element.attrib[name]) for name in counts} == {
            name: len(suite.findall(path)) for name, path in counts.items()
        }
    for case in suite:
        assert case.tag == "testcase"
        assert case.attrib["classname"]
        assert case.attrib["name"]
        assert {child.tag for child in case} <= {"failure", "error", "system-out"}
        assert len(case.findall("failure")) <= 1, "most readers show one failure"
    return suite


def require_sarif(text: str) -> list[dict[str, Any]]:
    """The results of a SARIF file, whose required properties are there and refer to its rules."""
    document = json.loads(text)
    assert set(document) == {"$schema", "version", "runs"}
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "dflash"
    assert len({rule["id"] for rule in rules}) == len(rules)
    for rule in rules:
        texts = (rule["shortDescription"], rule["fullDescription"], rule["help"])
        assert all(isinstance(item["text"], str) and item["text"] for item in texts)
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    for item in run["results"]:
        assert rules[item["ruleIndex"]]["id"] == item["ruleId"]
        assert item["level"] in ("error", "warning", "note")
        assert item["message"]["text"]
        (location,) = item["locations"]
        physical = location["physicalLocation"]
        assert re.fullmatch(r"[\w.~!$&'()*+,;=:@%/-]+", physical["artifactLocation"]["uri"]), "RFC 3986"
        assert physical["region"]["startLine"] >= 1
    results: list[dict[str, Any]] = run["results"]
    return results


def test_junit_has_a_case_for_each_checked_rule(broken: Path) -> None:
    done = check(broken, "-o", "checks.xml")
    suite = require_junit(Path("checks.xml").read_text())
    document = json.loads(check(broken, "--json").out)
    assert done.code == 3
    assert "C12" in done.out, "the text is printed too"
    assert len(suite) == document["num_rules"]
    ids = [case.attrib["name"].partition(" ")[0] for case in suite]
    assert len(set(ids)) == len(ids)
    assert {*ids} <= {rule.id for rule in all_rules()}
    failed = {case.attrib["name"].partition(" ")[0] for case in suite if case.find("failure") is not None}
    assert failed == {item["id"] for item in document["findings"] if item["severity"] == "error"} >= {"C12", "C36"}
    said = {case.attrib["name"].partition(" ")[0] for case in suite if case.find("system-out") is not None}
    assert said == {item["id"] for item in document["findings"] if item["severity"] != "error"}


def test_sarif_names_file_line_and_key(broken: Path) -> None:
    assert check(broken, "-o", "checks.sarif").code == 3
    results = {item["ruleId"]: item for item in require_sarif(Path("checks.sarif").read_text())}
    document = json.loads(check(broken, "--json").out)
    levels = {"error": "error", "warning": "warning", "info": "note"}
    assert {id: item["level"] for id, item in results.items()} == {
        item["id"]: levels[item["severity"]] for item in document["findings"]
    }
    (location,) = results["C36"]["locations"]
    lines = (broken / "config.json").read_text().splitlines()
    assert location["physicalLocation"]["artifactLocation"]["uri"] == "my%20draft/config.json"
    assert '"architectures"' in lines[location["physicalLocation"]["region"]["startLine"] - 1]
    assert location["logicalLocations"] == [{"fullyQualifiedName": "architectures"}]


@pytest.mark.parametrize("form", ["junit", "sarif"])
def test_a_form_without_a_file_is_printed_instead_of_text(form: str, broken: Path) -> None:
    done = check(broken, "--format", form)
    assert done.code == 3
    {"junit": require_junit, "sarif": require_sarif}[form](done.out)
    assert check("tiny", "--format", form, "-o", "other.txt").code == 0
    {"junit": require_junit, "sarif": require_sarif}[form](Path("other.txt").read_text())


def test_warnings_fail_a_case_only_if_they_fail_the_command(broken: Path) -> None:
    with edited_config(broken) as config:
        config["dflash_config"]["mask_token_id"], config["architectures"] = 3, ["DFlashDraftModel"]
        config["torch_dtype"] = config["dtype"] = "float16"
        config["max_position_embeddings"] = 64
    document = json.loads(check(broken, "--json").out)
    assert (document["num_errors"], document["num_warnings"] > 0) == (0, True)
    for option, code in ((), 0), (("--strict",), 3):
        done = check(broken, "--format", "junit", *option)
        suite = require_junit(done.out)
        assert (done.code, int(suite.attrib["failures"]) > 0) == (code, code == 3)


@pytest.mark.parametrize(
    ("arguments", "id"),
    [
        (["--format", "junit", "--json"], "two-results-on-stdout"),
        (["-o", "x.html"], "unknown-suffix"),
        (["-o", "there.xml"], "output-exists"),
        (["-o", "absent/x.xml"], "no-parent-directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_first(arguments: list[str], id: str, broken: Path) -> None:
    Path("there.xml").write_text("")
    done = run_main("validate", "absent", *arguments)
    assert (done.code, done.error_id, done.out) == (2, id, "")


def test_two_servers_are_checked_into_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("prefill", "decode"):
        Path(f"{name}.json").write_text(json.dumps({"command": "vllm serve org/model"}))
    done = run_main("validate-handoff", "prefill.json", "decode.json", "-e", "vllm", "-o", "servers.sarif")
    results = require_sarif(Path("servers.sarif").read_text())
    assert done.code == 3
    files = {item["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for item in results}
    assert files <= {"prefill.json", "decode.json"}
    assert files


def test_any_text_becomes_well_formed_xml() -> None:
    text = "a\x00\x1b[31m<&>\"' \ud800 \uffff ü 漢\n]]>"
    case = Case(name=text, group=text, failures=(text, text), details=(text,), output=(text,), error=text)
    suite = require_junit(junit(text, [case]))
    assert "\\x00" in suite.attrib["name"]
    assert "漢" in (suite.findtext("testcase/system-out") or "")


@pytest.mark.parametrize(
    ("error", "tags"), [(None, []), (GateFailed("low"), ["failure"]), (UsageError("x"), ["error"])]
)
def test_the_verdict_of_a_gate_is_written(error: Exception | None, tags: list[str], tmp_path: Path) -> None:
    path = tmp_path / "gate.xml"
    path.write_text("from an earlier run")

    def judge() -> None:
        with gate_written(path, "dflash compare", "gate"):
            if error is not None:
                raise error

    if error is None:
        judge()
    else:
        with pytest.raises(type(error)):
            judge()
    (case,) = require_junit(path.read_text())
    assert [child.tag for child in case] == tags


@pytest.mark.parametrize("minimum", [1, 7])
def test_a_measured_gate_is_written(minimum: float, tmp_path: Path) -> None:
    path = tmp_path / "gate.xml"
    done = invoke("eval-acceptance", "--num-prompts", 4, "-n", 8, "--min-acceptance", minimum, "--gate-out", path)
    (case,) = require_junit(path.read_text())
    assert (done.code, [child.tag for child in case]) == ((0, []) if minimum == 1 else (3, ["failure"]))


@pytest.mark.parametrize("arguments", [["eval-acceptance"], ["bench"], ["compare", "a", "b"], ["probe", "http://x"]])
def test_a_verdict_without_a_gate_is_refused(arguments: list[str]) -> None:
    done = run_main(*arguments, "--gate-out", "x.xml")
    assert (done.code, done.error_id, done.field) == (2, "option-needs-another", "--gate-out")


def test_the_workflow_of_the_docs_runs(tmp_path: Path) -> None:
    """Every shell step runs as a step of the workflow would, on the bundled pair; pip is left out."""
    page = (ROOT / "docs" / "how-to" / "ci.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.S)[0])
    (job,) = workflow["jobs"].values()
    steps = [step["run"] for step in job["steps"] if "run" in step and not step["run"].startswith("pip ")]
    assert len(steps) == 2
    shutil.copytree(fetch_directory(TINY, Role.DRAFT), tmp_path / job["env"]["DRAFT"])
    program = tmp_path / "bin" / "dflash"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dflash_cli "$@"\n')
    program.chmod(0o755)
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "runtime", "kernels"))
    environment = {
        **os.environ, **job["env"], "TARGET": "tiny", "PYTHONPATH": paths,
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    for step in steps:
        done = subprocess.run(
            ["bash", "-e", "-c", step], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (step, done.stderr)
    require_sarif((tmp_path / "dflash.sarif").read_text())
    require_junit((tmp_path / "gate.xml").read_text())
    assert json.loads((tmp_path / "result.json").read_text())["kind"] == "eval-acceptance"
    uploaded = [step["with"] for step in job["steps"] if "upload" in step.get("uses", "")]
    names = {name for step in uploaded for name in (step.get("sarif_file") or step["path"]).split()}
    assert names == {"dflash.sarif", "gate.xml", "result.json"}
