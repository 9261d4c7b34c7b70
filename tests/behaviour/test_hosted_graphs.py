"""Steps of hosted targets run in CUDA graphs with the results of plain launches, for every family."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.experts import ONE_LAUNCH
from dflash_runtime.models.hosting.hosted import HostedTarget
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.gpu import detecting_syncs
from dflash_testing.graphs import with_stand_ins
from dflash_testing.handoffs import traces
from dflash_testing.hosted_models import BODY, DEFAULT, SERVED, host, make_model, plain_text
from dflash_testing.pairs import random_draft, random_llm, random_prompts

LENGTHS = (1, 2, 15, 17, 31, 48)
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
SIZES = support.Shape(hidden=BODY["hidden_size"], vocab=BODY["vocab_size"], draft_vocab=97, mask=96)

WITH_EXPERTS = tuple(
    kind for kind, keys in SERVED.items()
    if any("experts" in key for key in keys) or kind in ("mixtral", "granitemoe", "granitemoe_swa")
)  # fmt: skip
"""Families with experts. On a GPU their steps are captured in 16-bit numbers only."""


def make_pair(folder: Path, kind: str) -> tuple[Any, Path, Path]:
    """Return a model of transformers, and the directories of the same model and of a random draft."""
    model = make_model(folder / "target", kind)
    return model, folder / "target", support.make_native(folder / "draft", SIZES)


def start(target: Path, draft: Path, **settings: Any) -> LLM:
    given: dict[str, Any] = {"device": "cuda", "num_pages": 200, "max_num_requests": 4, "max_batched_tokens": 24}
    config = EngineConfig(**given | settings, target_runtime="transformers")
    return LLM(open_target(target), open_draft(draft), config)


def without_graphs(target: Path, draft: Path, **settings: Any) -> LLM:
    """An engine that pads as with CUDA graphs, but launches the kernels of decode steps one by one."""
    llm = start(target, draft, **settings)
    graphs = llm.engine.runner.graphs
    assert graphs is not None, getattr(llm.pair.target, "uncaptured", None)
    graphs.capture = lambda bucket, mode: graphs._graphs.update({(bucket, mode): None})  # type: ignore[method-assign]
    return llm


def reason_of(llm: LLM) -> object:
    """The reason why a target is not captured, or None."""
    target = llm.pair.target
    assert isinstance(target, HostedTarget)
    return target.uncaptured


@pytest.mark.parametrize("kind", DEFAULT)
def test_stand_ins_of_graphs_change_nothing(kind: str, tmp_path: Path) -> None:
    """On the CPU, steps in buckets of requests give transformers' text."""
    model = make_model(tmp_path, kind)
    target = host(tmp_path)
    llm = random_llm(target, random_draft(target), 7, max_num_requests=4, max_batched_tokens=24)
    graphs = with_stand_ins(llm)
    given = random_prompts(LENGTHS[:4], BODY["vocab_size"])
    outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == [plain_text(model, item, 24) for item in given]
    assert graphs.captured


@pytest.mark.gpu
@pytest.mark.parametrize("has_swaps", [True, False], ids=["swapped", "unswapped"])
@pytest.mark.parametrize("kind", SERVED)
def test_graphs_change_nothing(kind: str, tmp_path: Path, *, has_swaps: bool) -> None:
    """Graphs have the tokens and the drafts of plain launches. Dense float32 models also have transformers' text."""
    is_routed = kind in WITH_EXPERTS
    if is_routed and torch.cuda.get_device_capability()[0] not in ONE_LAUNCH:
        pytest.skip("torch's grouped product waits for the host on this GPU")
    model, *pair = make_pair(tmp_path, kind)
    settings: dict[str, Any] = {"dtype": "bfloat16" if is_routed else "float32", "module_swaps": has_swaps}
    prompts = random_prompts(LENGTHS, BODY["vocab_size"])
    with start(*pair, **settings) as captured, without_graphs(*pair, **settings) as plainly:
        assert reason_of(captured) is None, f"{kind}: {reason_of(captured)}"
        assert captured.pair.has_graphs
        for _ in range(2):  # the first run captures the graphs, the second replays them
            ours, theirs = (traces(llm.generate(prompts, PARAMS)) for llm in (captured, plainly))
            assert ours == theirs
        assert captured.engine.runner.graphs is not None
        assert len(captured.engine.runner.graphs)
        if not is_routed:
            texts = [list(output.token_ids) for output in captured.generate(prompts, PARAMS)]
            assert texts == [plain_text(model, item, 24) for item in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_in_float32_are_named_and_run_uncaptured(kind: str, tmp_path: Path) -> None:
    """torch's grouped product of float32 waits for the host, so the target runs as without graphs."""
    model, *pair = make_pair(tmp_path, kind)
    prompts = random_prompts(LENGTHS, BODY["vocab_size"])
    with start(*pair, dtype="float32") as llm:
        assert not llm.pair.has_graphs
        assert {item.id for item in llm.pair.warnings} == {"slow-target", "target-capture-fails"}
        texts = [list(output.token_ids) for output in llm.generate(prompts, PARAMS)]
    assert texts == [plain_text(model, item, 24) for item in prompts]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gemma2", "qwen3"])
def test_steps_do_not_wait_for_the_device(kind: str, tmp_path: Path) -> None:
    _, *pair = make_pair(tmp_path, kind)
    with start(*pair, dtype="float32", max_num_requests=1) as llm:
        llm.warm_up()
        runner = llm.engine.runner
        assert runner.graphs is not None
        bucket, mode = runner.graphs.captured[-1]
        with torch.inference_mode(), detecting_syncs():
            runner.graphs.replay([runner.graphs.padding_row] * bucket, mode)
