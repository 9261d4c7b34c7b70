"""`dflash eval-acceptance --disaggregated`: a prefill process, compared with one engine on the same prompts."""

import json
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import dflash_cli
from dflash_cli.acceptance.disaggregated import TITLE, Disaggregation, SideBySide
from dflash_cli.acceptance.measure import EvaluationPlan
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.loaded_pair import PairSession
from dflash_cli.handoff import disaggregation, handed_session, prefill_main
from dflash_cli.handoff.handoff_options import DisaggregationOptions
from dflash_cli.handoff.prefill_messages import Loaded, PrefillRequest
from dflash_cli.handoff.prefill_process import PrefillProcess
from dflash_cli.terminal import console
from dflash_cli.workers.messages import WorkerSpec
from dflash_runtime.documents import from_json, to_json
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import DFlashError, GateFailed, HandoffMismatch, PeerUnreachable, UsageError
from dflash_testing.command_line import run_main
from dflash_testing.refusals import refuses

FEW = ["eval-acceptance", "tiny", "--disaggregated", "--num-prompts", "12", "-n", "12", "--num-resamples", "0"]
TURNS = [{"turns": [f"def {name}(", "And a test.", "Shorter."]} for name in ("add", "sort", "read")]


class InThisProcess:
    """The prefill process as a thread, so that no second process has to load torch."""

    pid = 0

    def __init__(self, pair: Any) -> None:
        self.loss: DFlashError | None = None
        self._act: Callable[[DFlashError], None] = lambda loss: None
        self._lines, self._answers = SimpleQueue[Any](), SimpleQueue[Any]()
        self._lines.put(json.loads(json.dumps(to_json(pair))))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            for answer in prefill_main._serve(self._lines):
                self._answers.put(json.loads(json.dumps(to_json(answer))))
        except DFlashError as error:
            self.lose(error)

    def lose(self, error: DFlashError) -> None:
        self.loss = error
        self._answers.put(None)
        self._act(error)

    def say(self, line: Any) -> None:
        if self.loss is None:
            self._lines.put(json.loads(json.dumps(to_json(line))))

    def hear(self, kind: type) -> Any:
        answer = self._answers.get()
        if answer is None:
            assert self.loss is not None
            raise self.loss
        return from_json(kind, answer)

    def when_lost(self, act: Callable[[DFlashError], None]) -> None:
        self._act = act

    def close(self) -> None:
        """Leave the thread waiting for lines."""


@pytest.fixture
def in_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash_cli.handoff.handed_session.PrefillProcess", InThisProcess)


def evaluate(*arguments: object) -> tuple[dict[str, Any], str]:
    """The document of a run, and its text on stderr."""
    done = run_main(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out), done.err


