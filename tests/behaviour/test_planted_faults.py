"""Every case of `examples/plant_faults.py` can be planted, and verdicts follow docs/explanation/faults.md.

The whole table takes minutes on a large machine. These tests run a sample at the levels that do not run the draft.
"""

from pathlib import Path
from typing import Any

import plant_faults
import pytest
from planted_faults.cases import PAIRS, cases
from planted_faults.verdicts import judge

from dflash_cli.checkpoints.references import Role, fetch_directory

CASES = cases()
FOUND_WITHOUT_A_RUN = ("N", "M", "C", "P0")


def test_there_are_enough_cases() -> None:
    assert sum(case.is_fault for _, case in CASES.values()) >= 60
    assert sum(not case.is_fault for _, case in CASES.values()) >= 40


def named_by(key: str, folder: Path) -> set[str]:
    """Rules above a remark, at the weights level."""
    pair, case = CASES[key]
    plant_faults.plant(case, fetch_directory(PAIRS[pair], Role.DRAFT), folder / "draft")
    report = plant_faults.validate_at(folder / "draft", "weights", "cpu")
    return {item.id for item in report.findings if item.severity != "info"}


def sampled(keys: list[str], every: int) -> list[Any]:
    """All keys, of which one in `every` runs by default."""
    return [pytest.param(key, marks=[pytest.mark.slow] if index % every else []) for index, key in enumerate(keys)]


@pytest.mark.parametrize("key", sampled([key for key, (_, case) in CASES.items() if not case.is_fault], 24))
def test_sound_variants_are_passed(key: str, tmp_path: Path) -> None:
    assert named_by(key, tmp_path) == set()


@pytest.mark.parametrize(
    "key",
    sampled(
        [key for key, (_, case) in CASES.items() if case.is_fault and case.right[0].startswith(FOUND_WITHOUT_A_RUN)], 16
    ),
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
    assert judge(item, 2.0).word == word
    assert judge(item, 2.0).loss == pytest.approx(0.5)
