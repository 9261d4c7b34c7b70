"""Native targets with sliding and full layers that differ, and with packed experts, in every way that the engine runs.

`test_families.py` compares the families with transformers one by one. Here one model of each kind goes through batches,
chunks of prompts, preemption, the prefix cache and hand-offs, and its steps equal a loop over transformers' own model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.config import RopeConfig
from dflash_runtime.device.text_pages import read_features
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.models.target import Target, find_target_runtime, load_target
from dflash_runtime.scheduling.request import SamplingParams
from dflash_testing.handoffs import go_on, hand_off
from dflash_testing.hosted_models import KnowingDraft, Known, make_model, plain_text
from dflash_testing.packed_models import pack_experts
from dflash_testing.pairs import placement, random_draft, random_llm, random_prompts
from dflash_testing.plain_loop import WholeText, plain_loop

NUM_DRAFTS, NUM_TOKENS = 7, 20
PARAMS = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (1, 2, 17, 33, 65, 130)


def scatter(path: Path, model: Any) -> None:
    """Give norms, scales and the scalars of layers different values, in memory and in the file."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.dim() == 1 and ("norm" in name or "scal" in name):
                tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
    model.save_pretrained(path)


GPT_OSS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.15}


GEMMA4: dict[str, Any] = {
    "global_head_dim": 16, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 2.0, "head_dim": 8,
    "initializer_range": 0.2,
}  # fmt: skip
GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A model type, the keys of its config beyond the usual ones, and what is done to the saved model."""

    model_type: str
    changes: dict[str, Any]
    finish: Callable[[Path, Any], None] | None = None


KINDS = {
    "gpt_oss, packed": Kind("gpt_oss", GPT_OSS, pack_experts),
    "gemma4": Kind("gemma4_text", GEMMA4, scatter),
    "gemma4 with experts": Kind("gemma4_text", {**GEMMA4, **GEMMA4_EXPERTS}, scatter),
    "gemma4_unified": Kind("gemma4_unified_text", {**GEMMA4, "attention_k_eq_v": False}, scatter),
}


@dataclass(frozen=True)
class Compared:
    """A model of transformers, and the same model as a native target."""

    model: Any
    target: Target

    def prompts(self, *lengths: int) -> list[list[int]]:
        return random_prompts(lengths, self.target.config.vocab_size)

    def texts(self, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
        return [plain_text(self.model, prompt, num_tokens) for prompt in prompts]

    def draft(self, known: list[Known] | None = None) -> Draft:
        draft = random_draft(self.target, rope=RopeConfig(theta=10_000.0), num_kv_heads=2, head_dim=8)
        return draft if known is None else KnowingDraft(draft, known)


@pytest.fixture(scope="module", params=KINDS)
def compared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    path, kind = tmp_path_factory.mktemp("unlike"), KINDS[request.param]
    model = make_model(path, kind.model_type, **kind.changes)
    if kind.finish is not None:
        kind.finish(path, model)
    source = open_target(path)
    assert find_target_runtime(source, "auto")[0] == "native"
    return Compared(model, load_target(source, placement()))


def test_outputs_of_every_layer_equal_transformers(compared: Compared) -> None:
    (text,) = compared.prompts(150)
    layers = range(compared.target.config.num_layers - 1)
    with torch.no_grad():
        out = compared.model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
    wanted = torch.cat([out.hidden_states[layer + 1][0] for layer in layers], dim=-1)
    found = read_features(compared.target, placement(), 16, text, list(layers))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", [{"scheduling": "sync"}, {"scheduling": "async", "max_batched_tokens": 9}], ids=str)
def test_many_prompts_at_once(compared: Compared, engine: dict[str, Any]) -> None:
    given = compared.prompts(*LENGTHS)
    wanted = compared.texts(given)
    known = [Known([*prompt, *text], index) for index, (prompt, text) in enumerate(zip(given, wanted, strict=True))]
    llm = random_llm(compared.target, compared.draft(known), NUM_DRAFTS, max_num_requests=4, **engine)
    outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == wanted
    assert len({max(output.acceptance_lengths) for output in outputs}) > 2


@pytest.mark.parametrize("engine", [{"scheduling": "sync"}, {"scheduling": "async", "max_batched_tokens": 9}], ids=str)
def test_steps_equal_a_loop_over_transformers(compared: Compared, engine: dict[str, Any]) -> None:
    """Drafted tokens follow from the features, and accepted ones from the text, both of transformers' own model."""
    prompts = compared.prompts(3, 21)
    draft = compared.draft()
    reader = WholeText(compared.model, compared.target.config)
    wanted = [plain_loop(reader, draft, prompt, 3, 9) for prompt in prompts]
    params = SamplingParams(max_new_tokens=9, ignore_eos=True)
    found = random_llm(compared.target, draft, 3, max_num_requests=2, **engine).generate(prompts, params)
    for output, (text, steps) in zip(found, wanted, strict=True):
        assert list(output.token_ids) == text[:9]
        assert [(step.draft_ids, step.num_accepted) for step in output.drafts[:-1]] == steps[: len(output.drafts) - 1]


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_preempted_requests_begin_again(compared: Compared, scheduling: str) -> None:
    given = compared.prompts(20, 21, 22, 23)
    llm = random_llm(
        compared.target, compared.draft(), NUM_DRAFTS,
        max_num_requests=4, page_size=4, num_pages=35, scheduling=scheduling,
    )  # fmt: skip
    outputs = llm.generate(given, PARAMS)
    assert [list(output.token_ids) for output in outputs] == compared.texts(given)
    assert any(output.num_preemptions for output in outputs)


def test_a_prompt_that_is_asked_again(compared: Compared) -> None:
    (prompt,) = compared.prompts(48)
    llm = random_llm(compared.target, compared.draft(), NUM_DRAFTS)
    outputs = [llm.generate([prompt], PARAMS)[0] for _ in range(2)]
    assert [list(output.token_ids) for output in outputs] == compared.texts([prompt]) * 2
    assert [output.num_cached for output in outputs] == [0, 32]


def test_a_text_goes_on_in_another_engine(compared: Compared) -> None:
    given = compared.prompts(*LENGTHS)
    one, sender, receiver = (
        random_llm(compared.target, compared.draft(), NUM_DRAFTS, scheduling="async", max_num_requests=3)
        for _ in range(3)
    )
    wanted = one.generate(given, PARAMS)
    found = go_on(receiver, given, PARAMS, hand_off(sender, given, PARAMS))
    assert [(item.token_ids, item.drafts) for item in found] == [(item.token_ids, item.drafts) for item in wanted]
    assert [item.num_loaded for item in found] == list(LENGTHS)


def test_texts_are_lossless_by_one_forward(compared: Compared) -> None:
    llm = random_llm(compared.target, compared.draft(), NUM_DRAFTS)
    assert llm.check_lossless(llm.generate(compared.prompts(*LENGTHS), PARAMS)).is_lossless
