"""Record single draft blocks of z-lab's model at chosen context lengths, for tests/behaviour/test_zlab_blocks.py.

Run it in the environment of tests/golden/zlab_traces.py:

    zlab/bin/python tests/golden/zlab_blocks.py TARGET DRAFT --output BLOCKS.json

The text is a fixed arithmetic sequence of token ids, so only the pair is needed to repeat the run. The file has the
five best ids of every drafted row, and their logits.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from dflash import model as zlab
from transformers import AutoModelForCausalLM
from zlab_traces import READINGS, load_draft, provenance

CONTEXTS = (1, 15, 16, 17, 1000)


def main() -> None:
    """Record one block for every reading and context length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.max_new_tokens = 0
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    blocks = []
    for reading, changes in READINGS.items():
        draft = load_draft(arguments.draft, changes)
        for context_len in CONTEXTS:
            blocks.append({"reading": reading, "context_len": context_len, **block(draft, target, context_len)})
    document = {"provenance": provenance(arguments), "blocks": blocks}
    arguments.output.write_text(json.dumps(document) + "\n")


@torch.inference_mode()
def block(draft: Any, target: Any, context_len: int) -> dict[str, Any]:
    """Return the five best logits of each row of the block after `context_len` tokens of the text."""
    tokens = text(context_len + 1, target.config.vocab_size)
    output = target(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    features = zlab.extract_context_feature(output.hidden_states, draft.target_layer_ids)
    ids = torch.tensor([[tokens[-1], *[draft.mask_token_id] * (draft.block_size - 1)]])
    hidden = draft(
        target_hidden=features,
        noise_embedding=target.get_input_embeddings()(ids),
        position_ids=torch.arange(context_len + draft.block_size)[None],
        past_key_values=zlab._make_cache(draft.config),
        use_cache=True,
    )
    best = draft.compute_logits(hidden[:, 1:], target.lm_head)[0].topk(5)
    return {"ids": best.indices.tolist(), "logits": best.values.tolist()}


def text(length: int, vocab_size: int) -> list[int]:
    """Return token ids that depend only on their position. They exclude the low ids, which are special tokens."""
    return [5 + (place * 7919 + place * place * 31) % (vocab_size - 5) for place in range(length)]


if __name__ == "__main__":
    main()
