"""`dflash compare`: pairs, refusals, verdicts, gates, and a real run of both kinds of files."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime.documents import to_json
from dflash_testing.command_line import run_main
from dflash_testing.evaluations import drawn_evaluation

CATEGORIES = ("code", "mathematics", "a category with a long name")


EMPTY: dict[str, Any] = {
    "acceptance_len": None, "num_drafts": 0, "num_accepted_tokens": 0, "per_pos_accepted": [0] * 7,
    "per_pos_verified": [0] * 7, "histogram": [0] * 8, "conversations": [],
}  # fmt: skip


def document(name: str, *, gain: float = 0.0, count: int = 36, **settings: Any) -> dict[str, Any]:
    """A document of eval-acceptance: the same prompts in each, and a draft that is better by `gain`."""
    generator, whole = random.Random(name), to_json(drawn_evaluation(count=12))
    rows: list[dict[str, Any]] = []
    for index in range(count):
        steps = 20 + 5 * (index % 7)
        length = 2.5 + (index % 3) + gain + 0.1 * generator.gauss(0, 1)
        rows.append(
            whole["conversations"][0]
            | {
                "digest": f"digest {index}",
                "name": f"row-{index}",
                "category": CATEGORIES[index % 3],
                "num_tokens": round(steps * length),
                "num_steps": steps,
            }
        )
    return complete(whole, name, rows, settings)


def complete(whole: dict[str, Any], name: str, rows: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """The document of these rows, with the totals that they add up to: steps of two neighbouring lengths."""
    tokens, steps = (sum(row[field] for row in rows) for field in ("num_tokens", "num_steps"))
    rows = [row | {"histogram": two_lengths(row["num_tokens"], row["num_steps"])} for row in rows]
    histogram = [sum(column) for column in zip(*(row["histogram"] for row in rows), strict=True)]
    found: dict[str, Any] = whole | {
        "schema_version": 1,
        "kind": "eval-acceptance",
        "acceptance_len": tokens / steps,
        "num_drafts": steps,
        "num_accepted_tokens": tokens - steps,
        "per_pos_accepted": [sum(histogram[place:]) for place in range(1, 8)],
        "per_pos_verified": [steps] * 7,
        "histogram": histogram,
        "categories": {},
        "per_pos_intervals": [None] * 7,
        "per_pos_conditional_intervals": [None] * 7,
        "conversations": rows,
        "num_distinct_prompts": len({row["digest"] for row in rows}),
        "settings": {
            "draft": name,
            "target": "org/target",
            "temperature": 0.0,
            "num_speculative_tokens": 7,
            **settings,
        },
        "measured": whole["measured"] | {"draft": whole["measured"]["draft"] | {"name": name}, "date": name},
    }
    return found


def two_lengths(tokens: int, steps: int) -> list[int]:
    """The histogram of steps of two neighbouring lengths."""
    low, more = divmod(tokens, steps)
    found = [0] * 9
    found[low - 1 : low + 1] = [steps - more, more]
    return found[:8]


def write(folder: Path, name: str, content: dict[str, Any]) -> str:
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "old.json", document("old"))
    write(tmp_path, "new.json", document("new", gain=0.4))
    write(tmp_path, "again.json", document("again"))
    write(tmp_path, "few.json", document("few", count=30))
    return tmp_path


def test_a_better_result_is_found_in_total_and_by_category(files: Path) -> None:
    """192 prompts, 64 in each category."""
    write(files, "old.json", document("old", count=192))
    write(files, "new.json", document("new", gain=0.4, count=192))
    outcome = run_main("compare", "old.json", "new.json", "--json")
    (found,) = json.loads(outcome.out)["comparisons"]
    assert found["is_paired"]
    assert found["verdict"] == "higher"
    assert found["interval"]["low"] < 0.4 < found["interval"]["high"]
    assert found["difference"] == pytest.approx(0.4, abs=0.05)
    assert {line["verdict"] for line in found["categories"].values()} == {"higher"}
    assert {line["num_conversations"] for line in found["categories"].values()} == {64}
    assert outcome.err == ""


def test_p_values_are_corrected_for_categories_and_for_results(files: Path) -> None:
    """Of two other results, the larger p-value is unchanged, the smaller is doubled. Six categories are one family."""
    one = json.loads(run_main("compare", "old.json", "again.json", "--json").out)["comparisons"][0]
    both = json.loads(run_main("compare", "old.json", "again.json", "new.json", "--json").out)["comparisons"]
    assert one["p_value"] == both[0]["p_value"] > both[1]["p_value"]
    alone = json.loads(run_main("compare", "old.json", "new.json", "--json").out)["comparisons"][0]
    assert both[1]["p_value"] == pytest.approx(2 * alone["p_value"])
    for name, line in both[0]["categories"].items():
        assert line["p_value"] >= one["categories"][name]["p_value"]


def test_every_line_of_the_table_fits_80_columns(files: Path) -> None:
    outcome = run_main("compare", "old.json", "new.json", "few.json", "--unpaired", "--tolerance", "0.3")
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert "a category wi…" in outcome.out
    assert "(Holm)" in outcome.out


def test_different_prompts_are_refused_by_name(files: Path) -> None:
    outcome = run_main("compare", "old.json", "few.json")
    assert outcome.code == 2
    assert outcome.error_id == "different-prompts"
    assert [name in outcome.err for name in ("old.json (row-30, row-31, row-32, ...)", "row-33")] == [True, False]
    assert "--unpaired" in outcome.err
    unpaired = run_main("compare", "old.json", "few.json", "--unpaired", "--json")
    (found,) = json.loads(unpaired.out)["comparisons"]
    assert not found["is_paired"]
    assert found["verdict"] == "undecided"
    assert found["num_conversations"] == 30


def test_few_prompts_are_tested_but_have_no_interval(files: Path) -> None:
    """On 36 prompts a gain of 0.4 is significant. A lacking kind of prompt may outweigh it, but not a gain of 3."""
    for name, gain, verdict in (("new", 0.4, "undecided"), ("best", 3.0, "higher")):
        write(files, f"{name}.json", document(name, gain=gain))
        outcome = run_main("compare", "old.json", f"{name}.json", "--json")
        (found,) = json.loads(outcome.out)["comparisons"]
        assert (found["verdict"], found["interval"]) == (verdict, None)
        assert found["p_value"] < 0.001
        assert re.findall(r"\d+", found["reason"]) == ["36", "64"]
    assert "[" not in run_main("compare", "old.json", "new.json").out.split("category")[0]


def test_undecided_categories_with_small_p_are_explained(files: Path) -> None:
    """Categories have few prompts. One line says why they are undecided if all prompts together are decided."""
    write(files, "old.json", document("old", count=96))
    heights = []
    for name, gain in (("new", 0.4), ("same", 0.0)):
        write(files, f"{name}.json", document(name, gain=gain, count=96))
        found = json.loads(run_main("compare", "old.json", f"{name}.json", "--json").out)["comparisons"][0]
        unsure = [line for line in found["categories"].values() if line["verdict"] == "undecided"]
        assert (found["verdict"] == "higher", any(line["p_value"] < 0.05 for line in unsure)) == (gain > 0, gain > 0)
        heights.append(len(run_main("compare", "old.json", f"{name}.json").out.split("category  ")[0].splitlines()))
    assert heights[0] == heights[1] + 1


def test_a_category_that_one_result_names_otherwise_is_the_first_ones(files: Path) -> None:
    renamed = document("renamed")
    for row in renamed["conversations"]:
        row["category"] = "a|b\n<script>" if row["category"] == "code" else row["category"]
    write(files, "renamed.json", renamed)
    outcome = run_main("compare", "old.json", "renamed.json", "--json")
    assert outcome.code == 0, outcome.err
    assert set(json.loads(outcome.out)["comparisons"][0]["categories"]) == set(CATEGORIES)


def test_without_pairs_a_small_gain_is_not_found(files: Path) -> None:
    write(files, "old.json", document("old", count=192))
    write(files, "new.json", document("new", gain=0.1, count=192))
    (found,) = json.loads(run_main("compare", "old.json", "new.json", "--unpaired", "--json").out)["comparisons"]
    assert found["verdict"] == "undecided"
    assert found["interval"]["low"] < 0 < found["interval"]["high"]


def test_a_prompt_that_comes_twice_is_one_unit(files: Path) -> None:
    twice = document("twice")
    for row in twice["conversations"]:
        row["digest"] = f"digest {int(row['digest'].split()[1]) % 18}"
    write(files, "twice.json", twice | {"num_distinct_prompts": 18})
    (found,) = json.loads(run_main("compare", "twice.json", "twice.json", "--json").out)["comparisons"]
    assert (found["verdict"], found["num_conversations"]) == ("same", 18)
    for row in twice["conversations"]:
        row["digest"] = f"digest {int(row['digest'].split()[1]) % 4}"
    write(files, "four.json", twice | {"num_distinct_prompts": 4})
    (found,) = json.loads(run_main("compare", "four.json", "four.json", "--json").out)["comparisons"]
    assert (found["verdict"], found["interval"], found["num_conversations"]) == (None, None, 4)


def test_other_conditions_of_a_result_are_named(files: Path) -> None:
    """Another draft, another date, or another name of the same target is not another condition."""
    write(files, "hot.json", document("hot", temperature=0.7, num_speculative_tokens=3))
    outcome = run_main("compare", "old.json", "hot.json")
    assert outcome.notices == ("measured-otherwise",)
    assert outcome.err.endswith(": num_speculative_tokens 7 -> 3, temperature 0.0 -> 0.7\n")
    for name, digest in (("one", "d1"), ("two", "d1"), ("three", "d2")):
        write(files, f"{name}.json", document(name, target=name, target_digest=digest))
    assert run_main("compare", "one.json", "two.json").err == ""
    assert "target_digest d1 -> d2" in run_main("compare", "one.json", "three.json").err


def test_prompts_as_rendered_are_expected_to_be_the_same_in_pairs_only(files: Path) -> None:
    for name in ("one", "two"):
        whole = document(name)
        whole["measured"] |= {"rendered_prompts_digest": name}
        write(files, f"{name}.json", whole)
    outcome = run_main("compare", "one.json", "two.json")
    assert outcome.notices == ("measured-otherwise",)
    assert "rendered_prompts_digest" in outcome.err
    assert run_main("compare", "one.json", "two.json", "--unpaired").err == ""


def test_a_shape_of_either_curve_is_named(files: Path) -> None:
    """A result without rows has a shape too, because it states the counts by position."""
    low = document("low")
    counts = {
        "num_drafts": 1000,
        "num_accepted_tokens": 50,
        "per_pos_accepted": [50, 0],
        "per_pos_verified": [1000] * 2,
        "histogram": [950, 50, 0],
        "per_pos_intervals": [None] * 2,
        "per_pos_conditional_intervals": [None] * 2,
    }
    del low["conversations"]
    write(files, "low.json", low | counts | {"acceptance_len": 1.05})
    outcome = run_main("compare", "old.json", "low.json")
    assert outcome.out.endswith("test: dflash diagnose low --target org/target\n")
    (_, found) = json.loads(run_main("compare", "old.json", "low.json", "--json").out)["results"]
    (shape,) = found["shapes"]
    assert f"B shape: {shape['name']} (5% " in outcome.out


def test_the_gate_fails_a_result_that_is_shown_to_be_lower(files: Path) -> None:
    assert run_main("compare", "old.json", "new.json", "--gate", "no-regression").code == 0
    outcome = run_main("compare", "new.json", "old.json", "--gate", "no-regression")
    assert outcome.code == 3
    assert (outcome.error_id, outcome.field) == ("lower", "acceptance_len")
    assert outcome.error is not None
    assert outcome.error.found == pytest.approx(-0.38, abs=0.01)
    assert "verdict" in outcome.out


def test_the_gate_fails_one_category_that_falls(files: Path) -> None:
    worse = document("worse", gain=0.1)
    for row in worse["conversations"]:
        row["num_tokens"] -= row["num_steps"] // 2 if row["category"] == "code" else -row["num_steps"] // 2
    write(files, "worse.json", complete(worse, "worse", worse["conversations"], {}))
    outcome = run_main("compare", "old.json", "worse.json", "--gate", "no-regression")
    assert outcome.code == 3
    assert (outcome.error_id, outcome.field) == ("category-lower", "code")


def test_with_a_tolerance_the_gate_asks_for_a_proof(files: Path) -> None:
    """A result that is not shown to be lower passes. With a tolerance it fails, because a drop is not ruled out.

    36 prompts leave room for a kind that loses everything. 360 prompts rule out a drop by more than 0.2.
    """
    for name in ("many", "more"):
        write(files, f"{name}.json", document(name, count=360))
    for names, options, code in (
        (("old", "again"), (), 0),
        (("old", "again"), ("--tolerance", "0.2"), 3),
        (("many", "more"), ("--tolerance", "0.2"), 0),
    ):
        paths = [f"{name}.json" for name in names]
        outcome = run_main("compare", *paths, "--gate", "no-regression", *options)
        assert (outcome.code, outcome.error_id) == (code, "drop-possible" if code else None), options
    equal = run_main("compare", "many.json", "more.json", "--tolerance", "0.2", "--json")
    assert json.loads(equal.out)["comparisons"][0]["verdict"] == "equivalent"


def test_the_gate_refuses_results_that_were_measured_otherwise(files: Path) -> None:
    """Settings that decide what is measured. Another machine is only named in the warning."""
    write(files, "hot.json", document("hot", temperature=0.7, num_speculative_tokens=3, torch="2.0"))
    write(files, "moved.json", document("moved", torch="3.0", device_name="other"))
    gate = ("--gate", "no-regression")
    refused = run_main("compare", "old.json", "hot.json", *gate)
    assert (refused.code, refused.error_id, refused.field) == (2, "incomparable-results", "--gate")
    assert refused.error is not None
    assert refused.error.found == ["num_speculative_tokens", "temperature"]
    allowed = run_main("compare", "old.json", "hot.json", *gate, "--allow-unlike", "num_speculative_tokens,temperature")
    assert allowed.code == 0
    assert run_main("compare", "old.json", "moved.json", *gate).code == 0
    alone = run_main("compare", "old.json", "moved.json", "--allow-unlike", "torch")
    assert (alone.code, alone.error_id, alone.field) == (2, "option-needs-another", "--allow-unlike")


@pytest.mark.parametrize(("field", "value"), [
    ("acceptance_len", 99.0),
    ("num_accepted_tokens", 10**6),
    ("per_pos_accepted", [1] * 7),
    ("histogram", [0] * 8),
    ("num_distinct_prompts", 64),
])  # fmt: skip
def test_a_file_whose_figures_contradict_each_other_is_refused(files: Path, field: str, value: Any) -> None:
    write(files, "odd.json", document("odd") | {field: value})
    outcome = run_main("compare", "old.json", "odd.json")
    assert (outcome.code, outcome.error_id) == (2, "contradictory-result")


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_tokens", 10**4), ("num_tokens", 1), ("num_steps", 21), ("num_far_tokens", 10**6), ("num_far_steps", 10**6)],
)
def test_rows_that_contradict_the_totals_are_refused(files: Path, field: str, value: int) -> None:
    odd = document("odd")
    odd["conversations"][0][field] = value
    write(files, "odd.json", odd)
    outcome = run_main("compare", "old.json", "odd.json")
    assert (outcome.code, outcome.error_id) == (2, "malformed-result")


def test_a_row_longer_than_a_block_is_refused_though_the_totals_agree(files: Path) -> None:
    odd = document("odd")
    first, *others = odd["conversations"]
    for row in others:
        if first["num_tokens"] <= 8 * first["num_steps"]:
            first["num_tokens"] += row["num_tokens"] - row["num_steps"]
            row["num_tokens"] = row["num_steps"]
    write(files, "odd.json", odd)
    outcome = run_main("compare", "old.json", "odd.json")
    assert (outcome.code, outcome.error_id) == (2, "malformed-result")


def test_too_few_prompts_are_no_verdict_and_no_passed_gate(files: Path) -> None:
    for name in ("a", "b"):
        write(files, f"{name}.json", document(name, count=11))
    outcome = run_main("compare", "a.json", "b.json", "--gate", "no-regression")
    assert outcome.code == 3
    assert outcome.error_id == "cannot-be-judged"


def test_a_document_without_rows_gives_no_interval(files: Path) -> None:
    older = document("older")
    del older["conversations"]
    write(files, "older.json", older)
    outcome = run_main("compare", "old.json", "older.json")
    assert outcome.code == 0
    found = json.loads(run_main("compare", "old.json", "older.json", "--json").out)
    assert found["comparisons"][0]["interval"] is None


@pytest.mark.parametrize(("arguments", "code", "error_id", "place"), [
    (("old.json",), 2, None, "RESULT"),
    (("old.json", "none.json"), 4, "file-not-found", "none.json"),
    (("old.json", "other.json"), 2, "unknown-result-format", "other.json"),
    (("old.json", "binary.json"), 2, "not-utf-8", "binary.json"),
    (("old.json", "broken.json"), 2, "missing-key", "schema_version"),
    (("old.json", "empty.json"), 2, "no-steps", "empty.json"),
    (("old.json", "new.json", "--tolerance", "0"), 2, None, "--tolerance"),
    (("old.json", "new.json", "--confidence", "95"), 2, None, "--confidence"),
])  # fmt: skip
def test_bad_input_is_one_line(
    files: Path, arguments: tuple[str, ...], code: int, error_id: str | None, place: str
) -> None:
    write(files, "other.json", {"kind": "inspect"})
    write(files, "broken.json", {"kind": "eval-acceptance", "acceptance_len": 1.0})
    write(files, "empty.json", document("empty") | EMPTY)
    (files / "binary.json").write_bytes(b"\xff\xfe")
    outcome = run_main("compare", *arguments)
    assert outcome.code == code
    assert outcome.error is not None
    assert error_id is None or outcome.error_id == error_id
    assert place in (outcome.error.field, str(outcome.error.path))
    assert len(outcome.err.splitlines()) <= 2


def test_a_measured_result_and_its_rows_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_main(
        "eval-acceptance", "tiny", "--num-prompts", "12", "-n", "16", "--output", "rows.jsonl", "--json"
    )  # fmt: skip
    (tmp_path / "result.json").write_text(done.out)
    counted = json.loads(done.out)["conversations"]
    assert len(counted) == 12
    assert sum(row["num_steps"] for row in counted) == json.loads(done.out)["num_drafts"]
    outcome = run_main("compare", "result.json", "rows.jsonl", "--json")
    document = json.loads(outcome.out)
    assert document["comparisons"][0]["verdict"] == "same"
    assert document["results"][0]["acceptance_len"] == document["results"][1]["acceptance_len"]
    assert outcome.err == ""
