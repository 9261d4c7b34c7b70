"""`dflash docs` shows pages to pagers and pipes, and every help page names a page that exists."""

import pydoc

import pytest
from typer.testing import CliRunner

from dflash_cli.main import COMMANDS, app
from dflash_cli.terminal import console, documentation
from dflash_testing.command_line import run_main


def test_a_pipe_gets_the_page_as_it_is() -> None:
    outcome = run_main("docs", "exit-codes")
    assert (outcome.code, outcome.out, outcome.err) == (0, documentation.text("exit-codes"), "")


def test_a_terminal_gets_the_page_in_a_pager(monkeypatch: pytest.MonkeyPatch) -> None:
    paged: list[str] = []
    monkeypatch.setattr(console, "is_terminal", lambda: True)
    monkeypatch.setattr(pydoc, "pager", paged.append)
    outcome = run_main("docs", "tutorial")
    assert (outcome.code, outcome.out) == (0, "")
    assert paged == [documentation.text("tutorial")]


def test_every_page_is_listed_with_its_title() -> None:
    outcome = run_main("docs")
    assert outcome.code == 0
    assert [tuple(line.split(maxsplit=1)) for line in outcome.out.splitlines()] == [*documentation.topics().items()]


def test_an_unknown_topic_is_wrong_use() -> None:
    outcome = run_main("docs", "tutorail")
    assert outcome.code == 2
    assert outcome.error is not None
    assert outcome.error.id == "unknown-topic"
    assert (outcome.error.field, outcome.error.found) == ("TOPIC", "tutorail")
    assert "tutorial?" in outcome.error.message


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_a_page_that_exists(name: str) -> None:
    topic = COMMANDS[name].docs
    assert topic in documentation.topics()
    for flag in ("--help", "--help-all"):
        last = CliRunner().invoke(app, [name, flag]).stdout.splitlines()[-1]
        assert last.startswith("More: ")
        assert last.endswith(f" docs {topic}")
