"""Options keep their names under every Typer release that pyproject allows.

Typer 0.27 made a metavar into the name of an option that had none of its own. `scripts/check floors` runs this file
under the lowest release and under 0.27.
"""

import re

import pytest

from dflash_testing.command_line import invoke


@pytest.mark.parametrize("command", ["generate", "eval-acceptance", "validate"])
def test_device_is_in_the_help(command: str) -> None:
    assert re.search(r"(?<!\S)--device\b", invoke(command, "--help-all").out)


@pytest.mark.parametrize(
    "command", ["generate", "eval-acceptance", "bench", "validate", "inspect", "convert", "explain", "env"]
)
def test_options_are_lower_case(command: str) -> None:
    named = re.findall(r"(?<!\S)--[A-Za-z][\w-]*", invoke(command, "--help-all").out)
    assert "--json" in named
    assert not [name for name in named if name != name.lower()]
