"""Runs of the benchmarks' programs in this process, with the smallest shape."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

SMALL = ["--shape", "small", "--device", "cpu"]


def run(script: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a script's main in this process -> its exit code, and the rows it wrote."""
    monkeypatch.setattr(sys, "argv", [script.__file__, *SMALL, "--out", str(out), *arguments])
    code = script.main()
    return code, [json.loads(line) for line in out.read_text().splitlines()]
