"""Differences by draft position: by hand, corrected over positions, and silent without counts by position."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.comparing.comparison_report import position_lines, position_table
from dflash_cli.comparing.measured_result import read_result
from dflash_cli.comparing.result_comparison import Comparison, compare_results
from dflash_runtime.documents import to_json
from dflash_runtime.errors import UsageError
from dflash_testing.command_line import run_main
from dflash_testing.evaluations import drawn_evaluation, write_evaluation
from dflash_testing.refusals import refuses

K = 4


def write(path: Path, histograms: list[list[int]], **changes: Any) -> Path:
    """Write a result of K draft tokens, with one histogram of step lengths for each prompt."""
    whole = to_json(drawn_evaluation(count=12))
    rows = [
        whole["conversations"][0]
        | {
            "digest": str(index), "name": str(index), "category": None, "histogram": counts,
            "num_steps": sum(counts), "num_tokens": sum(place * count for place, count in enumerate(counts, start=1)),
        }
        for index, counts in enumerate(histograms)
    ]  # fmt: skip
    total = [sum(column) for column in zip(*histograms, strict=True)]
    accepted = [sum(total[place:]) for place in range(1, K + 1)]
    evaluation = drawn_evaluation(count=12)
    return write_evaluation(
        path, evaluation, conversations=rows, histogram=total, per_pos_accepted=accepted, num_drafts=sum(total),
        per_pos_verified=[sum(total)] * K, num_accepted_tokens=sum(accepted), num_distinct_prompts=len(rows),
        categories={}, acceptance_len=1 + sum(accepted) / sum(total), **changes,
    )  # fmt: skip


def compared(folder: Path, base: list[list[int]], other: list[list[int]]) -> Comparison:
    paths = write(folder / "a.json", base), write(folder / "b.json", other)
    (found,) = compare_results([read_result(path) for path in paths])
    return found


BASE = [[20 + index % 5, 10, 8 + index % 3, 6, 4 + index % 2] for index in range(64)]
"""64 prompts, with steps of 1 to 5 tokens."""
WORSE_AFTER_2 = [
    [one, two + (-1) ** index, three + 5, four - 4, five - 1 - (-1) ** index]
    for index, (one, two, three, four, five) in enumerate(BASE)
]
"""Position 2 is accepted once more or once less in each prompt. There are fewer steps of 4 and 5 tokens."""


def test_only_the_positions_that_differ_are_named(tmp_path: Path) -> None:
    found = compared(tmp_path, BASE, WORSE_AFTER_2)
    assert [line.position for line in found.positions if line.verdict == "lower"] == [3, 4]
    assert "by position: lower at 3 to 4;" in " ".join(position_lines(found))
    third = found.positions[2]
    steps = [sum(sum(row) for row in side) for side in (BASE, WORSE_AFTER_2)]
    accepted = [sum(sum(row[3:]) for row in side) for side in (BASE, WORSE_AFTER_2)]
    assert third.acceptance_rates == pytest.approx((accepted[0] / steps[0], accepted[1] / steps[1]))
    assert third.difference == pytest.approx(accepted[1] / steps[1] - accepted[0] / steps[0])
    assert third.interval is not None
    assert third.interval.high < 0
    columns, rows = position_table(found, 1)
    assert [len(row) for row in rows] == [len(columns)] * K


def test_p_values_are_corrected_for_the_positions_of_all_results(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.json", BASE), *(write(tmp_path / f"{name}.json", WORSE_AFTER_2) for name in "bc")]
    results = [read_result(path) for path in paths]
    one, two = compare_results(results[:2])[0], compare_results(results)[0]
    raw = min(line.estimate.p_value for line in one.positions if line.estimate is not None)
    assert min(line.p_value or 1 for line in one.positions) == pytest.approx(4 * raw)
    assert min(line.p_value or 1 for line in two.positions) == pytest.approx(8 * raw)


def test_a_position_at_which_few_prompts_differ_has_a_verdict_without_an_interval(tmp_path: Path) -> None:
    changed = [[*row[:3], row[3] + 2, row[4] - 2] if index % 3 else row for index, row in enumerate(BASE)]
    last = compared(tmp_path, BASE, changed).positions[-1]
    assert (last.verdict, last.interval) == ("lower", None)
    assert getattr(last.reason, "id", None) == "few-prompts-differ"


def test_equal_results_differ_at_no_position(tmp_path: Path) -> None:
    found = compared(tmp_path, BASE, BASE)
    assert {line.verdict for line in found.positions} == {"same"}
    assert "no position is shown to differ" in " ".join(position_lines(found))


def test_rows_without_counts_by_position_are_named(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.json", BASE), write(tmp_path / "b.json", BASE)]
    content = json.loads(paths[1].read_text())
    for row in content["conversations"]:
        del row["histogram"]
    paths[1].write_text(json.dumps(content))
    done = run_main("compare", *map(str, paths), "--json")
    (entry,) = json.loads(done.out)["comparisons"]
    assert entry["positions"] == []
    assert "b.json" in entry["no_positions"]
    assert "by position: not known: " in run_main("compare", *map(str, paths)).out


def test_json_has_each_position_with_its_interval(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.json", BASE), write(tmp_path / "b.json", WORSE_AFTER_2)]
    (entry,) = json.loads(run_main("compare", *map(str, paths), "--json").out)["comparisons"]
    assert [line["position"] for line in entry["positions"]] == [1, 2, 3, 4]
    assert entry["positions"][2]["interval"]["high"] < 0
    assert [line["verdict"] for line in entry["positions"]] == ["same", "undecided", "lower", "lower"]
    assert entry["no_positions"] is None


def test_a_histogram_that_contradicts_its_row_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", BASE)
    content = json.loads(path.read_text())
    content["conversations"][0]["histogram"][0] += 1
    path.write_text(json.dumps(content))
    with refuses(UsageError, "malformed-result"):
        read_result(path)
