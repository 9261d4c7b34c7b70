"""Step times: reading files, refusing malformed files, and reading back written times."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.references import TINY
from dflash_cli.generation.loaded_pair import open_session
from dflash_cli.terminal import documentation
from dflash_cli.tuning.candidates import Candidate, candidates_for
from dflash_cli.tuning.speed import smallest, speed_request
from dflash_cli.tuning.step_costs import check_complete, read_step_costs
from dflash_cli.tuning.step_timing import measure_step_costs, num_timed_rounds
from dflash_runtime.documents import to_json
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import MISSING, CheckpointNotFound, RequestError, UsageError
from dflash_testing.dumps import rows_of
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses


def written(path: Path, document: Any) -> Path:
    file = path / "times.json"
    file.write_text(json.dumps(document))
    return file


TIMES = {"plain": {"1": 5.0, "8": [5.0, 6.0]}, "resized": {"3": {"1": 6.0}, "7": {"1": 8, "8": [9.0, 10.0]}}}


def test_times_are_numbers_or_lists_of_numbers(tmp_path: Path) -> None:
    costs = read_step_costs(written(tmp_path, TIMES | {"narrowed": {"3": {"1": 7.5}}, "source": "vLLM 0.33"}), 7)
    assert (costs.batches, costs.source) == ([1, 8], "vLLM 0.33")
    assert costs.plain == {1: (5.0,), 8: (5.0, 6.0)}
    assert costs.of(Candidate(7, "whole"), 8) == (9.0, 10.0)
    assert costs.of(Candidate(3, "narrowed"), 1) == (7.5,)
    assert costs.of(Candidate(3, "resized"), 8) is None


def test_written_times_are_read_again(tmp_path: Path) -> None:
    """From a file of step times, and from the document of `dflash tune --json`."""
    costs = read_step_costs(written(tmp_path, {**TIMES, "trees": {"16": {"1": 9.5}}}), 7)
    assert costs.of(Candidate(7, "tree", 16), 1) == (9.5,)
    for document in (to_json(costs.times), {"kind": "tune", "step_times": to_json(costs.times)}):
        assert read_step_costs(written(tmp_path, document), 7) == costs


@pytest.mark.parametrize(
    ("document", "id", "field"),
    [
        ([1], None, None),
        ({"plane": {}}, "unknown-key", "plane"),
        ({"resized": TIMES["resized"]}, "missing-key", "plain"),
        ({"plain": {"1": 5}}, "no-step-times", "resized"),
        ({**TIMES, "plain": {"1": "5 ms"}}, "wrong-value", "plain.1"),
        ({**TIMES, "plain": {"1": []}}, "missing-step-time", "plain.1"),
        ({**TIMES, "plain": {"1": 0}}, "wrong-value", "plain.1"),
        ({**TIMES, "plain": {"1": 1e6}}, "wrong-value", "plain.1"),
        ({**TIMES, "plain": {"1": [5, True]}}, "wrong-value", "plain.1[1]"),
        ({**TIMES, "resized": {"7": {"x": 5}}}, "unknown-key", "resized.7.x"),
        ({**TIMES, "plain": {"1": 5, "01": 6}}, "unknown-key", "plain.01"),
        ({**TIMES, "plain": {"1" * 5000: 5}}, "unknown-key", "plain." + "1" * 5000),
        ({**TIMES, "resized": {"0": {"1": 5}}}, "key-below-one", "resized.0"),
        ({"kind": "tune"}, "wrong-value", "document"),
    ],
)
def test_another_form_is_refused_with_the_field(
    document: Any, id: str | None, field: str | None, tmp_path: Path
) -> None:
    with refuses(UsageError, id, field=field, path=tmp_path / "times.json"):
        read_step_costs(written(tmp_path, document), 7)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with refuses(CheckpointNotFound, "file-not-found", path=tmp_path / "times.json"):
        read_step_costs(tmp_path / "times.json", 7)


def test_missing_step_times_are_refused(tmp_path: Path) -> None:
    costs = read_step_costs(written(tmp_path, TIMES), 7)
    file = tmp_path / "times.json"  # the times state another source
    check_complete(costs, file, [7], [1, 8])
    with refuses(UsageError, "missing-step-time", path=file, field="plain.4", found=MISSING):
        check_complete(costs, file, [7], [4])
    with refuses(UsageError, "missing-step-time", path=file, field="resized.3.8", found=MISSING):
        check_complete(costs, file, [3, 7], [1, 8])


def test_a_prompt_that_the_model_does_not_take_is_named() -> None:
    session = open_session(TINY, None, smallest(EngineConfig(device="cpu")))
    for prompt, id in (([5] * 4000, "prompt-too-long"), ([99999], "token-id-out-of-range"), ([], "empty-prompt")):
        rows = rows_of([[5, 6, 7], prompt])
        with refuses(RequestError, id) as refused:
            speed_request(session, rows, [2], max_new_tokens=16, num_rounds=1, chat=False)
        assert refused.value.message.startswith(f"{rows[1].where}: ")


def test_a_batch_size_is_measured_once() -> None:
    session = open_session(TINY, None, smallest(EngineConfig(device="cpu")))
    request = speed_request(session, rows_of([[5, 6, 7]]), [4, 1, 4], max_new_tokens=16, num_rounds=1, chat=False)
    assert request.batches == (4, 1)


def test_every_candidate_is_timed_as_often_as_asked() -> None:
    """Each candidate has a positive time for each round and batch size, and each round is reported once."""
    config, seen = EngineConfig(device="cpu"), list[int]()
    session = open_session(TINY, None, smallest(config))
    request = speed_request(session, rows_of([[5, 6, 7], [8, 9]]), [2, 1], max_new_tokens=16, num_rounds=2, chat=False)
    candidates = candidates_for([3], 7)
    costs = measure_step_costs(session.llm.pair, candidates, request, config, seen.append)
    assert seen == list(range(1, num_timed_rounds(candidates, request) + 1))
    assert costs.drafting.keys() == set(candidates)
    for times in (costs.plain, *costs.drafting.values()):
        assert {batch: len(values) for batch, values in times.items()} == {1: 2, 2: 2}
        assert all(value > 0 for values in times.values() for value in values)


def test_the_example_file_of_step_times_is_complete() -> None:
    """The times are from one H200, for a draft with blocks of 16. docs/how-to/tuning.md shows them."""
    costs = read_step_costs(ROOT / "examples" / "step_times" / "qwen3-8b-h200.json", 15)
    check_complete(costs, None, (1, 3, 7, 15), (1, 8, 32))
    assert set(costs.drafting) == set(candidates_for((1, 3, 7), 15))
    shown = re.sub(r" \[[^]]*\]", "", documentation.text("tuning"))
    rows = [line.split() for line in shown.splitlines()]
    assert ["plain", *means(costs.plain)] in rows
    assert ["7", "whole", *means(costs.drafting[Candidate(7, "resized")])] in rows


def means(times: Mapping[int, Sequence[float]]) -> list[str]:
    """Mean milliseconds by batch size, as in the table of `dflash tune`."""
    return [f"{sum(values) / len(values):.2f}" for values in times.values()]
