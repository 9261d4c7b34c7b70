"""Acceptance lengths equal z-lab's reference loop, step for step, under every reading of the draft.

tests/golden/zlab_traces.py recorded the traces. The file has their provenance and smallest logit gaps. Near the end of
the output the reference shortens blocks and this runtime does not, so only steps with a whole block left are compared.
"""

import hashlib
import json
from collections.abc import Collection

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import bundled_draft, bundled_draft_model, bundled_llm
from dflash_testing.paths import GOLDEN
from dflash_testing.reference_traces import num_whole_steps

RECORDED = json.loads((GOLDEN / "zlab_traces.json").read_text())
BLOCK = 8
ROUNDING = 1e-4
"""Two correct float32 programs differ by about 1e-6 in these logits (test_draft_kv.py), so larger gaps cannot flip."""


def test_traces_belong_to_the_bundled_pair() -> None:
    for name in ("target", "draft"):
        weights = (tiny_directory() / name / "model.safetensors").read_bytes()
        assert RECORDED["provenance"][f"{name}_sha256"] == hashlib.sha256(weights).hexdigest(), (
            f"the bundled {name} has changed: record the traces again with tests/golden/zlab_traces.py"
        )


AROUND_PAGES = (1, 15, 16, 33, 94)
"""Prompt lengths of the default run: half of the recorded prompts."""


@pytest.mark.parametrize("lengths", [AROUND_PAGES, pytest.param(range(1, 95), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("reading", ["full", "causal", "sliding", "sliding causal"])
def test_trace_equals_the_reference_loop(reading: str, lengths: Collection[int]) -> None:
    config = bundled_draft().config
    window = RECORDED["provenance"]["window"] if "sliding" in reading else None
    draft = bundled_draft_model(
        causal=("causal" in reading,) * config.num_layers, windows=(window,) * config.num_layers
    )
    llm = bundled_llm(draft, BLOCK - 1)
    params = SamplingParams(max_new_tokens=RECORDED["provenance"]["max_new_tokens"])
    recorded = [trace for trace in RECORDED["traces"] if trace["reading"] == reading]
    traces = [trace for trace in recorded if len(trace["prompt_token_ids"]) in lengths]
    assert len(recorded) >= 8
    assert len(traces) >= 5
    for trace, output in zip(
        traces, llm.generate([trace["prompt_token_ids"] for trace in traces], params), strict=True
    ):
        assert min(trace["smallest_target_gap"], trace["smallest_draft_gap"]) > ROUNDING
        assert list(output.token_ids) == trace["token_ids"]
        count = num_whole_steps(trace["acceptance_lengths"], params.max_new_tokens, BLOCK)
        assert list(output.acceptance_lengths[:count]) == trace["acceptance_lengths"][:count]
