"""The documents name things that exist, and what README shows can be pasted."""

import ast
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT
from dflash_testing.searches import shorten_search

README_LINES = 150
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SHELL = set("|<>;&$`")
"""A command line with one of these is for a shell."""


@dataclass(frozen=True)
class Shown:
    """A command of a console block: what stands after `$ `, the exit code that is documented, and the lines below."""

    line: str
    code: int
    output: tuple[str, ...] = ()


def console_commands(text: str) -> list[Shown]:
    """Every `$ ` line of the fenced `console` blocks, in order, backslashed lines joined.

    A command that ends with another code than 0 says so: `$ dflash validate draft  # exit 3`.
    """
    shown = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            line, *output = part.splitlines()
            ended = re.search(r"\s# exit (\d+)$", line)
            shown.append(Shown(line, int(ended[1]) if ended else 0, tuple(item for item in output if item != "...")))
    return shown


def suite() -> set[str]:
    """Every test function of the suite."""
    return {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_every_failure_has_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "failures.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) >= 40
    assert named <= suite(), sorted(named - suite())


def test_architecture_names_every_module() -> None:
    """Each module of the runtime and each folder of the command line stands in docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    modules = [file.name for file in (ROOT / "runtime" / "dflash_runtime").glob("*.py") if file.name != "__init__.py"]
    folders = [
        f"{item.name}/" for item in (ROOT / "dflash_cli").iterdir() if item.is_dir() and item.name[0] not in "._"
    ]
    missing = [name for name in [*modules, *folders] if name not in text]
    assert not missing


def test_console_blocks_are_found() -> None:
    text = "```console\n$ dflash a \\\n  --b\nout\n$ c | d  # exit 3\n```\n```sh\n$ not run\n```\n"
    assert console_commands(text) == [Shown("dflash a    --b", 0, ("out",)), Shown("c | d  # exit 3", 3)]


def test_shown_output_is_compared_but_for_its_numbers() -> None:
    assert is_printed("3.4 [3.2, 4] of 8, vllm serve .../tiny", "5.1 [1, 2.75] of 8, vllm serve /a/b/tiny --k")
    assert not is_printed("3.4 of 8", "3.4, at most 8")


@pytest.mark.parametrize(
    ("document", "is_whole"),
    [
        ("README.md", False),
        ("docs/replay.md", False),
        ("docs/handoff-validate.md", False),
        *(
            pytest.param(document, True, marks=pytest.mark.slow)
            for document in ("README.md", "docs/replay.md", "docs/publishing.md", "docs/handoff.md")
        ),
    ],
)
def test_documents_run_when_pasted(
    document: str, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of a page's console blocks, in order, in one empty directory; measurements on fewer prompts."""
    monkeypatch.chdir(tmp_path)
    if not is_whole:
        shorten_search(monkeypatch)
    commands = console_commands((ROOT / document).read_text())
    assert len(commands) >= 4
    for shown in commands:
        outcome = paste(shown.line if is_whole else with_fewer_prompts(shown), tmp_path)
        assert outcome.code == shown.code, f"{shown.line}\n{outcome.err}"
        for line in shown.output:
            assert is_printed(line, outcome.out + outcome.err), f"{line}\n{outcome.out}{outcome.err}"


def is_printed(shown: str, printed: str) -> bool:
    """Whether the printed text has the shown line, whatever the numbers; `...` in it stands for anything."""
    pieces = [re.escape(piece) for piece in without_numbers(shown).split("...")]
    return re.search(".*".join(pieces), without_numbers(printed)) is not None


def without_numbers(text: str) -> str:
    return re.sub(r"[-+]?\d+(\.\d+)?", "N", text)


def with_fewer_prompts(shown: Shown) -> str:
    """The command, measuring on as few prompts as it takes; a gate that is documented as met is one that is met."""
    words = shlex.split(shown.line, comments=True)
    if "dump" in words:
        return f"{shown.line} --num-prompts 12 -n 32"
    if "replay" in words:
        return shown.line
    if "eval-acceptance" in words:
        gate = " --min-acceptance 1" if "--min-acceptance" in words and shown.code == 0 else ""
        return f"{shown.line.partition(' #')[0]} --num-prompts 12 -n 32{gate}"
    if "bench" in words:
        return shown.line.replace("-n 32", "-n 12")
    if "diagnose" in words:
        return shown.line.partition(" #")[0].replace("--num-prompts 8", "--num-prompts 6 -n 24")
    if "--level run" in shown.line:
        return f"{shown.line.partition(' #')[0]} --num-prompts 4"
    return shown.line


def paste(line: str, home: Path) -> support.Outcome:
    """One command; `dflash` runs in this process unless the line needs a shell."""
    words = shlex.split(line, comments=True)
    quoted = re.sub(r"'[^']*'", "", line.partition(" # exit ")[0])
    if words[0] == "dflash" and not SHELL & set(quoted):
        return support.run_main(*words[1:])
    script = home / ".bin" / "dflash"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dflash_cli "$@"\n')
    script.chmod(0o755)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env={**os.environ, **support.IMPORT_PATHS, "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    return support.Outcome(done.returncode, done.stdout, done.stderr)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Relative links name files and folders of the repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text())
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    assert not [link for link in local if not (document.parent / link).exists()]
