"""Every table fits 80 columns in a pipe and on a terminal, and is drawn in ASCII if stdout takes only ASCII."""

import io
import sys
from pathlib import Path

import pytest

from dflash_cli.acceptance.acceptance_report import tables
from dflash_cli.terminal import tables as printed
from dflash_testing.command_line import run_main
from dflash_testing.evaluations import drawn_evaluation, write_evaluation

COMMANDS = {
    "eval-acceptance": ["eval-acceptance", "tiny", "--num-prompts", "12", "-n", "8", "--all"],
    "compare": ["compare", "a.json", "b.json"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_tables_fit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("a.json", "b.json"):
        write_evaluation(tmp_path / file, drawn_evaluation())
    shown: list[str] = []
    table = printed._plain_table

    def recorded(*arguments: object) -> None:
        before = sys.stdout
        sys.stdout = io.StringIO()
        try:
            table(*arguments)  # type: ignore[arg-type]
            shown.extend(sys.stdout.getvalue().splitlines())
        finally:
            sys.stdout = before

    monkeypatch.setattr(printed, "_plain_table", recorded)
    assert run_main(*COMMANDS[name]).code == 0
    assert len(shown) > 2
    assert [line for line in shown if len(line) > 80] == []


def test_tables_of_long_names_and_large_counts_fit() -> None:
    evaluation = drawn_evaluation(num_drafted=15, count=40)
    large = type(evaluation.total.counts)(15, 10**8, 10**8, [10**8] * 15)
    object.__setattr__(evaluation.total, "counts", large)
    object.__setattr__(evaluation, "categories", {"a category with a very long name" * 2: evaluation.total})
    for title, (columns, rows) in tables(evaluation).items():
        widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
        assert sum(widths) + 2 * (len(widths) - 1) <= 80, title


def test_bars_show_the_interval_and_are_ascii_where_they_have_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for encoding in ("utf-8", "ascii"):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        printed.print_table(("name", ""), [("a…", "███░░")])
        stream.seek(0)
        shown[encoding] = stream.read()
    assert shown["utf-8"].splitlines()[1] == "a…    ███░░"
    assert shown["ascii"].splitlines()[1] == "a~    ###--"
    (_, *_, bar), *_ = tables(drawn_evaluation())["by position"][1]
    interval = drawn_evaluation().total.per_pos_intervals[0]
    assert interval is not None
    assert (bar.count("█"), len(bar)) == (round(24 * interval.low), round(24 * interval.high))
