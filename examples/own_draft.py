"""Put a draft of your own beside the target: here one that looks the continuation up in the prompt.

Anything that keeps the three promises of `dflash_runtime.drafts.draft.Draft` can draft. The engine verifies every
token, so a draft can be slow or wrong but never change the text.
"""

import torch
from torch import Tensor

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import Role, fetch_directory, tiny_directory
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_kernels.suite import REFERENCE
from dflash_runtime.config import DraftConfig, EngineConfig
from dflash_runtime.device.kv import KVCache
from dflash_runtime.device.settings import resolve_limits
from dflash_runtime.llm import LLM
from dflash_runtime.metrics import count_acceptance
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import load_target
from dflash_runtime.scheduling.request import SamplingParams


class RepeatingDraft:
    """Proposes the tokens that followed the anchor where it last stood in a fixed text."""

    def __init__(self, config: DraftConfig, text: list[int]) -> None:
        self.config = config
        self.target_ids: Tensor | None = None
        self._after = {token: text[place + 1 : place + config.block_size] for place, token in enumerate(text)}

    def write_context(self, features: Tensor, positions: Tensor, cache: KVCache, slots: Tensor) -> None:
        """Needs no context KV."""

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """[R, N] blocks -> [R, N - 1, V], one-hot at what is proposed."""
        logits = torch.zeros(*block_ids[:, 1:].shape, self.config.vocab_size)
        for row, anchor in enumerate(block_ids[:, 0].tolist()):
            for place, token in enumerate(self._after.get(anchor, [])):
                logits[row, place, token] = 1.0
        return logits


def main() -> None:
    """Compare it with the bundled draft."""
    cpu, dtype = torch.device("cpu"), torch.float32
    source = open_target(tiny_directory() / "target")
    config = open_draft(fetch_directory("tiny", Role.DRAFT)).config
    limits = resolve_limits(EngineConfig(max_model_len=1024), source.config, config)
    target = load_target(source, num_positions=1032, kernels=REFERENCE, device=cpu, dtype=dtype)
    prompt = Tokenizer(source.checkpoint.path).encode("def area(width, height):\n    return width * height\n\n\ndef ")
    llm = LLM.from_models(target, RepeatingDraft(config, prompt), limits, device=cpu, dtype=dtype)
    outputs = llm.generate([prompt], SamplingParams(max_new_tokens=64))
    print(f"acceptance length {count_acceptance(outputs, limits.num_draft_tokens).acceptance_len:.2f}")


if __name__ == "__main__":
    main()
