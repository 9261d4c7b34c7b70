"""A draft block's logits equal z-lab's, at context lengths around page bounds and far along, under every reading.

Recorded by tests/golden/zlab_blocks.py. The engine is driven to the context length by prefilling the text, so what is
compared went through pages, context KV and the draft's own forward.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_runtime.models.layers import Attend
from dflash_runtime.scheduling.request import Request, SamplingParams
from dflash_testing.pairs import bundled_draft, bundled_draft_model, bundled_llm
from dflash_testing.paths import GOLDEN

RECORDED = json.loads((GOLDEN / "zlab_blocks.json").read_text())
TOLERANCE = 2e-4
"""On logits of up to about thirty in float32, over a context of a thousand."""


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
    """The text of tests/golden/zlab_blocks.py."""
    return [5 + (place * 7919 + place * place * 31) % (vocab_size - 5) for place in range(length)]
