"""Ranks as processes: started by the LLM or the command, ended with it, and an error in one of them ends all."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.commands.eval_acceptance import EvaluationRequest, evaluate
from dflash_cli.commands.generate import GenerationRequest
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import DFlashError, PeerUnreachable, UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.rank_messages import RankFailure, Run, Stop, from_line, to_line
from dflash_runtime.rank_processes import RankProcesses
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.hosted_models import make_model
from dflash_testing.refusals import refuses

CONFIG = EngineConfig(device="cpu", dtype="float64", max_num_requests=2, seed=7)
SPLIT = replace(CONFIG, tensor_parallel_size=2)
PROMPTS = ["def f(x):", "class A", "import os\n\ndef g("]
PARAMS = [SamplingParams(max_new_tokens=count, temperature=heat) for count, heat in ((14, 0.0), (10, 0.8), (18, 0.0))]


def open_llm(config: EngineConfig) -> LLM:
    folder = tiny_directory()
    return LLM(open_target(folder / "target"), open_draft(folder / "draft"), config)


def others_of(llm: LLM) -> RankProcesses:
    assert llm._others is not None
    return llm._others


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def split() -> Iterator[LLM]:
    with open_llm(SPLIT) as llm:
        yield llm


def test_a_call_gives_what_one_process_gives(split: LLM) -> None:
    """Greedy and sampled requests with seeds from the engine's seed, and the comparison with plain decoding."""
    with open_llm(CONFIG) as alone:
        expected = alone.generate(PROMPTS, PARAMS)
    found = split.generate(PROMPTS, PARAMS)
    assert [item.token_ids for item in found] == [item.token_ids for item in expected]
    assert [item.drafts for item in found] == [item.drafts for item in expected]
    lossless = split.check_lossless([found[0], found[2]])
    assert lossless.is_lossless
    assert lossless.num_tokens == len(found[0].token_ids) + len(found[2].token_ids)


def test_a_stream_can_be_closed_before_its_end(split: LLM) -> None:
    """Ranks agree on the last step. The next call gives the usual text."""
    for num_read in (1, 3):
        stream = split.stream(PROMPTS, SamplingParams(max_new_tokens=60, ignore_eos=True))
        for _ in range(num_read):
            next(stream)
        stream.close()
        assert not split.engine.scheduler.has_work
    with open_llm(CONFIG) as alone:
        params = SamplingParams(max_new_tokens=9)
        assert split.generate(PROMPTS, params)[0].token_ids == alone.generate(PROMPTS, params)[0].token_ids


def test_a_refused_prompt_is_refused_alone(split: LLM) -> None:
    found = split.generate([[5, 6], [10**6]], SamplingParams(max_new_tokens=4))
    assert [item.error is None for item in found] == [True, False]


def test_handoffs_are_refused(split: LLM) -> None:
    plan = HandoffPlan(connector=None, keys=("a",), is_sending=True)  # type: ignore[arg-type]
    with refuses(UnsupportedError, "handoffs-on-ranks"):
        split.generate([[5]], handoffs=plan)


def test_the_end_of_a_rank_ends_the_call() -> None:
    llm = open_llm(SPLIT)
    (pid,) = others_of(llm).pids
    stream = llm.stream(PROMPTS, SamplingParams(max_new_tokens=200, ignore_eos=True))
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with refuses(PeerUnreachable, "ranks-ended"):
        for _ in stream:
            pass
    assert not is_running(pid)
    watch = others_of(llm)._watch
    assert watch is not None
    watch.join(5)
    assert watch.finished.is_set(), "nothing ends this process later"
    with refuses(PeerUnreachable, "ranks-ended"):
        llm.generate(PROMPTS)


