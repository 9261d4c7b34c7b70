"""Several workers give the results of one process, even if workers are lost. Here they share a process."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.measure import EvaluationPlan, measure
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.answers import Event, fail_row
from dflash_cli.generation.loaded_pair import PairSession, open_session
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.generation.prompts import PromptRow, gather_rows
from dflash_cli.generation.run_facts import EvaluationRun, Workers
from dflash_cli.workers import prompt_worker
from dflash_cli.workers.crew import Crew, WorkersLost
from dflash_cli.workers.messages import WorkerSpec
from dflash_runtime.documents import to_json
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError, CheckpointError, DFlashError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.own_cluster import OwnCluster
from dflash_testing.refusals import refuses

CONFIG = EngineConfig(max_num_requests=3, num_pages=200)
SPEC = WorkerSpec(draft="tiny", target="tiny", config=CONFIG)
GREEDY = SamplingParams(max_new_tokens=6, seed=0)
SAMPLED = SamplingParams(max_new_tokens=6, seed=5, temperature=0.8)
TURNS = PromptRow(index=20, kind="turns", value=["def f(x):", "def g(x):"], category="turns", where="turns:1")
Losses = Callable[[int, Iterable[int]], bool]
Alone = dict[SamplingParams, dict[str, Any]]


@pytest.fixture(scope="module")
def session() -> PairSession:
    return open_session(None, None, CONFIG)


@pytest.fixture(scope="module")
def alone(session: PairSession) -> Alone:
    """The figures that one process measures."""
    return {params: figures(measure(session, request(params))) for params in (GREEDY, SAMPLED)}


@pytest.fixture(autouse=True)
def shared_weights(session: PairSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers without loading, that send each row by itself."""
    monkeypatch.setattr(prompt_worker, "open_session", lambda *_, **__: replace(session, llm=LLM(session.llm.pair)))
    monkeypatch.setattr(prompt_worker, "PIECE_S", 0.0)


def rows() -> list[PromptRow]:
    return [*gather_rows([], str(tiny_directory() / "prompts.jsonl"))[:11], TURNS]


def request(params: SamplingParams = GREEDY, **given: Any) -> EvaluationPlan:
    source = PromptSource(name="given", num_available=12)
    return EvaluationPlan(rows=rows(), params=params, source=source, num_resamples=50, **given)


def crew_of(session: PairSession, cluster: OwnCluster, size: int = 2) -> Crew:
    return Crew(session, cluster, SPEC, CONFIG, size)


def figures(evaluation: Evaluation) -> dict[str, Any]:
    """A document without dates, durations and the names of machines."""
    document = to_json(evaluation)
    measured = {key: value for key, value in document["measured"].items() if key not in ("date", "workers", "engine")}
    return {**document, "measured": measured, "seconds": None}


def workers_of(evaluation: Evaluation) -> Workers:
    assert isinstance(evaluation.measured, EvaluationRun)
    assert evaluation.measured.workers is not None
    return evaluation.measured.workers


def once_with(index: int) -> Losses:
    """A rule that loses the first worker with this unanswered row."""
    lost: list[int] = []

    def is_lost(worker: int, left: Iterable[int]) -> bool:
        if lost or index not in left:
            return False
        lost.append(worker)
        return True

    return is_lost


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_results_equal_the_results_of_one_process(session: PairSession, alone: Alone, params: SamplingParams) -> None:
    cluster = OwnCluster()
    together = measure(crew_of(session, cluster, size=3), request(params))
    assert figures(together) == alone[params]
    assert sorted(index for batch in cluster.batches for index in batch) == [row.index for row in rows()]
    workers = workers_of(together)
    assert (workers.num_workers, workers.num_lost) == (3, 0)
    assert [item.num_prompts > 0 for item in workers.engines] == [True] * 3
    assert sum(item.num_prompts for item in workers.engines) == 12


