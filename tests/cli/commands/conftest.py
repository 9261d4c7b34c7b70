"""Answers of short runs of `dflash eval-acceptance`."""

import shutil
from pathlib import Path

import pytest

from dflash_testing.eval_runs import ENOUGH, SMALL, run_eval


@pytest.fixture(scope="session")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers of SMALL, and their result beside them."""
    rows = tmp_path_factory.mktemp("answered") / "rows.jsonl"
    rows.with_name("result.json").write_text(run_eval(*SMALL, "--output", rows, "--json").stdout)
    return rows


@pytest.fixture(scope="session")
def enough(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers of ENOUGH, and their result beside them."""
    rows = tmp_path_factory.mktemp("enough") / "rows.jsonl"
    rows.with_name("result.json").write_text(run_eval(*ENOUGH, "--output", rows, "--json").stdout)
    return rows


@pytest.fixture
def rows(answered: Path, tmp_path: Path) -> Path:
    """A copy of the answers of SMALL, which a test may change."""
    return Path(shutil.copy(answered, tmp_path))