def test_an_error_in_a_rank_ends_the_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 1 cannot allocate its pages: its own error arrives here, and no process is left."""
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        "import dflash_runtime.device.storage.kv as kv\n"
        "def fail(*given): raise MemoryError('no pages')\n"
        "kv._zeros = fail\n"
    )  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    started: list[RankProcesses] = []
    begin = RankProcesses.__init__

    def note(self: RankProcesses, *given: Any) -> None:
        started.append(self)
        begin(self, *given)

    monkeypatch.setattr(RankProcesses, "__init__", note)
    with pytest.raises(DFlashError) as caught:
        open_llm(SPLIT).generate(PROMPTS)
    assert (caught.value.id, caught.value.exit_code) == ("out-of-memory", 6)
    assert caught.value.message.startswith("rank 1")
    assert not is_running(started[0].pids[0])


def test_closing_ends_the_processes() -> None:
    llm = open_llm(SPLIT)
    (pid,) = others_of(llm).pids
    llm.close()
    assert not is_running(pid)
    with refuses(DFlashError, "llm-closed"):
        llm.generate(PROMPTS)


def test_a_hosted_target_is_refused_before_processes_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path, "granite")
    monkeypatch.setattr(subprocess, "Popen", None)
    with refuses(UnsupportedError, "hosted-target-on-ranks", field="tensor_parallel_size", found=2):
        LLM(open_target(tmp_path), None, SPLIT)


@pytest.mark.parametrize(
    "other", [{"target_runtime": "transformers"}, {"target_runtime": "transformers-cache"}, {"device_map": "auto"}]
)
def test_options_that_ask_for_transformers_are_refused_by_name(other: dict[str, Any]) -> None:
    with refuses(UsageError, "ranks-of-transformers", field="tensor_parallel_size", found=2) as refused:
        replace(SPLIT, **other)
    (name,) = other
    assert f"--{name.replace('_', '-')}" in str(refused.value.hint)


def test_a_prefix_store_is_refused(tmp_path: Path) -> None:
    with refuses(UsageError, "prefix-store-on-ranks"):
        open_llm(replace(SPLIT, prefix_store=str(tmp_path)))


def test_a_pair_is_loaded_by_as_many_ranks_as_its_config_says() -> None:
    """`load_pair` starts no process: only an LLM, which is given the sources of a pair, does."""
    with refuses(UsageError, "ranks-not-joined", field="tensor_parallel_size", found=2):
        load_pair(open_target(tiny_directory() / "target"), None, SPLIT)


@pytest.mark.parametrize(
    "message", [Run(()), Stop(3, 41), RankFailure("no memory", "hint", 6, "out-of-memory")], ids=str
)
def test_a_message_survives_its_line(message: Run | Stop | RankFailure) -> None:
    line = to_line(message)
    assert line.endswith("\n")
    assert from_line(line) == message
    assert json.loads(line)["kind"] == type(message).__name__


def test_options_of_several_gpus_exclude_others() -> None:
    """Hand-offs, workers, two engines, and a replayed dump."""
    with refuses(UsageError, "options-exclude-each-other", field="--tensor-parallel"):
        GenerationRequest(tensor_parallel=2, handoff_out="folder").check()
    for changes in ({"workers": "2"}, {"disaggregated": True}, {"mode": "replay", "dump": Path("dump")}):
        with refuses(UsageError, "options-exclude-each-other", field="--tensor-parallel"):
            EvaluationRequest(draft="tiny", tensor_parallel=2, **changes).check()


@pytest.mark.slow
def test_acceptance_is_measured_on_several_ranks() -> None:
    """Two prompts of the bundled pair in float64: the same acceptance length as in one process."""
    lengths = []
    for size in (1, 2):
        found = evaluate(
            draft="tiny", num_prompts=2, max_new_tokens=24, device="cpu", dtype="float64", tensor_parallel=size
        )  # fmt: skip
        lengths.append(found.total.counts.acceptance_len)
    assert lengths[0] == lengths[1]


def test_ctrl_c_ends_the_command_and_its_processes() -> None:
    """The command is interrupted in the middle of an endless answer."""
    command = [sys.executable, "-m", "dflash_cli", "generate", "def f(x):", "-n", "1900", "--ignore-eos"]
    options = ["--device", "cpu", "--tensor-parallel", "2"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "the answer begins"
        children = _children(process.pid)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"Traceback" not in said
    assert children
    assert not any(map(is_running, children))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_wait_for_a_rank_that_hangs() -> None:
    command = [sys.executable, "-m", "dflash_cli", "generate", "def f(x):", "-n", "1900", "--ignore-eos"]
    options = ["--device", "cpu", "--tensor-parallel", "2"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "the answer begins"
        (child,) = _children(process.pid)
        os.kill(child, signal.SIGSTOP)
        time.sleep(1)  # the step in flight now waits for the rank
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert b"Traceback" not in said
    assert not is_running(child)


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(item) for item in listed.read_text().split()] if listed.exists() else []
