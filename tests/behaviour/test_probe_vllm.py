"""The script that compares vLLM's server with our engine: its widened pair, and a run against a fake server."""

import json
import sys
from pathlib import Path

import pytest

import probe_vllm
from dflash_testing.fake_engines import FakeEngine, texts_of_rows
from dflash_testing.inference_servers import serving


def test_a_widened_pair_gives_the_same_answers_and_is_compared_with_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--num-prompts", "2", "--max-new-tokens", "8", "--device", "cpu"]
    given = probe_vllm.make_parser().parse_args([*few, "--head-dim", "0"])
    plain = probe_vllm.make_pair(given, tmp_path)
    prompts = probe_vllm.choose_prompts(plain, 2)
    probe_vllm.own_rows(given, plain, prompts, tmp_path / "own.jsonl")
    wide = probe_vllm.make_pair(probe_vllm.make_parser().parse_args(few), tmp_path)
    assert json.loads((wide.draft / "config.json").read_text())["head_dim"] == 128
    pair = ["--target", str(wide.target), "--draft", str(wide.draft)]
    with serving(FakeEngine(release="0.24.0", texts=texts_of_rows(tmp_path / "own.jsonl"))) as engine:
        monkeypatch.setattr(
            sys, "argv", ["probe_vllm", *few, *pair, "--url", engine.url, "--out", str(tmp_path / "out")]
        )
        assert probe_vllm.main() == 0
    found = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert [item["num_same"] for item in found["equalities"]] == [2, 2]
    ours, one, eight = (line.split()[-2:] for line in capsys.readouterr().out.splitlines()[-3:])
    assert ours == one == eight


def test_a_server_that_does_not_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--num-prompts", "1", "--max-new-tokens", "2", "--device", "cpu", "--head-dim", "0"]
    monkeypatch.setattr(sys, "argv", ["probe_vllm", *few, "--out", str(tmp_path), "--vllm-path", str(tmp_path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert probe_vllm.main() == 1
    captured = capsys.readouterr()
    assert "failed: the server ended with 1: ModuleNotFoundError: No module named 'vllm'" in captured.err + captured.out
