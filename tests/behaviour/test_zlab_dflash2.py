"""DFlash 2: texts and acceptance traces equal z-lab's, step for step, on DFlash drafts with its parts added by a seed.

tests/golden/zlab_dflash2.py recorded the traces. Near the end of the output the reference shortens blocks and this
runtime does not, so only steps with a whole block left are compared. With identities, the trace equals the trace of
DFlash.
"""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.config import ConvolutionConfig, DraftConfig, SelectorConfig
from dflash_runtime.drafts.dflash2 import DFlash2Draft
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.request import SamplingParams
from dflash_testing.lifted_drafts import Lift, cases, lift
from dflash_testing.pairs import bundled_draft, bundled_draft_model, bundled_llm, bundled_target_model, placement
from dflash_testing.paths import GOLDEN
from dflash_testing.reference_traces import num_whole_steps

RECORDED = json.loads((GOLDEN / "zlab_dflash2.json").read_text())
CASES = {case.seed: case for case in cases()[4:]}
SAMPLED = {trace["seed"] for trace in RECORDED["traces"][4::40]}
NUM_TOKENS: int = RECORDED["provenance"]["max_new_tokens"]


@cache
def files() -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = tiny_directory() / "draft"
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def lifted(case: Lift, dtype: torch.dtype = torch.float32) -> DFlash2Draft:
    _, tensors = lift(*files(), case)
    config = lifted_config(case)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == owned_shapes(config)
    weights = stack_projections((name, tensor.to(dtype)) for name, tensor in tensors.items())
    return DFlash2Draft(config, weights, bundled_target_model(dtype), placement(dtype))


def lifted_config(case: Lift) -> DraftConfig:
    layers = bundled_draft().config.num_layers
    return replace(
        bundled_draft().config,
        family="dflash2",
        block_size=case.block_size,
        convolution=ConvolutionConfig(kernel_size=case.kernel_size, group_size=case.group_size),
        selector=SelectorConfig(rank=case.rank, top_k=case.top_k),
        windows=(24 if case.is_windowed else None,) * layers,
        causal=(False,) * layers,
        **case.changes,  # type: ignore[arg-type]
    )


def check(trace: dict[str, Any], case: Lift) -> None:
    llm = bundled_llm(lifted(case), case.block_size - 1)
    (output,) = llm.generate([trace["prompt_token_ids"]], SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True))
    assert list(output.token_ids) == trace["token_ids"]
    count = num_whole_steps(trace["acceptance_lengths"], NUM_TOKENS, case.block_size)
    assert list(output.acceptance_lengths[:count]) == trace["acceptance_lengths"][:count]


@pytest.mark.parametrize(
    "trace",
    [
        pytest.param(trace, marks=() if trace["seed"] in SAMPLED else pytest.mark.slow, id=str(trace["seed"]))
        for trace in RECORDED["traces"]
        if trace["noise"]
    ],
)
def test_a_trace_equals_the_reference(trace: dict[str, Any]) -> None:
    check(trace, CASES[trace["seed"]])


def test_at_least_two_hundred_drafts_are_recorded() -> None:
    assert sum(trace["noise"] > 0 for trace in RECORDED["traces"]) >= 200


@pytest.mark.parametrize("index", [1, *(pytest.param(index, marks=pytest.mark.slow) for index in (0, 2, 3))])
def test_with_identities_it_is_dflash(index: int) -> None:
    """The recorded trace of the reference equals the trace of DFlash, too."""
    case = cases()[index]
    draft = bundled_draft_model(block_size=case.block_size)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = RECORDED["traces"][index]["prompt_token_ids"]
    (plain,), (own,) = (
        bundled_llm(model, case.block_size - 1).generate([prompt], params) for model in (draft, lifted(case))
    )
    assert (own.token_ids, own.drafts) == (plain.token_ids, plain.drafts)
    check(RECORDED["traces"][index], case)
