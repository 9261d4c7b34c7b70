"""Options keep their names under every Typer release that pyproject allows.

Typer 0.27 made a metavar into the name of an option that had none of its own. `scripts/check floors` runs this file
under the lowest release and under 0.27. Typer 0.26 takes arguments that are not there for typed ones.
"""

import re
from pathlib import Path

import pytest

from dflash_testing import checkpoints as support


@pytest.mark.parametrize("command", ["generate", "eval-acceptance", "validate"])
def test_device_is_in_the_help(command: str) -> None:
    assert re.search(r"(?<!\S)--device\b", support.invoke(command, "--help").out)


@pytest.mark.parametrize(
    "command", ["generate", "eval-acceptance", "bench", "validate", "inspect", "convert", "explain", "env"]
)
def test_options_are_lower_case(command: str) -> None:
    named = re.findall(r"(?<!\S)--[A-Za-z][\w-]*", support.invoke(command, "--help").out)
    assert "--help" in named
    assert not [name for name in named if name != name.lower()]


def test_what_is_not_in_the_command_line_is_not_typed(tmp_path: Path) -> None:
    """Prompts do not go with a folder of hand-offs, and there are none."""
    given = ("generate", "--draft", "tiny", "--target", "tiny", "--handoff-in", str(tmp_path))
    assert "no hand-offs in it" in support.invoke(*given).err
    assert "PROMPT does not go with" in support.invoke(*given, "def f():").err
