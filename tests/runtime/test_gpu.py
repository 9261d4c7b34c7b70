"""The bundled pair on a GPU in bfloat16: acceptance as on the CPU, and no token the target would not nearly choose."""

import pytest
import torch

from dflash_cli.loading import open_target
from dflash_cli.references import tiny_directory
from dflash_runtime.config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.metrics import count_acceptance
from dflash_runtime.request import SamplingParams
from pairs import bundled_draft, bundled_llm, bundled_prompts

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(max_new_tokens=64)
REGRET = 0.2
"""Nats by which a chosen token may fall short of the best one, judged in float32."""


def gpu_llm(name: str, dtype: str, max_num_requests: int) -> LLM:
    config = EngineConfig(device="cuda", dtype=dtype, max_num_requests=max_num_requests)
    return LLM(open_target(tiny_directory() / "target"), bundled_draft(name).source, config)


@pytest.mark.parametrize("name", ["tiny", "tiny:reduced"])
@pytest.mark.parametrize("max_num_requests", [1, 16])
def test_bfloat16_regret_and_acceptance(name: str, max_num_requests: int) -> None:
    prompts = bundled_prompts()[:16]
    outputs = gpu_llm(name, "bfloat16", max_num_requests).generate(prompts, PARAMS)
    regret = max(
        largest_regret(prompt + output.token_ids, len(prompt)) for prompt, output in zip(prompts, outputs, strict=True)
    )
    exact = gpu_llm(name, "float32", 1).generate(prompts, PARAMS)
    measured, expected = (count_acceptance(found, 7).acceptance_len for found in (outputs, exact))
    print(f"{name} batch {max_num_requests}: regret {regret:.4f} nat, acceptance {measured:.3f} (fp32 {expected:.3f})")
    assert regret <= REGRET
    assert measured is not None
    assert expected is not None
    assert abs(measured - expected) < 0.15 * expected


def test_float32_speculation_equals_plain_decoding() -> None:
    prompts = bundled_prompts()[:16]
    speculative = gpu_llm("tiny", "float32", 1).generate(prompts, PARAMS)
    config = EngineConfig(device="cuda", dtype="float32", max_num_requests=1, num_draft_tokens=0)
    plain = LLM(open_target(tiny_directory() / "target"), None, config).generate(prompts, PARAMS)
    assert [output.token_ids for output in speculative] == [output.token_ids for output in plain]


def test_traces_equal_the_cpu() -> None:
    from pairs import bundled_draft_model

    prompts = bundled_prompts()[:8]
    on_gpu = gpu_llm("tiny", "float32", 1).generate(prompts, PARAMS)
    on_cpu = bundled_llm(bundled_draft_model(), 7).generate(prompts, PARAMS)
    assert on_gpu == on_cpu


def largest_regret(tokens: tuple[int, ...], prompt_len: int) -> float:
    """How far, in nats, the worst generated token falls short of the target's best, by teacher forcing in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_directory() / "target", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens[:-1]])).logits[0, prompt_len - 1 :].log_softmax(-1)
    chosen = torch.tensor(tokens[prompt_len:])
    return float((logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0]).max())