def test_prompts_of_a_lost_worker_are_asked_again(
    session: PairSession, alone: Alone, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversations are asked again from their first turn. No row is answered twice, in the journal either."""
    cluster = OwnCluster(once_with(TURNS.index))
    journal = tmp_path / "rows.jsonl"
    together = measure(crew_of(session, cluster), request(journal=journal))
    assert figures(together) == alone[GREEDY]
    assert workers_of(together).num_lost == 1
    assert sum(item.num_prompts for item in workers_of(together).engines) == 12
    assert len(journal.read_text().splitlines()) == 1 + 12 + 1
    assert [TURNS.index] in cluster.batches, "it may be to blame, so it is asked alone"
    assert "on " in capsys.readouterr().err


def test_a_prompt_that_ends_two_workers_fails_alone(session: PairSession) -> None:
    cluster = OwnCluster(lambda worker, left: 4 in left)
    found = measure(crew_of(session, cluster), request())
    (failure,) = found.failed
    assert failure.index == 4
    assert failure.error.endswith("its process has ended")
    assert failure.exit_code == CapacityError.exit_code
    assert cluster.num_hired == 2 + 2
    assert found.total.num_conversations == 11


def test_without_workers_the_run_ends_and_can_be_resumed(session: PairSession, alone: Alone, tmp_path: Path) -> None:
    """The number of replacements is limited. Answers are kept, and a resumed run gives the same figures."""
    journal = tmp_path / "rows.jsonl"
    answered: list[int] = []

    def is_lost(worker: int, left: Iterable[int]) -> bool:
        answered.append(worker)
        return len(answered) > 8

    cluster = OwnCluster(is_lost)
    with refuses(WorkersLost, found=8) as caught:
        measure(crew_of(session, cluster), request(journal=journal))
    assert "worker 8" in caught.value.message
    assert cluster.num_hired == 2 + 3 * 2
    num_kept = len(journal.read_text().splitlines()) - 1
    assert 0 < num_kept < 12
    resumed = measure(session, request(journal=journal, resume=True))
    assert figures(resumed) == alone[GREEDY]


def test_a_device_that_fails_is_not_the_prompts_fault(
    session: PairSession, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine ends all requests with an error, and another worker answers them."""
    answer = PairSession.answer
    failed: list[PromptRow] = []

    def fail_once(self: PairSession, rows: Sequence[PromptRow], *given: Any, **named: Any) -> Iterator[Event]:
        if failed:
            yield from answer(self, rows, *given, **named)
            return
        failed.append(rows[1])
        yield from answer(self, rows[:1], *given, **named)
        self.llm.engine.failure = DFlashError("this LLM is closed: CUDA error")
        for row in rows[1:]:
            yield from fail_row(row, "CUDA error", 1)

    cluster = OwnCluster()
    with monkeypatch.context() as patched:
        patched.setattr(PairSession, "answer", fail_once)
        found = measure(crew_of(session, cluster), request())
    assert not found.failed
    assert workers_of(found).num_lost == 1
    assert [failed[0].index] in cluster.batches
    assert figures(found) == alone[GREEDY]


def settings_with(session: PairSession, **other: Any) -> Callable[..., dict[str, Any]]:
    real = PairSession.run_settings
    return lambda self, params, *, chat: {**real(self, params, chat=chat), **other}


def test_a_worker_with_other_weights_is_refused(session: PairSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PairSession, "run_settings", settings_with(session, draft_digest="0123456789abcdef"))
    with refuses(CheckpointError, "worker-has-other-files", field="draft", found="0123456789abcdef"):
        crew_of(session, OwnCluster())


def test_workers_of_two_kinds_are_refused(session: PairSession, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = iter(["NVIDIA H200", "NVIDIA A100"])
    real = PairSession.run_settings
    monkeypatch.setattr(
        PairSession,
        "run_settings",
        lambda self, params, *, chat: {**real(self, params, chat=chat), "device_name": next(devices)},
    )
    expected = {"field": "device_name", "found": "NVIDIA A100", "expected": "'NVIDIA H200'"}
    with refuses(UsageError, "worker-has-other-settings", **expected):
        crew_of(session, OwnCluster())


def test_a_pair_that_no_worker_can_load_is_refused_as_in_one_process(
    session: PairSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> PairSession:
        raise CapacityError("needs 30 GB, 20 GB are free", hint="take a smaller one")

    monkeypatch.setattr(prompt_worker, "open_session", refuse)
    with refuses(DFlashError, "capacity-error") as caught:
        crew_of(session, OwnCluster())
    assert (caught.value.exit_code, caught.value.hint) == (6, "take a smaller one")


def test_batches_get_smaller_towards_the_end(session: PairSession) -> None:
    cluster = OwnCluster()
    measure(crew_of(session, cluster), request())
    sizes = [len(batch) for batch in cluster.batches]
    assert sizes[0] == 3
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)
