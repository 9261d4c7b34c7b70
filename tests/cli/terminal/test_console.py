"""What each kind of run prints, and how texts of others are escaped."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import pytest

from dflash_cli.terminal import console
from dflash_cli.terminal.safe_text import CONTROLS, CONTROLS_OF_TEXT
from dflash_cli.terminal.tables import print_table


@pytest.fixture(autouse=True)
def loud_again() -> Iterator[None]:
    yield
    console.configure(quiet=False)


def test_quiet_silences_all_but_results_warnings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(quiet=True)
    console.status("status")
    console.note("note")
    console.result("result")
    console.warn("warn")
    console.error("error")
    out, err = capsys.readouterr()
    assert out == "result\n"
    assert err.splitlines() == ["warning: warn", "error: error"]


def test_a_piped_table_is_aligned_whole_and_ends_in_no_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    print_table(("name", "count", ""), [("a", "1", ""), ("中文", "20", long), ("b", "3", "y")], title="title")
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "name  count",
        "a         1",
        f"中文     20  {long}",
        "b         3  y",
    ]
    print_table(("name", "share of"), [("a", "0.5"), ("b", "-")])
    assert capsys.readouterr().out.splitlines() == ["name  share of", "a          0.5", "b            -"]
    print_table(("", ""), [("only", "rows")])
    assert capsys.readouterr().out == "only  rows\n"


HOSTILE = "a\nerror: forged\r\x1b[31m\x1b]0;t\x07\x7f\x9b2J\u202e\u2028"


def is_safe(text: str) -> bool:
    return text.endswith("\n") and "\n" not in text[:-1] and not CONTROLS.search(text[:-1])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_control_characters_are_escaped_on_one_line(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)  # Rich draws tables on a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "dumb")
    for write in (console.result, console.status, console.note, console.warn, console.error, console.error_text):
        write(HOSTILE)
        out, err = capsys.readouterr()
        assert is_safe(out + err), write
        assert "forged" in out + err
    print_table((HOSTILE,), [(HOSTILE,)], title=HOSTILE)
    console.spans([(HOSTILE, "bold")])
    assert all(is_safe(f"{line}\n") for line in capsys.readouterr().out.split("\n"))


def test_answers_keep_their_lines_and_lose_their_escapes_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console.result_text(HOSTILE)
    assert capsys.readouterr().out == HOSTILE, "a pipe gets every byte"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    console.result_text(f"{console.dim('--- 1 ---')}\n\t{HOSTILE}")
    out = capsys.readouterr().out
    assert out.startswith("\x1b[2m--- 1 ---\x1b[0m\n\ta\nerror: forged\\r\\x1b[31m")
    assert not CONTROLS_OF_TEXT.search(out)


def test_log_records_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(verbosity=2)
    logging.getLogger("dflash_runtime").info("found %s", HOSTILE)
    console.configure(verbosity=0)
    assert is_safe(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("variables", "is_coloured"),
    [
        ({}, False),
        ({"FORCE_COLOR": "1"}, True),
        ({"FORCE_COLOR": ""}, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_of_a_pipe(
    variables: dict[str, str], is_coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Severities of tables and lines, and labels of messages. Documents have none."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    print_table(("id", "severity"), [("C01", "error"), ("C02", "info"), ("error of mine", "fine")])
    console.severity_line("C01 ", "warning", " x" * 60)
    console.warn("text")
    out, err = capsys.readouterr()
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert plain.splitlines() == [
        "id             severity",
        "C01            error",
        "C02            info",
        "error of mine  fine",
        f"C01 warning{' x' * 60}",
    ]
    coloured = re.findall(r"\x1b\[[1-9][\d;]*m(.*?)\x1b", out)
    assert coloured == (["error", "info", "warning"] if is_coloured else [])
    assert re.findall(r"\x1b\[[1-9][\d;]*m(.*?)\x1b", err) == (["warning: "] if is_coloured else [])
    console.result_json(["error"])
    assert capsys.readouterr().out == '["error"]\n'


def test_a_dumb_terminal_gets_no_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for term, is_coloured in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        assert ("\x1b" in console.dim("text")) is is_coloured


@pytest.mark.parametrize(("width", "has_bars"), [("80", True), ("34", False)])
def test_a_narrow_terminal_gets_no_bars(
    width: str, has_bars: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing number is no bar."""
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("position", "p", "share of steps", ""), [("1", "-", "0.765", "█" * 17 + "░"), ("2", "-", "0", "")])
    out = capsys.readouterr().out
    assert (out.count("█"), out.count("-")) == (17 * has_bars, 2)


def test_verbose_says_what_is_read_and_decided() -> None:
    """On stderr, through the one writer; stdout is the same as without -v, also with --json."""
    from dflash_testing.command_line import run_main

    command = ("validate", "tiny", "--target", "tiny", "-e", "vllm@0.30")
    plain, told, every = (run_main(*command, *more) for more in ((), ("-v",), ("-vv",)))
    assert plain.out == told.out == every.out
    assert "info: " not in plain.err
    lines = told.err.splitlines()
    assert all(line.startswith("info: ") for line in lines)
    for said in ("draft tiny: bundled", "native dialect", "type qwen3", "headers of 36 tensors", "vllm 0.30"):
        assert [line for line in lines if said in line], said
    assert any(line.startswith("info: dflash_cli.rules.validator: ") for line in every.err.splitlines())
    with_json, told_json = (run_main(*command, "--json", *more) for more in ((), ("-v",)))
    assert (with_json.out, with_json.err) == (told_json.out, "")
    console.configure(verbosity=0, json=False)


def test_documents_stay_json_and_equal() -> None:
    @dataclass
    class Document:
        KIND: ClassVar[str] = "document"
        name: str

    text = console.json_document(Document(HOSTILE))
    assert not CONTROLS.search(text)
    assert json.loads(text)["name"] == HOSTILE
