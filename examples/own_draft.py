"""Use a draft of your own with the target: here a draft that looks up the continuation in the prompt.

A draft is any object with the three methods of `dflash_runtime.drafts.draft.Draft`. The engine verifies every token, so
a slow or wrong draft never changes the text.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import Role, fetch_directory
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.metrics import count_acceptance
from dflash_runtime.models.layers import Attend, PagedKV
from dflash_runtime.scheduling.sampling_params import SamplingParams

PROMPT = """class Box:
    def __init__(self, width, height):
        self.width = width
        self.height = height

    def area(self):
        return self.width * self.height

    def """


class RepeatingDraft:
    """Proposes the tokens after the last occurrence of the anchor in a fixed text."""

    def __init__(self, config: DraftConfig, text: list[int]) -> None:
        self.config = config
        self.target_ids: Tensor | None = None
        self._after = {token: text[index + 1 : index + config.block_size] for index, token in enumerate(text)}

    def write_context(self, features: Tensor, positions: Tensor, cache: PagedKV, slots: Tensor) -> None:
        """Do nothing: this draft does not use context KV."""

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        """Blocks [R, N] -> one-hot logits [R, K, V] of the proposed tokens. K is `num_drafts`, by default N - 1."""
        logits = torch.zeros(*block_ids[:, 1:].shape, self.config.vocab_size)
        for request, anchor in enumerate(block_ids[:, 0].tolist()):
            for position, token in enumerate(self._after.get(anchor, [])):
                logits[request, position, token] = 1.0
        return logits[:, :num_drafts]


def main() -> None:
    """Run the draft instead of the bundled draft."""
    target = open_target(fetch_directory("tiny", Role.TARGET))
    pair = load_pair(
        target, open_draft(fetch_directory("tiny", Role.DRAFT)), EngineConfig(device="cpu", max_model_len=1024)
    )
    assert pair.draft is not None
    prompt = Tokenizer(target.checkpoint.path).encode(PROMPT)
    with LLM(replace(pair, draft=RepeatingDraft(pair.draft.config, prompt))) as llm:
        outputs = llm.generate([prompt], SamplingParams(max_new_tokens=64))
        print(f"acceptance length {count_acceptance(outputs, llm.num_draft_tokens).acceptance_len:.2f}")


if __name__ == "__main__":
    main()
