"""The short examples run as they stand."""

import os
import re
import subprocess
import sys

import pytest

from dflash_testing.paths import ROOT


@pytest.mark.parametrize("name", ["generate.py", "own_draft.py"])
def test_example_runs(name: str) -> None:
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "runtime", "kernels"))
    command = [sys.executable, str(ROOT / "examples" / name)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )
    found = re.search(r"acceptance length ([0-9.]+)", done.stdout + done.stderr)
    assert found is not None
    assert float(found[1]) > 1.5, "it drafts nothing that is accepted"
