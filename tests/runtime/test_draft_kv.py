"""The draft's context KV is what the target's hidden states say, at every committed position.

Text stays right when context KV is wrong, so it is compared with a computation of its own: hidden states from
transformers' model, projected row by row.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from dflash_cli.references import tiny_directory
from dflash_runtime.drafts.base import Draft
from dflash_runtime.request import Request, SamplingParams
from pairs import bundled_draft_model, bundled_llm, bundled_prompts

TOLERANCE = 5e-5
"""On values of up to about ten in float32."""


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(tiny_directory() / "target", dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 7])
@pytest.mark.parametrize("prompt_len", [1, 15, 16, 17, 60])
def test_context_kv_equals_recomputation(reference: torch.nn.Module, num_draft_tokens: int, prompt_len: int) -> None:
    draft = bundled_draft_model()
    llm = bundled_llm(draft, num_draft_tokens)
    prompt = max(bundled_prompts(), key=len)[:prompt_len]
    request = Request(index=0, prompt_token_ids=prompt, params=SamplingParams(max_new_tokens=50))
    llm.engine.add(request)
    num_checks = 0
    while not request.is_finished:
        llm.engine.step()
        if request.pages:
            check(reference, draft, llm, request)
            num_checks += 1
    assert num_checks > 5


def check(reference: torch.nn.Module, draft: Draft, llm: object, request: Request) -> None:
    tokens = [*request.prompt_token_ids, *request.output_token_ids][: request.kv_len]
    with torch.inference_mode():
        states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1][0] for layer in draft.config.target_layer_ids], dim=-1)
    positions = torch.arange(request.kv_len)
    keys, values = draft.context_kv(features, positions)
    runner = llm.engine.runner  # type: ignore[attr-defined]
    pages = torch.tensor(request.pages)
    slots = pages[positions // runner.page_size] * runner.page_size + positions % runner.page_size
    assert (runner.draft_kv.keys[:, slots] - keys).abs().max() < TOLERANCE
    assert (runner.draft_kv.values[:, slots] - values).abs().max() < TOLERANCE


def test_logits_agree_with_transformers(reference: torch.nn.Module) -> None:
    """How far two correct float32 programs are apart, which is what the golden traces' gaps are held against."""
    from dflash_kernels.block_attention import block_attention_ref
    from pairs import bundled_target_model

    target = bundled_target_model()
    prompt = torch.tensor([max(bundled_prompts(), key=len)])

    def attend(layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        none = torch.zeros(1, *keys.shape[2:])
        table, zero = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        return block_attention_ref(
            query, keys, values, none, none, table, zero, page_size=1, is_causal=True, window=None
        )

    with torch.inference_mode():
        hidden, _ = target(prompt, torch.arange(prompt.shape[1])[None], attend, ())
        difference = (target.head(hidden) - reference(prompt).logits).abs().max()
    assert difference < 2e-5
