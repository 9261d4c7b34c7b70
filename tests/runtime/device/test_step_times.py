"""Step times: the replayed steps, the cache file, and damaged cache files."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dflash_runtime.device import step_times
from dflash_runtime.device.graphs.decode_graphs import StepMode
from dflash_runtime.device.runner import Runner
from dflash_runtime.device.step_times import find_step_times, measured_batches
from dflash_testing.pairs import random_draft, random_llm, random_target

K = 3


class Replays:
    """Graphs that record their replays. A step takes 1 ms per row, and 4 ms per drafting request."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def replay(self, rows: list[int], mode: StepMode) -> float:
        assert set(rows) == {6}, "rows of requests"
        self.seen.append((len(rows), mode.verify_width))
        return len(rows) * (mode.verify_width + 4.0 * (mode.verify_width > 1))


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """A runner on the CPU with fake graphs, a fake clock and its own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(step_times, "_milliseconds", clock)
    return fresh_runner()


def fresh_runner(**changes: Any) -> Runner:
    target = random_target()
    found = random_llm(target, random_draft(target), K, max_num_requests=6, **changes).engine.runner
    found.graphs = Replays()  # type: ignore[assignment]
    return found


def clock(device: torch.device, run: Callable[[], Any]) -> float:
    found = run()
    return 1.0 if isinstance(found, torch.Tensor) else float(found)


def replays(runner: Runner) -> list[tuple[int, int]]:
    assert isinstance(runner.graphs, Replays)
    return runner.graphs.seen


def cache_file(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "dflash" / "step_times").iterdir()
    return found


def test_a_few_batches_are_measured_and_every_bucket_gets_times(runner: Runner) -> None:
    seen: list[tuple[int, int]] = []
    times = find_step_times(runner, lambda done, total: seen.append((done, total)))
    assert sorted(replays(runner)) == [(batch, width) for batch in (1, 2, 4, 6) for width in (1, 2, 3, 4)]
    assert seen == [(done, 16) for done in range(1, 17)]
    assert times.row(5) == pytest.approx({width: 5 * (width + 4 * (width > 1)) for width in (1, 2, 3, 4)})
    assert measured_batches(16) == (1, 2, 4, 8, 16)
    assert measured_batches(1) == (1,)
    assert measured_batches(40) == (1, 2, 4, 8, 16, 32, 40)


def test_no_step_is_longer_than_a_wider_one(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = {(6, 2): 500.0}

    def measure(device: torch.device, run: Callable[[], Any]) -> float:
        found = clock(device, run)
        return disturbed.get(replays(runner)[-1], found)

    monkeypatch.setattr(step_times, "_milliseconds", measure)
    assert find_step_times(runner).row(6)[2] == 6 * 7.0


def test_times_are_measured_once(runner: Runner, tmp_path: Path) -> None:
    wanted = find_step_times(runner)
    again = fresh_runner()
    assert find_step_times(again) == wanted
    assert replays(again) == []
    assert cache_file(tmp_path).suffix == ".json"


def test_another_engine_has_its_own_times(runner: Runner, tmp_path: Path) -> None:
    find_step_times(runner)
    for changes in ({"draft_sampling": "probabilistic"}, {"page_size": 8}, {"max_model_len": 200}):
        other = fresh_runner(**changes)
        find_step_times(other)
        assert len(replays(other)) == 16, changes
    assert len(list((tmp_path / "dflash" / "step_times").iterdir())) == 4


def damage(document: Any, kind: str) -> str:
    """The text of a damaged or foreign cache file."""
    texts = {"empty": "", "text": "not json", "list": "[]", "half": json.dumps(document)[:100]}
    if kind in texts:
        return texts[kind]
    if kind == "foreign":
        document["key"]["gpu"] = "another"
    elif kind == "missing batch":
        del document["ms"]["4"]
    elif kind == "missing width":
        del document["ms"]["4"]["2"]
    elif kind == "one too many":
        document["ms"]["5"] = document["ms"]["4"]
    else:
        document["ms"]["4"]["2"] = {"negative": -1.0, "word": "1", "true": True, "null": None, "zero": 0}[kind]
    return json.dumps(document)


@pytest.mark.parametrize(
    "kind",
    ["empty", "text", "list", "half", "foreign", "missing batch", "missing width", "one too many", "negative", "word",
     "true", "null", "zero"],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_named_once_and_replaced(
    runner: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    wanted = find_step_times(runner)
    path = cache_file(tmp_path)
    whole = path.read_text()
    path.write_text(damage(json.loads(whole), kind))
    again = fresh_runner()
    with caplog.at_level(logging.WARNING):
        assert find_step_times(again) == wanted
    assert len(replays(again)) == 16
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [str(path) in record.message for record in said] == [True]
    assert path.read_text() == whole
    assert cache_file(tmp_path) == path  # and no temporary file beside it


def test_a_file_that_is_not_text_is_replaced(runner: Runner, tmp_path: Path) -> None:
    find_step_times(runner)
    cache_file(tmp_path).write_bytes(b"\xff\xfe\x00")
    assert find_step_times(fresh_runner()).row(1)[1] == 1.0


def test_a_cache_that_cannot_be_written_is_logged_once(
    runner: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "dflash").write_text("a file where a folder should be")
    with caplog.at_level(logging.WARNING):
        assert find_step_times(runner).row(1)[1] == 1.0
    assert [record.name for record in caplog.records] == [step_times.logger.name]
    assert str(tmp_path / "dflash") in caplog.records[0].message


def test_context_adds_the_time_to_read_its_kv(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_step_times(runner).context_ms == 0  # too little KV to measure
    monkeypatch.setattr(step_times, "MIN_READ_BYTES", 1)
    other = fresh_runner(page_size=8)
    times = find_step_times(other)
    num_bytes = other.target_kv.pages.nbytes
    assert times.context_ms == pytest.approx(2 * 4 * 2 * 8 * 4 / num_bytes)  # four layers, the draft has two
    assert times.draft_context_ms == pytest.approx(times.context_ms / 2)
    windowed = SimpleNamespace(**{name: getattr(other.target.config, name) for name in ("kv_layers", "kv_shapes")})
    windowed.windows = (None, 16, 16, 16)
    whole = step_times._context_bytes(other.target.config, other)
    assert step_times._context_bytes(windowed, other) == whole / 4  # type: ignore[arg-type]


def test_the_default_cache_is_in_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert step_times.cache_directory() == tmp_path / ".cache" / "dflash" / "step_times"
