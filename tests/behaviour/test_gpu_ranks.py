"""Targets split over two GPUs: text and traces of one GPU in float32, close in bfloat16, and no process left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.gpu import gpu_llm
from dflash_testing.hosted_models import make_model
from dflash_testing.pairs import bundled_prompts, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

GREEDY = SamplingParams(max_new_tokens=64, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=64, ignore_eos=True, temperature=0.8, top_p=0.95, seed=5)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 32},
    "qwen3_5_text": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "gpt_oss": {"num_local_experts": 16, "intermediate_size": 64},
    "gemma4_text": {
        "global_head_dim": 128, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
}  # fmt: skip


def traces(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    assert all(item.error is None for item in outputs), [item.error for item in outputs]
    return [(item.token_ids, item.drafts) for item in outputs]


@pytest.mark.parametrize("all_reduce", ["auto", "nccl"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_float32_traces_equal_one_gpu(all_reduce: str, params: SamplingParams) -> None:
    """The bundled pair, four requests at a time, in CUDA graphs."""
    prompts = [list(prompt) for prompt in bundled_prompts()[:6]]
    settings: dict[str, Any] = {"max_num_requests": 4, "seed": 3}
    with gpu_llm("tiny", "float32", **settings) as alone:
        expected = traces(alone.generate(prompts, params))
    with gpu_llm("tiny", "float32", tensor_parallel_size=2, all_reduce=all_reduce, **settings) as split:
        split.warm_up(params)
        found = split.generate(prompts, params)
        assert split.engine.runner.graphs is not None
        assert split.engine.runner.graphs.captured
        assert not split.warnings
        again = split.generate(prompts, params)  # finds prompts in the prefix cache
    assert traces(found) == expected
    assert traces(again) == expected


def test_adaptive_width_chooses_alike_on_all_ranks() -> None:
    """Times of steps are measured together, and all ranks use rank 0's. A divergence would end the call."""
    prompts = [list(prompt) for prompt in bundled_prompts()[:6]]
    with gpu_llm("tiny", "bfloat16", tensor_parallel_size=2, adaptive_width=True, max_num_requests=4) as split:
        split.warm_up(GREEDY)
        outputs = split.generate(prompts, GREEDY)
        assert all(item.error is None for item in outputs)
        assert split.check_lossless(outputs).is_lossless


@pytest.mark.parametrize("kind", KINDS)
def test_families_in_bfloat16(kind: str, tmp_path: Path) -> None:
    """Random targets of 64-wide layers: nearly every token is the choice of the split target itself."""
    make_model(tmp_path, kind, hidden_size=64, head_dim=64, vocab_size=128, **KINDS[kind])
    config = EngineConfig(device="cuda", num_pages=500, max_num_requests=4, tensor_parallel_size=2)
    with LLM(open_target(tmp_path), None, config) as split:
        split.warm_up(GREEDY)
        outputs = split.generate(random_prompts([9, 70, 33, 5], 128), GREEDY)
        assert all(item.error is None for item in outputs)
        verdict = split.check_lossless(outputs)
    assert verdict.num_wrong <= 0.1 * verdict.num_tokens, verdict.summary


def test_a_stream_closed_before_its_end_leaves_the_ranks_in_step() -> None:
    prompts = [list(prompt) for prompt in bundled_prompts()[:4]]
    with gpu_llm("tiny", "float32", tensor_parallel_size=2, max_num_requests=4) as split:
        expected = traces(split.generate(prompts, GREEDY))
        stream = split.stream(prompts, GREEDY)
        next(stream)
        stream.close()
        assert traces(split.generate(prompts, GREEDY)) == expected


PROGRAM = """
import sys
from dflash_runtime.errors import DFlashError
from dflash_testing.gpu import gpu_llm
from dflash_testing.pairs import bundled_prompts
from test_gpu_ranks import GREEDY
llm = gpu_llm("tiny", "bfloat16", tensor_parallel_size=2, all_reduce=sys.argv[1], max_num_requests=4)
llm.warm_up(GREEDY)
print(*llm._others.pids, flush=True)
try:
    while True:
        llm.generate([list(prompt) for prompt in bundled_prompts()[:4]], GREEDY)
except DFlashError as error:
    print(error.id, flush=True)
    sys.exit(error.exit_code)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""
"""Answers prompts for ever, after a line with the process of rank 1."""


@pytest.mark.parametrize("all_reduce", ["auto", "nccl"])
@pytest.mark.parametrize(("who", "sent", "said", "code"), [
    ("rank 1", signal.SIGKILL, "ranks-ended", 4), ("rank 0", signal.SIGINT, "interrupted", 130),
])  # fmt: skip
def test_the_end_of_one_rank_ends_all(all_reduce: str, who: str, sent: signal.Signals, said: str, code: int) -> None:
    """A kernel may wait for the lost GPU for ever; the process ends all the same, within a minute."""
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command, environment = [sys.executable, "-c", PROGRAM, all_reduce], {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        time.sleep(2)
        os.kill(other if who == "rank 1" else process.pid, sent)
        lines, _ = process.communicate(timeout=60)
    assert lines.split() == [said]
    assert process.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(other, 0)
