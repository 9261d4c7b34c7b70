"""A draft block's logits equal z-lab's, at short and long context lengths around page bounds, under every reading.

tests/golden/zlab_blocks.py recorded z-lab's logits. The engine reaches the context length by prefilling the text, so
the compared logits depend on pages, context KV and the draft's own forward.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_runtime.models.layers import Attend
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import bundled_draft, bundled_draft_model, bundled_llm
from dflash_testing.paths import GOLDEN

RECORDED = json.loads((GOLDEN / "zlab_blocks.json").read_text())
TOLERANCE = 2e-4
"""Largest difference of logits. In float32 they reach about 30, over a context of a thousand tokens."""


@pytest.mark.parametrize(
    "golden", RECORDED["blocks"], ids=lambda block: f"{block['reading']} at {block['context_len']}"
)
def test_block_logits(golden: dict[str, Any]) -> None:
    config = bundled_draft().config
    reading, context_len = golden["reading"], golden["context_len"]
    window = RECORDED["provenance"]["window"] if "sliding" in reading else None
    draft = bundled_draft_model(
        causal=("causal" in reading,) * config.num_layers, windows=(window,) * config.num_layers
    )
    llm = bundled_llm(draft, 7)
    seen: list[Tensor] = []
    logits = draft.logits

    def watched(block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        seen.append(logits(block_ids, positions, attend, num_drafts))
        return seen[-1]

    draft.logits = watched  # type: ignore[method-assign]
    tokens = text(context_len + 1, config.vocab_size)
    item = Request(index=0, prompt_token_ids=tuple(tokens[:-1]), params=SamplingParams(max_new_tokens=9))
    llm.engine.add(item)
    llm.engine.step()
    llm.engine.runner.state.anchors.fill_(tokens[-1])  # the text's own next token instead of the target's choice
    llm.engine.step()
    found = seen[0][0]
    ids = torch.tensor(golden["ids"])
    assert (found.gather(-1, ids) - torch.tensor(golden["logits"])).abs().max() < TOLERANCE
    assert torch.equal(found.argmax(-1), ids[:, 0])


def text(length: int, vocab_size: int) -> list[int]:
    """The same text as in tests/golden/zlab_blocks.py."""
    return [5 + (position * 7919 + position * position * 31) % (vocab_size - 5) for position in range(length)]
