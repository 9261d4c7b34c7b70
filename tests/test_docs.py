"""The documents name things that exist."""

import ast
import re

from dflash_testing.paths import ROOT


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
