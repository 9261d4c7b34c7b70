"""The registry of dialects: writable dialects, refused names, and no dialect's name in the code of conversions."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_cli.formats.dialect import all_formats, get_writable, word_of, writable_formats, writable_words
from dflash_runtime.errors import UsageError
from dflash_testing.command_line import invoke, run_main
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses


def test_writable_dialects() -> None:
    assert [item.name for item in writable_formats()] == sorted(item.name for item in all_formats() if item.writable)
    assert all(get_writable(word_of(item), item.family) is item for item in writable_formats())


@pytest.mark.parametrize(
    ("name", "id", "named"),
    [
        ("natve", "unknown-dialect", ["mean native?", "mlx, native, sglang, speculators, vllm"]),
        ("xyz", "unknown-dialect", ["mlx, native, sglang, speculators, vllm"]),
        ("dspark-native", "unknown-dialect", ["mlx, native, sglang, speculators, vllm"]),
        ("specforge", "read-only-dialect", ["mlx, native, sglang, speculators, vllm"]),
    ],
)
def test_other_names_are_refused_in_one_line(name: str, id: str, named: list[str], tmp_path: Path) -> None:
    with refuses(UsageError, id, field="--to", found=name) as caught:
        get_writable(name)
    assert all(text in caught.value.message for text in named)
    outcome = run_main("convert", "tiny", tmp_path / "out", "--to", name)
    assert outcome.code == 2
    assert outcome.err == f"error: {caught.value.message}\n"


def test_help_lists_every_writable_dialect() -> None:
    text = " ".join(invoke("convert", "--help").out.split())
    assert ", ".join(writable_words()) in text


def texts(file: Path) -> Iterator[str]:
    """The string constants of a module, without docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    loose = {node.value.value for node in ast.walk(tree) if isinstance(node, ast.Expr)
             and isinstance(node.value, ast.Constant)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings | loose:
            yield node.value


def test_no_dialect_is_named_where_drafts_are_converted() -> None:
    """A conversion asks the dialect's class for every fact about the dialect."""
    names = "|".join(re.escape(item.name) for item in all_formats())
    files = sorted((ROOT / "dflash_cli" / "conversion").glob("*.py"))
    assert len(files) > 10
    for file in files:
        named = [text for text in texts(file) if re.search(rf"(?<![\w-])({names})(?![\w-])", text)]
        assert not named, (file.name, named)
