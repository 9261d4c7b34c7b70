"""The meter of a run on a terminal, in a log and in a quiet run."""

import pytest

from dflash_cli.terminal import console
from dflash_cli.terminal.progress import Meter


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_the_line_has_count_estimate_and_time_left() -> None:
    clock = Clock()
    meter = Meter(64, "prompts", clock=clock)
    assert meter.line(0, "") == "0/64 prompts"
    clock.seconds = 3.0
    assert meter.line(12, "3.41 [3.2, 3.6]") == "12/64 prompts  3.41 [3.2, 3.6]  0:13 left"
    assert meter.line(64, "3.41 [3.2, 3.6]") == "64/64 prompts  3.41 [3.2, 3.6]"
    clock.seconds = 3600.0
    assert meter.line(16, "").endswith("3:00:00 left")


def test_resumed_work_does_not_count_as_speed() -> None:
    clock = Clock()
    meter = Meter(100, "prompts", clock=clock)
    meter.resume(80)
    clock.seconds = 10.0
    assert meter.line(80, "") == "80/100 prompts"
    assert meter.line(90, "") == "90/100 prompts  0:10 left"


def test_a_log_gets_a_line_when_both_time_and_work_have_passed(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Meter(100, "prompts", clock=clock) as meter:
        for done in range(1, 101):
            clock.seconds += 0.5
            meter.update(done, "3.0")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[0] for line in lines] == ["20/100", "40/100", "60/100", "80/100", "100/100"]
    with Meter(10, "prompts", clock=clock) as meter:
        for done in range(1, 11):
            clock.seconds += 60
            meter.update(done)
    assert len(capsys.readouterr().err.splitlines()) == 10


def test_a_bar_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with Meter(1319, "prompts") as meter:
        meter.update(1234, "acceptance 13.41 [13.2, 13.6]  12345 tokens/s")
        assert meter._display is not None
        meter._display.refresh()
    shown = capsys.readouterr().err
    assert "1234/1319 prompts  acceptance 13.41 [13.2, 13.6]  12345 tokens/s  0:00 left" in shown
    assert "…" not in shown


def test_a_quiet_run_has_no_meter(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(quiet=True)
    clock = Clock()
    with Meter(2, "prompts", clock=clock) as meter:
        clock.seconds = 100
        meter.update(1)
    console.configure(quiet=False)
    assert capsys.readouterr().err == ""
