"""The command line with a file added to one of its packages."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dflash_cli.formats
from dflash_cli.checkpoints.comparison import compare
from dflash_cli.checkpoints.description import describe
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.formats.dialect import FORMATS, all_formats
from dflash_runtime.registry import Registry
from dflash_testing.command_line import Outcome, invoke
from dflash_testing.paths import ROOT

Change = Callable[[dict[str, Any]], object]
"""A change of a config in place."""


def run_with(package: str, folder: Path, *args: object) -> Outcome:
    """Run `dflash` in a process of its own, in which the files of a folder belong to a package."""
    command = f"sys.argv = {['dflash', *map(str, args)]!r}\nfrom dflash_cli.main import main\nmain()\n"
    return _python_with(package, folder, command)


def rule_table_with(package: str, folder: Path) -> str:
    """The page docs/reference/checks.md as it would be printed if the files of a folder belonged to a package."""
    script = ROOT / "scripts" / "rule_table.py"
    done = _python_with(package, folder, f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n")
    assert done.code == 0, done.err
    return done.out


def _python_with(package: str, folder: Path, code: str) -> Outcome:
    add = f"import importlib, sys\nimportlib.import_module({package!r}).__path__.append({str(folder)!r})\n"
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "runtime", "kernels"))
    done = subprocess.run(
        [sys.executable, "-c", add + code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"},
        timeout=300,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@contextmanager
def added(package: ModuleType, file: Path, registry: Registry[Any], find: Any) -> Iterator[None]:
    """Add a file to a package in this process, and take it away again.

    `find` is the cached function that imports the package's modules, which enter their classes in `registry`.
    """
    find()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_items", dict(registry._items))
        patch.setattr(package, "__path__", [*package.__path__, str(file.parent)])
        find.cache_clear()
        yield
    sys.modules.pop(f"{package.__name__}.{file.stem}", None)
    vars(package).pop(file.stem, None)
    find.cache_clear()


@contextmanager
def converted_to(name: str, source: str, folder: Path) -> Iterator[Path]:
    """Add a dialect of that name, and give the bundled draft in it."""
    file = folder / f"added_{name}.py"
    file.write_text(source, encoding="utf-8")
    with added(dflash_cli.formats, file, FORMATS, all_formats):
        outcome = invoke("convert", "tiny", folder / "draft", "--to", name)
        assert outcome.code == 0, outcome.err
        yield folder / "draft"


def run(*args: object, code: int = 0) -> Any:
    """What a command prints with --json."""
    outcome = invoke(*args, "--json")
    assert outcome.code == code, (args, outcome.out, outcome.err)
    return json.loads(outcome.out)


def check_return(draft: Path, path: Path) -> None:
    """Require that a conversion to the native dialect gives the bundled draft's fields and tensors."""
    again = invoke("convert", draft, path, "--to", "native")
    assert again.code == 0, again.err
    difference = compare(describe(tiny_directory() / "draft"), describe(path))
    assert difference.fields == {}
    assert difference.num_equal == len(difference.first.checkpoint.tensors) == len(difference.second.checkpoint.tensors)


def check_location(draft: Path, rule: str, location: str) -> None:
    """Require that `validate` reports an error of this rule at a key of config.json."""
    report = run("validate", draft, code=3)
    found = {(item["id"], item["location"]) for item in report["findings"] if item["severity"] == "error"}
    assert (rule, f"config.json:{location}") in found
