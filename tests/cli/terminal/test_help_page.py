"""Help pages: examples and essentials first, everything with --help-all, no word split, topics that exist."""

import re

import pytest
from typer.testing import CliRunner

from dflash_cli.main import COMMANDS, app
from dflash_cli.terminal.command_line import load_command
from dflash_cli.terminal.help_page import WIDEST_PAGE
from dflash_cli.terminal.requests import parameters_of


def page(*arguments: str, flag: str = "--help", width: int = 80) -> str:
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [*arguments, flag])
    assert result.exit_code == 0
    return str(result.stdout)


def rows(text: str) -> list[str]:
    """The flags and arguments of a page, in the order of its rows."""
    after = text[text.index("\n\n", text.index("\nExample")) :]
    return re.findall(r"^  (?:-\w, )?(--[\w-]+|[A-Z]\w*)", after, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_short_page_has_examples_first_and_few_options(name: str) -> None:
    text = page(name)
    assert 0 < text.index(f"dflash {name}") < text.index("\nOptions:")
    options = [item for item in rows(text) if item.startswith("-")]
    assert len(options) <= 15
    assert "--help-all" in options


@pytest.mark.parametrize("name", COMMANDS)
def test_the_full_page_has_every_option(name: str) -> None:
    shown = set(rows(page(name, flag="--help-all")))
    expected = {item.flag or item.metavar for item in parameters_of(load_command(name, COMMANDS[name]).kind)}
    assert {item for item in expected if item.startswith("--")} - shown <= {"--draft", "--target"}


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_lines_use_the_width_and_no_word_is_split(width: int) -> None:
    text = page("eval-acceptance", flag="--help-all", width=width)
    widest = max(len(line) for line in text.splitlines() if not line.startswith("  dflash"))
    assert widest <= max(min(width, WIDEST_PAGE), 64)
    if width >= 100:
        assert widest > 90
    words = " ".join(text.split())
    assert "--num-speculative-tokens" in words
    assert "prompt_token_ids" in words


@pytest.mark.parametrize("width", [40, 200])
def test_examples_are_never_wrapped(width: int) -> None:
    for example in COMMANDS["eval-acceptance"].examples:
        assert f"\n  {example}\n" in page("eval-acceptance", width=width)


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_a_short_page_fits_eighty_columns(name: str | None) -> None:
    assert max(map(len, page(*([name] if name else [])).splitlines())) <= 80


def test_groups_come_in_their_order() -> None:
    text = page("generate", flag="--help-all")
    panels = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert panels[:2] == ["Examples", "Essentials"]
    assert panels.index("Sampling") < panels.index("Engine")


def test_the_first_page_groups_the_commands() -> None:
    text = page()
    places = [text.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)
    headings = [text.index(f"\n{entry.section}:\n") for entry in COMMANDS.values()]
    assert headings == sorted(headings)
