"""Targets with their own cache give the same texts and traces through captured forwards.

On the CPU a recorded forward runs again on its buffers. So everything but the capture is tested there.
"""

from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.graphs import cache_graphs
from dflash_runtime.device.graphs.cache_graphs import CacheGraphs
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.graphs import rerunning
from dflash_testing.handoffs import traces
from dflash_testing.hosted_models import BODY, OWN_CACHE, KnowingDraft, Known, host_own_cache, make_model, plain_text
from dflash_testing.pairs import random_draft, random_llm, random_prompts

DEFAULT = ("mamba", "bamba")
"""States that are read token by token, and states beside keys and values that are read at once."""

KINDS = [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in OWN_CACHE]
NUM_DRAFTS = 7
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
SIZES = support.Shape(hidden=BODY["hidden_size"], vocab=BODY["vocab_size"], draft_vocab=97, mask=96)
LENGTHS, RIGHT = (5, 17, 33), (3, 1, 7)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[CacheGraphs]:
    """Let engines on the CPU record forwards when first needed -> the graphs of all engines."""
    found: list[CacheGraphs] = []

    def make(pair: LoadedPair, target: Any) -> CacheGraphs | None:
        if target.uncaptured is None:
            found.append(CacheGraphs(target, pair.placement.device, pair.limits.max_num_requests, rerunning))
        return found[-1] if target.uncaptured is None else None

    monkeypatch.setattr(LoadedPair, "cache_graphs", make)
    monkeypatch.setattr(cache_graphs, "LEAST_USES", 1)
    monkeypatch.setattr(cache_graphs, "LEAST_USES_BESIDE", 3)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_texts_equal_transformers_text(kind: str, captured: list[CacheGraphs], tmp_path: Path) -> None:
    model, target = make_model(tmp_path, kind), host_own_cache(tmp_path)
    given = random_prompts(LENGTHS, target.config.vocab_size)
    texts = [plain_text(model, prompt, 24 + NUM_DRAFTS + 1) for prompt in given]
    known = [Known([*prompt, *text], right) for prompt, text, right in zip(given, texts, RIGHT, strict=True)]
    draft = KnowingDraft(random_draft(target, rope=RopeConfig(theta=10_000.0)), known)
    llm = random_llm(target, draft, NUM_DRAFTS, max_num_requests=4)
    outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [text[:24] for text in texts]
    assert max(length for output in outputs for length in output.acceptance_lengths) == NUM_DRAFTS + 1
    if target.uncaptured is None:
        (graphs,) = captured
        assert graphs.problem is None
        assert {shape.num_texts for shape in graphs.shapes} >= {4}


def start(folder: Path, **settings: Any) -> LLM:
    """An engine on a GPU."""
    given: dict[str, Any] = {"device": "cuda", "num_pages": 200, "max_num_requests": 4, "dtype": "float32"}
    config = EngineConfig(**given | settings, target_runtime="transformers-cache")
    return LLM(open_target(folder / "target"), open_draft(folder / "draft"), config)


def graphs_of(llm: LLM) -> CacheGraphs:
    texts = llm.engine.runner.texts
    assert texts is not None
    assert texts.graphs is not None, getattr(llm.pair.target, "uncaptured", None)
    return texts.graphs


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mamba", "mamba2", "rwkv", "bamba", "zamba2", "olmo_hybrid", "diffllama"])
def test_graphs_change_nothing(kind: str, tmp_path: Path) -> None:
    """Graphs have the texts and traces of an engine without graphs, and transformers' texts."""
    model = make_model(tmp_path / "target", kind)
    support.make_native(tmp_path / "draft", SIZES)
    given = random_prompts(LENGTHS, BODY["vocab_size"])
    with start(tmp_path) as captured, start(tmp_path, graphs=False) as plain:
        wanted = traces(plain.generate(given, PARAMS))
        for _ in range(2):  # the first run captures the graphs
            assert traces(captured.generate(given, PARAMS)) == wanted
        assert graphs_of(captured).problem is None
        assert graphs_of(captured).shapes
        texts = [list(output.token_ids) for output in captured.generate(given, PARAMS)]
    assert texts == [plain_text(model, prompt, 24) for prompt in given]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["jamba", "granitemoehybrid", "nemotron_h", "minimax", "deepseek_v32"])
def test_forwards_with_experts_are_captured_in_16_bits(kind: str, tmp_path: Path) -> None:
    """Every replay is compared with its forward when it is captured."""
    make_model(tmp_path / "target", kind)
    support.make_native(tmp_path / "draft", SIZES)
    with start(tmp_path, dtype="bfloat16") as llm:
        outputs = llm.generate(random_prompts(LENGTHS, BODY["vocab_size"]), PARAMS)
        assert all(output.error is None for output in outputs)
        assert graphs_of(llm).problem is None
        assert graphs_of(llm).shapes
