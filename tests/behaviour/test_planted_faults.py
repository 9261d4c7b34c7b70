"""The cases of `examples/benchmarks/faults.py` can be planted, and its verdicts are what docs/faults.md says they are.

The whole table takes minutes on a large machine; here a sample goes through the levels that run nothing.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.references import Role, fetch_directory
from dflash_testing.paths import ROOT

SPEC = importlib.util.spec_from_file_location("planted_faults", ROOT / "examples/benchmarks/faults.py")
assert SPEC is not None
assert SPEC.loader is not None
faults: Any = importlib.util.module_from_spec(SPEC)
sys.modules["planted_faults"] = faults
SPEC.loader.exec_module(faults)

CASES = faults.cases()
FOUND_WITHOUT_A_RUN = ("N", "M", "C", "P0")


def test_there_are_enough_cases() -> None:
    assert sum(case.is_fault for _, case in CASES.values()) >= 60
    assert sum(not case.is_fault for _, case in CASES.values()) >= 40


def named_by(key: str, folder: Path) -> set[str]:
    """Rules above a remark, at the weights level."""
    pair, case = CASES[key]
    faults.plant(case, fetch_directory(faults.PAIRS[pair], Role.DRAFT), folder / "draft")
    report = faults._validate(folder / "draft", "weights", "cpu")
    return {item.id for item in report.findings if item.severity != "info"}


@pytest.mark.parametrize("key", [key for key, (_, case) in CASES.items() if not case.is_fault][::3])
def test_sound_variants_are_passed(key: str, tmp_path: Path) -> None:
    assert named_by(key, tmp_path) == set()


@pytest.mark.parametrize(
    "key",
    [key for key, (_, case) in CASES.items() if case.is_fault and case.right[0].startswith(FOUND_WITHOUT_A_RUN)][::2],
)
def test_faults_in_the_weights_are_named(key: str, tmp_path: Path) -> None:
    case = CASES[key][1]
    assert named_by(key, tmp_path) & set(case.right)


def row(*findings: tuple[str, str], length: float = 1.5, is_fault: bool = True) -> dict[str, Any]:
    return {
        "acceptance_len": length, "is_fault": is_fault, "right": ["R01"], "beside": ["C10"],
        "levels": {"headers": [], "run": [[rule, severity, ""] for rule, severity in findings]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("item", "word"),
    [
        (row(("R01", "error"), ("C10", "warning")), "right"),
        (row(("R01", "error"), ("R04", "error")), "wrong"),
        (row(("N13", "error")), "wrong"),
        (row(("R06", "error")), "no cause"),
        (row(("C20", "warning")), "other"),
        (row(("M08", "info")), "silent"),
        (row(("R06", "warning"), is_fault=False), "finding"),
        (row(is_fault=False), "silent"),
    ],
)
def test_verdicts(item: dict[str, Any], word: str) -> None:
    assert faults.judge(item, 2.0).word == word
    assert faults.judge(item, 2.0).loss == pytest.approx(0.5)
