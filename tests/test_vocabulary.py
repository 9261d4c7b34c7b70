"""docs/vocabulary.md explains every word that a public class is named with, and names nothing that is gone."""

import ast
import re

from dflash_testing.paths import ROOT

PAGE = (ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8")
PACKAGES = ("dflash_cli", "runtime/dflash_runtime", "kernels/dflash_kernels")


def public_classes() -> set[str]:
    return {
        node.name
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    }


def named() -> set[str]:
    """Class names that the page has in backticks."""
    return set(re.findall(r"`([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*|LLM|MLP)\b[^`]*`", PAGE)) - {"TILE_"}


def test_every_public_class_has_its_word() -> None:
    assert len(public_classes()) > 150
    assert not public_classes() - named()


def test_no_class_is_named_that_is_gone() -> None:
    assert not named() - public_classes()


def test_a_word_stands_once() -> None:
    words = [word.strip() for row in re.findall(r"^\| ([^|]+) \|", PAGE, re.M) for word in row.split(",")]
    words = [word for word in words if word not in ("word", "---", "request")]  # a request is the engine's and a user's
    assert len(words) == len(set(words)) > 80
