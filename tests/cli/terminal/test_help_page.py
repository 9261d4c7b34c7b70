"""Help pages: essentials first, everything named, no widths broken, documents that exist."""

import re

import pytest
from typer.testing import CliRunner

from dflash_cli.main import COMMANDS, app
from dflash_testing.paths import ROOT

SHOWN = [name for name, entry in COMMANDS.items() if not entry.is_hidden]


def page(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    return str(result.stdout)


@pytest.mark.parametrize("name", SHOWN)
def test_each_page_has_examples_and_plain_metavars(name: str) -> None:
    text = page(name)
    assert re.search(r"^Examples?:$", text, re.MULTILINE)
    assert f"dflash {name}" in text
    assert " range" not in text
    assert not re.search(r"<(int|str|float|path)", text, re.IGNORECASE)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", ["generate", "eval-acceptance"])
def test_essentials_come_before_sampling_and_engine(name: str) -> None:
    text = page(name)
    panels = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert panels[0] == "Essentials"
    assert panels.index("Sampling") < panels.index("Engine")
    essentials = text[text.index("Essentials:") : text.index("Sampling:")]
    for flag in ("--draft", "--target", "--prompts", "--max-new-tokens"):
        assert flag in essentials
    for flag in ("--device", "--max-num-seqs", "--max-num-batched-tokens", "--num-speculative-tokens", "-k,"):
        assert flag in text


def test_the_first_page_groups_the_commands_and_hides_old_names() -> None:
    text = page()
    places = [text.index(f"\n  {name}  ") for name in SHOWN]
    assert places == sorted(places)
    assert text.index("Run a pair:") < text.index("Look at a draft:") < text.index("Convert and serve:")
    assert 'dflash generate "def fibonacci(n):"' in text
    assert "launch" not in text


def test_documents_that_pages_point_to_exist() -> None:
    named = {entry.docs for entry in COMMANDS.values() if entry.docs is not None}
    assert named
    for document in named:
        assert (ROOT / document).is_file(), document


def test_the_way_out_of_verify_width_and_k_is_in_words() -> None:
    text = " ".join(page("generate").split())
    assert "the maximum, and the default, is the draft's block size minus one" in text
    assert "Verify only the first N positions of each block" in text
