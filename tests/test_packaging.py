"""The dependencies that pyproject.toml declares are the tested ones."""

import ast
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from dflash_testing.paths import ROOT

PACKAGES = ("dflash_cli", "runtime/dflash_runtime", "kernels/dflash_kernels")


def test_every_dependency_has_a_lowest_release_and_a_tested_one() -> None:
    """`scripts/check floors` installs the lowest, `constraints.txt` names the other."""
    lowest = [Requirement(pin) for pin in runpy.run_path(str(ROOT / "scripts" / "floors.py"))["floors"](ROOT)]
    assert len(lowest) >= 9
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {name: Version(version) for name, _, version in (line.partition("==") for line in lines) if version}
    for requirement in lowest:
        (pin,) = requirement.specifier
        assert tested[requirement.name] >= Version(pin.version), requirement


def test_what_is_imported_is_declared() -> None:
    """A package that only comes with another one goes when that one no longer needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *(item for name in ("big", "datasets", "gguf", "grammar", "nixl", "plot", "ray") for item in extras[name]),
    ]
    declared = {Requirement(item).name.replace("-", "_") for item in needed}
    ours = {folder.rpartition("/")[2] for folder in PACKAGES}
    found = {
        name for folder in PACKAGES for file in (ROOT / folder).rglob("*.py") for name in _imports(file.read_text())
    }
    assert {"torch", "numpy", "typer"} <= found
    installed = metadata.packages_distributions()  # PyYAML for yaml
    distributions = {installed.get(name, [name])[0] for name in found - ours - sys.stdlib_module_names}
    assert {name.lower().replace("-", "_") for name in distributions} <= declared


def test_no_imported_module_is_skipped_by_mypy() -> None:
    """Every name from a skipped module is Any."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    skipped, followed = (
        {name.removesuffix(".*") for part in settings["overrides"] if part.get("follow_imports") == way
         for name in part["module"]}
        for way in ("skip", "normal")
    )  # fmt: skip
    assert "torch._inductor" in skipped
    texts = (file.read_text() for folder in settings["files"] for file in (ROOT / folder).rglob("*.py"))
    found = {name for text in texts for name in re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.MULTILINE)}
    assert {"torch.distributed", "transformers.models.auto.modeling_auto"} <= found
    for name in found:
        parts = name.split(".")
        above = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        assert not above & skipped or above & followed > {"transformers.models"}, name


def _imports(text: str) -> Iterator[str]:
    """Top-level names that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
