"""Other engines are timed on the same pair and the same prompts, with stand-ins for vLLM and for the GPU."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import load
import step_time
from dflash_testing.benchmarks import run
from timing import pair_files, pairs
from timing.gauges import Gauges, Readings, Span
from timing.shapes import SHAPES

FAKE_VLLM = """
import json
import time
from pathlib import Path
from types import SimpleNamespace as Some

__version__ = "0.0"
SamplingParams = Some
num_drafts = num_steps = 0
now = 0.0
time.perf_counter = lambda: now  # times must not depend on the machine's load


class LLM:
    def __init__(self, **settings):
        self.config = settings.get("speculative_config")
        if self.config:
            block = json.loads(Path(self.config["model"], "config.json").read_text())["block_size"]
            assert len(self.config["synthetic_acceptance_rates"]) == self.config["num_speculative_tokens"] == block - 1
            assert self.config.get("enable_adaptive_verification", True) is True
        print("many words of its own")

    def generate(self, prompts, params, use_tqdm):
        global num_drafts, num_steps, now
        assert all(item.ignore_eos for item in params)
        if len(prompts) == 3:
            raise RuntimeError("three are too many")
        began, answers = now, []
        for place, item in enumerate(params):  # with a draft, the second request takes twice as many steps
            steps = item.max_tokens // 4 * (place + 1) if self.config else item.max_tokens
            num_drafts += steps
            stats = Some(
                arrival_time=time.time(), first_token_latency=0.5, first_token_ts=began,
                last_token_ts=began + 0.002 * steps,
            )
            answers.append(Some(outputs=[Some(token_ids=[0] * item.max_tokens)], metrics=stats))
        now = max(answer.metrics.last_token_ts for answer in answers)
        num_steps += round((now - began) / 0.002)
        return answers

    def get_metrics(self):
        drafts = num_drafts if self.config else 0
        return [
            Some(name="vllm:spec_decode_num_drafts", value=drafts),
            Some(name="vllm:spec_decode_num_accepted_tokens", value=3 * drafts),
            Some(name="vllm:iteration_tokens_total", count=num_steps),
            Some(name="a vector"),
        ]
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> str:
    """A folder with a package that imitates vLLM. A step takes 2 ms and, with a draft, accepts 3 draft tokens.

    Beside it is a torch without devices, which loads at once.
    """
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    (tmp_path / "site" / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)\n")
    (tmp_path / "site" / "vllm" / "__init__.py").write_text(FAKE_VLLM)
    return str(tmp_path / "site")


@pytest.mark.slow
def test_vllm_is_measured_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_vllm: str
) -> None:
    arguments = ("--batches", "1,3,2", "--context", "8", "--steps", "16", "--block", "8")
    arms = "vllm-plain,vllm-dflash,vllm-adaptive"
    more = ("--arms", arms, "--acceptance", "4", "--prefill", "16", "--vllm-path", fake_vllm)
    monkeypatch.setattr(step_time, "Gauges", SteadyGauges)
    code, rows = run(step_time, monkeypatch, tmp_path / "rows.jsonl", *arguments, *more)
    assert code == 1, "one batch size fails"
    assert ["three are too many" in row["error"] for row in rows if row["kind"] == "failure"] == [True] * 3
    steps = [row for row in rows if row["kind"] == "step"]
    assert [(row["arm"], row["batch"]) for row in steps] == [
        ("vllm plain", 1), ("vllm plain", 2), ("vllm dflash", 1), ("vllm dflash", 2), ("vllm adaptive", 1),
        ("vllm adaptive", 2),
    ]  # fmt: skip
    assert [row["acceptance_achieved"] for row in steps] == [None, None, 4, 4, 4, 4]
    for row in steps:
        assert row["ms"] == pytest.approx(2)  # though the last steps have one request of two
        assert (row["vllm"], row["block"], row["power_samples"]) == ("0.0", 8, 3)
        assert row["joules_per_step"] == pytest.approx(1)
        assert row["joules_per_token"] == pytest.approx(500 / row["tokens_per_second"])
    assert [row["arm"] for row in rows if row["kind"] == "prefill"] == ["vllm plain"]