@pytest.mark.parametrize(
    "options",
    [
        ["--connector", "gloo"],
        pytest.param(["--connector", "file", "--temperature", "0.8"], marks=pytest.mark.slow),
        pytest.param(["--draft-sampling", "probabilistic", "--temperature", "0.8"], marks=pytest.mark.slow),
        pytest.param(["--scheduling", "sync", "--no-prefix-cache", "--concurrency", "3"], marks=pytest.mark.slow),
        pytest.param(["--exact-match", "none", "--context-lengths", "128,256"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_two_engines_answer_like_one(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that they are compared with starts with an empty prefix cache."""
    answer = disaggregation._answer_alone

    def answer_alone(session: PairSession, plan: EvaluationPlan) -> list[Answer]:
        assert len(session.llm.engine.scheduler.cache) == 0
        return answer(session, plan)

    monkeypatch.setattr(disaggregation, "_answer_alone", answer_alone)
    rows = tmp_path / "rows.jsonl"
    document, said = evaluate(*FEW, "--num-prompts", "6", *options, "--output", rows)
    found, plain = document["disaggregation"], [item for item in FEW if item != "--disaggregated"]
    connector = [item for item in options if item in ("--connector", "gloo", "file")]
    one, _ = evaluate(*plain, "--num-prompts", "6", *(item for item in options if item not in connector))
    assert (found["holds"], found["fault"], found["problems"]) == (True, None, [])
    num_turns = len(document["conversations"])
    assert found["num_same_texts"] == found["num_same_traces"] == found["num_turns"] == num_turns
    assert (found["num_handed"], found["num_prefilled_here"]) == (num_turns, 0)
    assert {**document, **dict.fromkeys(("settings", "measured", "seconds", "disaggregation"))} == {
        **one, **dict.fromkeys(("settings", "measured", "seconds", "disaggregation"))
    }  # fmt: skip
    assert one["disaggregation"] is None
    loaded = [json.loads(line)["num_loaded"] for line in rows.read_text().splitlines()[1:]]
    assert sum(loaded) == found["num_rows"] > 200
    assert "warning" not in said


@pytest.mark.usefixtures("in_thread")
def test_a_prefill_side_without_the_draft_is_refused_and_by_force_is_found_out() -> None:
    refused = run_main(*FEW, "--prefill-draft", "none")
    assert (refused.code, refused.out, refused.error_id) == (3, "", "prefill-does-not-fit")
    assert refused.error is not None
    (difference,) = refused.error.found  # fields that only a draft has are left out
    assert difference.startswith("draft: ")
    forced = run_main(*FEW, "-n", "24", "--prefill-draft", "none", "--force-mismatch")
    assert (forced.code, forced.error_id) == (3, "handoff-changes-result")
    rows_first = [forced.out.find(text) for text in ("the draft's context KV", difference)]
    assert -1 < rows_first[0] < rows_first[1]
    (row,) = (line for line in forced.out.splitlines() if line.startswith("share at position 1"))
    one, two = map(float, row.split()[4:6])
    assert two < one - 0.1
    assert max(map(len, forced.out.partition(TITLE)[2].partition("\n\n")[0].splitlines())) <= 80


@pytest.mark.usefixtures("in_thread")
def test_a_program_gets_the_same_document() -> None:
    document, _ = evaluate(*FEW, "--num-prompts", "4", "--connector", "gloo")
    found = dflash_cli.evaluate(
        draft="tiny", num_prompts=4, max_new_tokens=12, num_resamples=0, disaggregated=True, connector="gloo"
    )
    assert found.disaggregation is not None
    found.disaggregation.check()
    again = json.loads(console.json_document(found))
    for own in (document, again):
        assert own["disaggregation"]["num_handed"] == 4
        for name in ("date", "argv", "lock_sha256"):
            own["measured"].pop(name, None)
        del own["seconds"]
    assert again == document


@pytest.mark.usefixtures("in_thread")
def test_a_program_is_refused_what_does_not_fit() -> None:
    with refuses(HandoffMismatch, "prefill-does-not-fit", found=["draft: here dflash, there none"]):
        dflash_cli.evaluate(draft="tiny", num_prompts=2, disaggregated=True, prefill_draft="none")
    with refuses(UsageError, field="--connector"):
        dflash_cli.evaluate(draft="tiny", connector="gloo")
    with refuses(UsageError, field="--workers"):
        dflash_cli.evaluate(draft="tiny", disaggregated=True, workers="2")


@pytest.fixture
def lost_before(monkeypatch: pytest.MonkeyPatch, in_thread: None) -> list[int]:
    """Numbers of requests, counted over all runs. The prefill side is lost before it receives one of them."""
    numbers: list[int] = []
    calls = count(1)

    class Mortal(InThisProcess):
        def say(self, line: Any) -> None:
            if isinstance(line, PrefillRequest) and next(calls) in numbers:
                self.lose(PeerUnreachable("the prefill process has ended: signal 9"))
            super().say(line)

    monkeypatch.setattr("dflash_cli.handoff.handed_session.PrefillProcess", Mortal)
    return numbers


def test_turns_of_a_lost_process_are_prefilled_here(lost_before: list[int], tmp_path: Path) -> None:
    """At once, without waiting for the timeout. The text stays right, with one warning and a count in the report."""
    prompts, rows = tmp_path / "turns.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in TURNS))
    asked = ["eval-acceptance", "tiny", "--disaggregated", "-p", prompts, "-n", "4", "--num-resamples", "0"]
    lost_before.append(2)
    document, said = evaluate(*asked, "--output", rows)
    found = document["disaggregation"]
    assert (found["holds"], found["num_handed"], found["num_prefilled_here"]) == (True, 3, 6)
    assert document["seconds"] < 30
    assert found["why_prefilled_here"].endswith("signal 9")
    assert said.count("warning: ") == said.count("warning: 6 prompts ") == 1
    lines = [json.loads(line) for line in rows.read_text().splitlines()[1:]]
    assert sum("num_loaded" in line for line in lines) == 3
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    resumed, _ = evaluate(*asked, "--output", rows, "--resume")
    assert (
        resumed["disaggregation"]["num_turns"] == 5
    )  # three first turns, and two later turns of the conversation that is asked again


@pytest.mark.usefixtures("in_thread")
def test_an_error_of_the_prefill_process_ends_the_run_in_one_line() -> None:
    done = run_main(*FEW, "--prefill-draft", "no/such/draft")
    assert (done.code, done.out) == (4, "")
    assert len(done.err[done.err.index("error: ") :].splitlines()) <= 2, "the error and its hint"
    assert "no/such/draft" in done.err


@pytest.mark.parametrize(
    ("arguments", "error_id", "field"),
    [
        (["--connector", "gloo"], "option-needs-another", "--connector"),
        (["--prefill-draft", "none"], "option-needs-another", "--prefill-draft"),
        (["--force-mismatch"], "option-needs-another", "--force-mismatch"),
        (["--disaggregated", "--workers", "2"], "options-exclude-each-other", "--workers"),
        (["--disaggregated", "--mode", "replay", "--dump", "x"], "options-exclude-each-other", "--disaggregated"),
        (["--disaggregated", "--connector", "smoke"], "usage-error", "--connector"),
    ],
)
def test_options_that_contradict_each_other_are_refused(arguments: list[str], error_id: str, field: str) -> None:
    done = run_main("eval-acceptance", *arguments)
    assert (done.code, done.out, done.error_id, done.field) == (2, "", error_id, field)


@pytest.mark.parametrize(
    ("num_gpus", "config", "expected"),
    [
        (0, {}, ("auto", 0.9, False)),
        (2, {}, ("cuda:1", 0.9, False)),
        (2, {"device": "cuda:1"}, ("cuda:0", 0.9, False)),
        (2, {"device_map": "auto"}, ("auto", 0.45, True)),
        (1, {}, ("auto", 0.45, True)),
        (1, {"device": "cpu"}, ("cpu", 0.9, False)),
    ],
)
def test_the_prefill_process_takes_another_gpu_or_part_of_the_memory(
    num_gpus: int, config: dict[str, Any], expected: tuple[str, float, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    there, shares = handed_session._config_there(
        EngineConfig(**config), DisaggregationOptions(disaggregated=True, prefill_draft="none")
    )
    assert (there.device, there.gpu_memory_utilization, shares) == expected
    assert (there.num_draft_tokens, there.graphs) == (0, False)
    if num_gpus == 1 and not config:
        with refuses(UsageError, field="--connector", found="nccl"):
            handed_session._config_there(EngineConfig(), DisaggregationOptions(disaggregated=True, connector="nccl"))


def found_with(**changes: Any) -> Disaggregation:
    """A comparison of 20 equal answers, with some fields changed."""
    counts = [(30.0, 10)] * 20
    same = SideBySide.compare(counts, counts, confidence=0.95)
    sound: dict[str, Any] = {
        "connector": "file", "prefill_draft": None, "dtype": "bfloat16", "num_turns": 20, "num_same_texts": 20,
        "num_rounded": 0, "num_same_traces": 20, "acceptance_len": same, "position_1": same, "num_handed": 20,
        "num_rows": 99, "num_bytes": 9, "num_prefilled_here": 0,
    }  # fmt: skip
    return Disaggregation(**(sound | changes))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"num_same_traces": 12}, None),
        ({"num_same_traces": 19, "dtype": "float32"}, "1 of 20 "),
        ({"num_same_texts": 18, "num_same_traces": 18, "num_rounded": 2, "dtype": "float32"}, None),
        ({"num_same_texts": 18, "num_rounded": 1}, "1 text of 20 "),
        ({"num_handed": 0, "why_prefilled_here": "gone"}, "gone"),
    ],
)
def test_faults_are_told_from_rounding(changes: dict[str, Any], fault: str | None) -> None:
    found = found_with(**changes)
    assert found.holds == (fault is None)
    if fault is not None:
        assert fault in str(found.fault)
        with pytest.raises(GateFailed):
            found.check()


def test_a_drop_is_an_interval_below_zero() -> None:
    counts = [(30.0 + place % 3, 10) for place in range(20)]
    lower = [(tokens - 4 - place % 2, steps) for place, (tokens, steps) in enumerate(counts)]
    noisy = [(tokens + (8 if place % 2 else -9), steps) for place, (tokens, steps) in enumerate(counts)]
    fallen, noise = (SideBySide.compare(counts, other, confidence=0.95) for other in (lower, noisy))
    few = SideBySide.compare(counts[:8], lower[:8], confidence=0.95)
    assert [item.has_fallen for item in (fallen, noise, few)] == [True, False, False]
    assert "acceptance fell" in (found_with(num_same_traces=0, position_1=fallen).fault or "")
    assert found_with(num_same_traces=0, acceptance_len=noise).fault is None


def test_a_process_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has its last line of stderr. It is raised at every call, and passed to `when_lost`."""
    monkeypatch.setattr("dflash_cli.handoff.prefill_process.MODULE", "no_such_module")
    process = PrefillProcess(WorkerSpec(draft=None, target=None, config=EngineConfig()))
    for _ in range(2):
        with refuses(PeerUnreachable, "prefill-process-ended") as caught:
            process.hear(Loaded)
        assert "no_such_module" in caught.value.message
    losses: list[Exception] = []
    process.when_lost(losses.append)
    process.close()
    assert losses == [process.loss]
