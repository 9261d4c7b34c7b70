"""A session prepares its device before it answers, with a bar on a terminal."""

import pytest

from dflash_cli.generation.loaded_pair import PairSession, open_session
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.graphs import with_stand_ins

GREEDY = SamplingParams()


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> PairSession:
    session = open_session(None, None, EngineConfig(max_num_requests=3, num_pages=40, max_batched_tokens=8))
    monkeypatch.setattr(LoadedPair, "has_graphs", True)
    return session


def test_a_bar_counts_on_a_terminal(
    session: PairSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("TERM", "xterm")
    graphs = with_stand_ins(session.llm)
    session.warm_up(GREEDY, num_prompts=2)
    assert [bucket for bucket, _ in graphs.captured] == [2, 1]
    captured = capsys.readouterr()
    assert "preparing" in captured.err
    assert "of 9 steps" in captured.err
    assert not captured.out


def test_a_log_gets_only_the_warning(session: PairSession, capsys: pytest.CaptureFixture[str]) -> None:
    graphs = with_stand_ins(session.llm)
    graphs.refused = {3}
    session.warm_up(GREEDY, num_prompts=100)
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: decode steps of 3 requests run slower")
    assert captured.err.count("\n") == 1
    assert not captured.out
