"""The structure of the code: imports point one way, no package hides another, and headers need no torch."""

import ast
import importlib
import re
import runpy
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from dflash_cli.engines.serving_engine import all_engines
from dflash_cli.formats.dialect import all_formats
from dflash_cli.terminal import documentation
from dflash_testing.paths import ROOT

FORBIDDEN = {
    "kernels/dflash_kernels": {"dflash_runtime", "dflash_cli", "typer", "rich", "transformers", "huggingface_hub"},
    "runtime/dflash_runtime": {"dflash_cli", "typer", "rich", "huggingface_hub"},
    "dflash_cli": set(),
}
EVERYWHERE = {"click", "kernels", "runtime", "pickle"}
TORCH_FREE = {"torch", "transformers", "numpy"}
SLOW = TORCH_FREE | {"pydantic"}


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def imports(file: Path) -> Iterator[str]:
    """Top-level names a file imports, wherever in it."""
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_point_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        wrong = set(imports(file)) & (FORBIDDEN[folder] | EVERYWHERE)
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_no_package_where_one_would_shadow_another() -> None:
    """An importable top-level `kernels` breaks transformers; a package under tests does so for `python -m pytest`."""
    for folder in ("kernels", "runtime"):
        assert not (ROOT / folder / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_only_the_console_writes_to_the_terminal() -> None:
    for folder in FORBIDDEN:
        for file in (ROOT / folder).rglob("*.py"):
            if file.name == "console.py":
                continue
            calls = [node.func.id for node in nodes(file)
                     if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]  # fmt: skip
            assert "print" not in calls, file


def modules_after(*commands: list[str]) -> list[set[str]]:
    """The modules that one process has loaded after each command, the first two parts of their names."""
    code = (
        "import sys\n"
        f"sys.path[:0] = {[str(ROOT), str(ROOT / 'runtime'), str(ROOT / 'kernels')]!r}\n"
        "from dflash_cli.main import main\n"
        f"for arguments in {commands!r}:\n"
        "    sys.argv = ['dflash', *arguments]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert end.code in (0, None), end.code\n"
        "    found = {'.'.join(name.split('.')[:n]) for name in sys.modules for n in (1, 2)}\n"
        "    sys.stderr.write('MODULES ' + ' '.join(sorted(found)) + '\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()[1:]) for line in done.stderr.splitlines() if line.startswith("MODULES ")]


def test_commands_that_read_headers_or_nothing_import_no_slow_library() -> None:
    naming = ["--to", "speculators", "--target", "tiny", "--target-name", "org/name"]
    commands = [
        ["--version"],
        ["inspect", "tiny"],
        ["inspect", "tiny", "tiny:reduced"],
        ["validate", "tiny", "--target", "tiny"],
        ["validate", "tiny:reduced", "--json"],
        ["-q", "inspect", "tiny", "--tensors"],
        ["explain", "C20"],
        ["serve-command", "tiny", "--engine", "vllm"],
        ["env"],
        ["convert", "tiny", "unused", *naming, "--dry-run"],
    ]
    for command, loaded in zip(commands, modules_after(*commands), strict=True):
        assert not loaded & SLOW, command


def test_help_draws_nothing_with_rich() -> None:
    (loaded,) = modules_after(["--help"])
    assert "rich" not in loaded


def test_transformers_finds_its_own_kernels_from_the_repository_root() -> None:
    """This process has the root on its path, as one that is started there."""
    assert str(ROOT) in sys.path
    importlib.import_module("transformers.integrations.hub_kernels")


DRAWING = runpy.run_path(str(ROOT / "scripts" / "imports.py"))


def test_rooms_import_downwards_only() -> None:
    """No circle between rooms: each stands on a floor above every room that it imports."""
    edges = DRAWING["arrows"]()
    floors = DRAWING["floors"](edges)
    in_circles = {room for edge in edges for room in edge} - floors.keys()
    assert not in_circles, {edge: edges[edge][:3] for edge in edges if set(edge) <= in_circles}


def test_a_circle_would_be_seen() -> None:
    edges: dict[tuple[str, str], list[str]] = {("top", "a"): [], ("a", "b"): [], ("b", "a"): [], ("b", "base"): []}
    assert DRAWING["floors"](edges) == {"base": 1}


def test_the_checkpoint_wing_never_imports_the_measuring_wing() -> None:
    known, wings = DRAWING["modules"](), DRAWING["WINGS"]
    checkpoint = [name for name in known if name.split(".")[1:2] and name.split(".")[1] in wings["checkpoint"]]
    assert len(checkpoint) > 50
    wrong = [name for name in checkpoint if "measuring" in DRAWING["wings_of"](name, known)]
    assert not wrong


def test_no_two_files_import_each_other() -> None:
    """Imports inside functions and for type checking count too."""
    assert DRAWING["circles"](DRAWING["imports"]()) == []


def test_a_cycle_through_a_late_import_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def call() -> None:\n    from package.b import f\n")
    (tmp_path / "b.py").write_text("if TYPE_CHECKING:\n    from package import a\n")
    known = {f"package.{name}": tmp_path / f"{name}.py" for name in "ab"}
    found = {name: set(DRAWING["imported"](file, known)) for name, file in known.items()}
    assert DRAWING["circles"](found) == [["package.a", "package.b"]]


def test_commands_of_the_checkpoint_wing_load_no_module_of_the_measuring_wing(tmp_path: Path) -> None:
    naming = ["--to", "speculators", "--target-name", "org/name"]
    commands = [
        ["inspect", "tiny"],
        ["validate", "tiny", "--target", "tiny"],
        ["validate", "tiny", "--ignore", "S02"],
        ["convert", "tiny", str(tmp_path / "copied"), *naming, "--verify", "none"],
        ["convert", "tiny", str(tmp_path / "verified"), *naming, "--verify", "roundtrip"],
    ]
    measuring = {f"dflash_cli.{room}" for room in DRAWING["WINGS"]["measuring"]}
    for command, loaded in zip(commands, modules_after(*commands), strict=True):
        assert not loaded & (measuring | TORCH_FREE), command


def test_the_drawing_in_the_documents_is_true() -> None:
    """The page on architecture has the output of `python scripts/imports.py`."""
    assert DRAWING["draw"]() in documentation.text("architecture")


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_a_module_shares_its_stem_with_nothing_in_its_package(folder: str) -> None:
    """Commands are named after what is typed; every other name stands for one file or folder."""
    root = ROOT / folder
    modules = [file.stem for file in root.rglob("*.py") if file.stem[0] != "_" and file.parent.name != "commands"]
    folders = [item.name for item in root.rglob("*") if item.is_dir() and not item.name.startswith(("_", "."))]
    shared = [name for name, count in Counter([*modules, *set(folders)]).items() if count > 1]
    assert not shared


FREE_OF_DIALECTS = ("rules", "diagnosis", "engines")
"""Folders of `dflash_cli` that see a draft through its `Format` alone. An engine's own files name what it reads."""

OTHER_MEANINGS = {
    "diagnosis/reading_results.py": {"native"},
    "diagnosis/alternatives.py": {"dspark"},
    "diagnosis/family_readings/convolved.py": {"dflash2"},
    "diagnosis/family_readings/sparked.py": {"dspark"},
}
"""File -> words that name a dialect elsewhere, and the target runtime or a family of drafts in this file."""


def engine_files() -> set[str]:
    """The stems of the files in engines/ that belong to one engine."""
    return {engine.__module__.rpartition(".")[2] for engine in all_engines()}


def code_words(file: Path) -> set[str]:
    """The words of a file's names and texts, without docstrings, sources of rules, and effects of rules."""
    skipped: set[ast.AST] = set()
    for node in nodes(file):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in ("source", "effect"):
            skipped |= set(ast.walk(node.value))
    texts: list[str] = []
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            texts += re.findall(r"[\w-]+", node.value)
        for field in ("id", "attr", "arg", "name", "module"):
            name = getattr(node, field, None)
            texts += re.split(r"[_.]", name.lower()) if isinstance(name, str) else []
    return set(texts)


def test_no_rule_and_no_reading_names_a_dialect() -> None:
    dialects = [item for item in all_formats() if item.engine is None]
    names = {item.name for item in dialects} | {key for item in dialects for key in item.containers}
    assert {"native", "speculators", "dflash_config", "transformer_layer_config"} <= names
    for folder in FREE_OF_DIALECTS:
        for file in sorted((ROOT / "dflash_cli" / folder).rglob("*.py")):
            place = file.relative_to(ROOT / "dflash_cli").as_posix()
            if folder == "engines" and file.stem.startswith(tuple(engine_files())):
                continue
            wrong = code_words(file) & (names - OTHER_MEANINGS.get(place, set()))
            assert not wrong, f"{place}: {sorted(wrong)}"
