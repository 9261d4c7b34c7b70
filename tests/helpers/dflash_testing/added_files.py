"""The command line with a file added to one of its packages."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dflash_runtime.registry import Registry
from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT


def run_with(package: str, folder: Path, *args: object) -> support.Outcome:
    """Run `dflash` in a process of its own, in which the files of a folder belong to a package."""
    command = f"sys.argv = {['dflash', *map(str, args)]!r}\nfrom dflash_cli.main import main\nmain()\n"
    return _python_with(package, folder, command)


def rule_table_with(package: str, folder: Path) -> str:
    """The page docs/reference/checks.md as it would be printed if the files of a folder belonged to a package."""
    script = ROOT / "scripts" / "rule_table.py"
    done = _python_with(package, folder, f"import runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n")
    assert done.code == 0, done.err
    return done.out


def _python_with(package: str, folder: Path, code: str) -> support.Outcome:
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
    return support.Outcome(done.returncode, done.stdout, done.stderr)


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
