"""The run level on DFlash 2 and DSpark drafts: planted faults, unknown layouts, sound drafts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import plant_kinds
import pytest
from planted_faults.kind_table import word_of
from planted_faults.walking_kinds import every_kind

from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.diagnosis import readings
from dflash_cli.diagnosis.run_settings import SearchBudget
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edited_config
from dflash_testing.families import FAMILIES, write_draft
from dflash_testing.searches import shorten_search

KINDS = {kind.name: kind for kind in every_kind()}
SMALL = ("--num-prompts", 8, "-n", 32, "--device", "cpu")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "name", "strength", "factor"),
    [
        pytest.param("dspark", "fill-in stated", "mild", "layout", marks=slow),
        pytest.param("dflash2", "sides of convolutions exchanged", "strong", "convolution", marks=slow),
        pytest.param("dflash2", "codebooks exchanged", "strong", "selector", marks=slow),
        pytest.param("dflash2", "rows of the second codebook shifted", "mild", "selector", marks=slow),
        pytest.param("dspark", "Markov factors exchanged", "strong", "markov", marks=slow),
        pytest.param("dspark", "logits capped", "strong", "scale", marks=slow),
        pytest.param("dspark", "few candidates of the bias", "strong", "candidates", marks=slow),
        pytest.param("dspark", "another kind of Markov head", "mild", "markov"),
        pytest.param("dspark", "another kind of Markov head", "strong", "markov"),
    ],
)
def test_the_right_cause_is_named_for_drafts_that_walk(
    family: str, name: str, strength: str, factor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for constant in ("VERY_FEW_ANCHORS", "FEW_ANCHORS", "MANY_ANCHORS", "MIN_TEST_PROMPTS", "NUM_RARE_IDS"):
        monkeypatch.setattr(readings, constant, getattr(readings, constant))
    monkeypatch.setattr(readings, "MAX_ON_TOP", readings.MAX_ON_TOP)
    plant_kinds.shorten()
    monkeypatch.setattr(plant_kinds, "BUDGET", replace(plant_kinds.BUDGET, factors=frozenset({factor})))
    plant_kinds.plant(KINDS[name], family, strength, tmp_path / "draft")
    row = plant_kinds.diagnose(tmp_path / "draft", family)[1]
    assert word_of({"plain": row}, "plain", KINDS[name].right) == "right", row


def run(command: str, draft: Path | str, *words: object) -> tuple[int, dict[str, Any]]:
    done = invoke(command, draft, "--target", TINY, *SMALL, *words, "--json")
    return done.code, json.loads(done.out)


@pytest.mark.parametrize("dialect", ["native", "speculators"])
def test_an_unknown_layout_is_found(dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A native file is taken for anchor-first, a speculators file for fill-in. The draft is anchor-first."""
    shorten_search(monkeypatch, "layout")
    draft = tmp_path / "draft"
    if dialect == "native":
        shutil.copytree(fetch_directory("tiny:dspark", Role.DRAFT), draft)
    else:
        assert invoke("convert", "tiny:dspark", draft, "--to", "speculators", "--target", TINY).code == 0
    with edited_config(draft) as config:
        for key in ("sample_from_anchor", "dspark_bonus_anchor"):
            config.pop(key, None)
    code, found = run("diagnose", draft)
    (finding,) = [item for item in found["report"]["findings"] if item["id"] == "R12"]
    assert "--layout anchor-first" in finding["fix"]
    assert (finding["severity"], code) == (("info", 0) if dialect == "native" else ("error", 3))
    assert found["has_cause"] is (dialect == "speculators")


@pytest.mark.parametrize("name", FAMILIES)
def test_random_drafts_are_diagnosed_in_every_dialect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random draft accepts almost nothing, and no reading explains it. One dialect of a family runs all commands."""
    shorten_search(monkeypatch, "layout", "selector", "markov", "causality")
    draft, target = write_draft(tmp_path / "draft", FAMILIES[name]()), support.make_target(tmp_path / "target")
    words = ("-t", target, "--num-prompts", 4, "-n", 8, "--device", "cpu", "--json")
    others = [] if "-" in name else [("diagnose", ("--expected", "3")), ("validate", ("--level", "run"))]
    for command, more in (("diagnose", ()), *others):
        done = invoke(command, draft, *words, *more)
        found = json.loads(done.out)
        report = found.get("report", found)
        assert report["search"]["acceptance_len"] < 1.5
        assert [item["id"] for item in report["findings"] if item["id"].startswith("R")] == ["R06"]
        assert done.code == 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", ["dflash2", "dspark"])
def test_sound_drafts_get_no_cause(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ("layout", "convolution", "selector", "markov", "candidates", "scale", "embedding", "causality", "block")
    shorten_search(monkeypatch, *own)
    defaults = SearchBudget.__init__.__kwdefaults__ or {}
    monkeypatch.setattr(SearchBudget.__init__, "__kwdefaults__", {**defaults, "seed": seed})
    code, found = run("diagnose", f"tiny:{family}")
    assert (code, found["has_cause"]) == (0, False)
    assert {item["severity"] for item in found["report"]["findings"]} <= {"info"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dflash2", "dspark"])
def test_a_figure_is_reached_by_sound_drafts_and_missed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_search(monkeypatch, "layout", "convolution", "selector", "markov", "causality")
    code, found = run("diagnose", f"tiny:{family}", "--expected", 2.0)
    assert (code, found["has_cause"], found["rule"]) == (0, False, None)
    code, found = run("diagnose", f"tiny:{family}", "--expected", 6.0)
    assert (code, found["rule"]) == (3, "R06")


@pytest.mark.parametrize("family", ["dflash2", "dspark"])
def test_sound_drafts_have_no_finding_about_tensors(family: str) -> None:
    done = invoke("validate", f"tiny:{family}", "--target", TINY, "--level", "weights", "--json")
    assert json.loads(done.out)["findings"] == []
