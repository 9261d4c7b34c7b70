"""The whole engine on Triton kernels in the interpreter: the same texts and drafts as on the references."""

from typing import Any

import pytest
import torch

from dflash_kernels.suite import REFERENCE, triton_kernels
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, owned_shapes
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.setup.settings import resolve_kv_dtype
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.families.qwen3 import Qwen3Target
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import bundled_prompts, random_draft_config, random_target, random_weights
from dflash_testing.widths import ListedWidths

pytestmark = pytest.mark.interpreter

CPU = torch.device("cpu")
Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]

CASES: list[Case] = [
    ({}, {}, {}),
    ({"causal": (True, True)}, {"scheduling": "sync"}, {}),
    ({"windows": (6, None)}, {}, {}),
    ({}, {"kv_dtype": "fp8"}, {}),
    ({"draft_vocab_size": 40}, {}, {"temperature": 1.0}),
    ({}, {"draft_sampling": "probabilistic"}, {"temperature": 1.0, "top_k": 30, "top_p": 0.9}),
    ({"draft_vocab_size": 40}, {"draft_sampling": "probabilistic"}, {"temperature": 0.8}),
    ({"draft_vocab_size": 40}, {"num_tree_nodes": 6}, {"temperature": 0.8}),
]
"""Changes of the draft, of the engine settings, and of the sampling."""


def generate(
    kernels: str,
    case: Case,
    lengths: tuple[int, ...],
    max_new_tokens: int,
    widths: tuple[int, ...] = (),
    num_layers: int = 2,
) -> list[RequestOutput]:
    """The outputs of a small seeded pair on one set of kernels."""
    draft_changes, engine, sampling = case
    suite = triton_kernels() if kernels == "triton" else REFERENCE
    kv_dtype = resolve_kv_dtype(engine.get("kv_dtype", "auto"))
    placement = Placement(CPU, torch.float32, suite, num_positions=128, kv_dtype=kv_dtype)
    config = random_target(num_layers=num_layers, max_position_embeddings=64).config
    target_weights = random_weights(Qwen3Target.expected_shapes(config), torch.float32, 0, 0.15)
    target = Qwen3Target(config, stack_projections(target_weights.items()), placement)
    draft = random_draft_config(config, block_size=4, target_layer_ids=(0, 1), **draft_changes)
    weights = random_weights(owned_shapes(draft), torch.float32, 1, 0.15)
    add_map(draft, weights)
    limits = Limits(
        num_draft_tokens=3,
        max_model_len=64,
        max_num_requests=2,
        vocab_size=97,
        max_batched_tokens=9,
        num_tree_nodes=engine.get("num_tree_nodes", 0),
    )
    pair = LoadedPair(
        target=target,
        draft=DFlashDraft(draft, stack_projections(weights.items()), target, placement),
        placement=placement,
        limits=limits,
        config=EngineConfig(kernels=kernels, num_pages=30, page_size=8, max_num_requests=2, **engine),
    )
    llm = LLM(pair)
    llm.engine.scheduler.width_policy = ListedWidths(widths)
    prompts = [
        [token % 97 for token in prompt[:length]] for prompt, length in zip(bundled_prompts(), lengths, strict=False)
    ]
    params = [SamplingParams(max_new_tokens=max_new_tokens, seed=seed, **sampling) for seed in range(len(prompts))]
    return llm.generate(prompts, params)


def add_map(draft: DraftConfig, weights: dict[str, torch.Tensor]) -> None:
    if draft.has_reduced_vocab:
        ids = torch.linspace(0, draft.vocab_size - 1, draft.draft_vocab_size).long()
        weights[DRAFT_TO_TARGET] = ids - torch.arange(draft.draft_vocab_size)


def compare(
    case: Case, lengths: tuple[int, ...], max_new_tokens: int, widths: tuple[int, ...] = (), *, num_layers: int = 2
) -> None:
    """Compare both sets of kernels. The draft taps the target's last layer with `num_layers` 2, and not with 3."""
    wanted = generate("reference", case, lengths, max_new_tokens, widths, num_layers)
    found = generate("triton", case, lengths, max_new_tokens, widths, num_layers)
    assert [output.token_ids for output in found] == [output.token_ids for output in wanted]
    assert [output.drafts for output in found] == [output.drafts for output in wanted]


@pytest.mark.parametrize(
    "case",
    [
        ({"causal": (True, True), "windows": (6, None)}, {"scheduling": "sync"}, {}),
        ({"draft_vocab_size": 40}, {}, {"temperature": 1.0}),
        ({}, {"kv_dtype": "fp8"}, {}),
        pytest.param(
            ({}, {"draft_sampling": "probabilistic"}, {"temperature": 1.0, "top_k": 30, "top_p": 0.9}),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_triton_equals_reference(case: Case) -> None:
    """Three requests share two batch rows. The longest prompt takes two chunks and two pages.

    The interpreter runs top-k and top-p filters ten times slower than other kernels, so that case has two requests.
    """
    is_filtered = "top_k" in case[2]
    compare(case, (10, 3) if is_filtered else (3, 5, 10), 3)


def test_triton_equals_reference_with_trees() -> None:
    """The third token follows a tree whose path has moved in the pages."""
    compare(({"draft_vocab_size": 40}, {"num_tree_nodes": 6}, {}), (5,), 3)


@pytest.mark.parametrize("draft_sampling", [pytest.param("greedy", marks=pytest.mark.slow), "probabilistic"])
def test_triton_equals_reference_at_changing_widths(draft_sampling: str) -> None:
    """The widths are narrower than the block, as wide as the block, and 1, which is plain decoding."""
    compare(({}, {"draft_sampling": draft_sampling}, {"temperature": 1.0}), (3, 5), 5, (2, 3, 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_equals_reference_over_more_steps(case: Case) -> None:
    compare(case, (5, 12, 17), 7, num_layers=3)