@pytest.mark.parametrize("name", ["small", "small-hybrid"])
def test_a_written_pair_is_the_one_that_our_engine_runs(tmp_path: Path, name: str) -> None:
    shape, device = replace(SHAPES[name], block=8), torch.device("cpu")
    pair_files.write_pair(shape, tmp_path, device)
    read, built = pair_files.read_pair(shape, tmp_path, 64, device), pairs.build_pair(shape, 64, device)
    given = {"eos_token_ids", "dtype", "rope", "layer_kinds"}
    for found, own in zip((read.pair.target, read.pair.draft), (built.pair.target, built.pair.draft), strict=True):
        assert found is not None
        assert own is not None
        shared = {name: getattr(own.config, name) for name in given if hasattr(own.config, name)}
        assert found.config.rope.theta == own.config.rope.theta
        assert replace(found.config, **shared) == own.config
    assert read.pair.limits.num_draft_tokens == built.pair.limits.num_draft_tokens == 7
    weights = ((read.target_weights(), built.target_weights()), (read.draft_weights, built.draft_weights))
    for stored, drawn in weights:
        assert stored.keys() == drawn.keys()
        assert all(torch.equal(stored[name], drawn[name]) for name in drawn)
    with pytest.raises(FileExistsError):
        pair_files.write_pair(replace(shape, layers=8), tmp_path, device)


class SteadyGauges(Gauges):
    """A GPU that always takes 500 W."""

    def over(self, spans: Sequence[Span]) -> Readings:
        assert all(begin < end for begin, end in spans)
        return Readings(500.0, 1700.0, len(spans))


def test_both_programs_answer_the_same_load_from_the_same_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_vllm: str
) -> None:
    monkeypatch.setattr(load, "Gauges", SteadyGauges)
    pair_files.write_pair(SHAPES["small"], tmp_path / "pair", torch.device("cpu"))
    monkeypatch.setattr(pairs, "drawn_weights", None)  # neither program may draw weights again
    monkeypatch.setattr(pair_files, "drawn_weights", None)
    arguments = ("--requests", "5", "--max-prompt", "70", "--max-answer", "40", "--pair", str(tmp_path / "pair"))
    arms = ("--arms", "dflash,vllm-dflash,vllm-adaptive", "--vllm-path", fake_vllm, "--acceptance", "4")
    code, rows = run(load, monkeypatch, tmp_path / "rows.jsonl", *arguments, *arms)
    assert code == 0
    assert [row["arm"] for row in rows] == ["dflash", "vllm-dflash", "vllm-adaptive"]
    for row in rows:
        assert row["files"] == str(tmp_path / "pair")
        assert row["num_tokens"] == sum(load.make_load(SHAPES["small"], 5, 70, 40).output_lengths)
        assert row["acceptance_achieved"] == pytest.approx(4, abs=1)
        assert row["power_samples"] == 1
        assert row["joules_per_token"] == pytest.approx(500 * row["seconds"] / row["num_tokens"])
        assert row["joules_per_step"] == pytest.approx(500 * row["seconds"] / row["num_steps"])
    assert [row.get("acceptance_note") for row in rows] == [None, *["synthetic, by its own mode"] * 2]
    assert rows[1]["first_token_p50_s"] >= 0.5


def test_vllm_that_does_not_start_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('no libcudart')")
    arguments = ("--requests", "2", "--arms", "vllm-plain", "--vllm-path", str(tmp_path))
    code, rows = run(load, monkeypatch, tmp_path / "rows.jsonl", *arguments)
    assert code == 1
    assert rows[0]["error"] == "RuntimeError: vllm: ImportError: no libcudart"
    assert rows[0]["arm"] == "vllm-plain"
    assert rows[0]["error"] in capsys.readouterr().err


@pytest.mark.slow
def test_arms_of_other_engines_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = (
        "--batches",
        "1",
        "--context",
        "24",
        "--steps",
        "5",
        "--arms",
        "transformers,reference,vllm-plain,vllm-dflash",
    )
    code, rows = run(step_time, monkeypatch, tmp_path / "rows.jsonl", *arguments, "--acceptance", "6.5")
    assert code == 0
    assert [row["batch"] for row in rows if row["kind"] == "step"] == [1, 8, 1]
    assert rows[-1]["acceptance_achieved"] == pytest.approx(6.5, abs=1)
