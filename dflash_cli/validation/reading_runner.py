"""Runs trials: the target and the draft's weights are loaded once, and a draft is built from them for each reading.

It loads torch, so it is imported only when a search starts.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.validation.readings import Effort
from dflash_kernels.suite import pick_kernels
from dflash_runtime.checkpoint.pair import TargetSource, check_pair
from dflash_runtime.config import DraftConfig, EngineConfig
from dflash_runtime.device.attention import check_capability
from dflash_runtime.device.kv import KVCache
from dflash_runtime.device.settings import resolve_device, resolve_dtype, resolve_kernels, resolve_limits
from dflash_runtime.drafts.draft import Draft, draft_families
from dflash_runtime.llm import LLM
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target import load_target
from dflash_runtime.scheduling.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


class AnchorFirst:
    """A draft read as DSpark's are: row i of the block predicts position i + 1, beginning with the anchor's row.

    A draft gives no logits for the first row it is handed. In a non-causal block without a window the order of rows
    means nothing, positions do, so handing the last row first yields the rows that are wanted here.
    """

    def __init__(self, draft: Draft) -> None:
        self.config = draft.config
        self.target_ids = draft.target_ids
        self._draft = draft

    def write_context(self, features: "Tensor", positions: "Tensor", cache: KVCache, slots: "Tensor") -> None:
        """See `drafts.base.Draft`."""
        self._draft.write_context(features, positions, cache, slots)

    def logits(self, block_ids: "Tensor", positions: "Tensor", attend: Attend) -> "Tensor":
        """See `drafts.base.Draft`."""
        return self._draft.logits(block_ids.roll(1, dims=1), positions.roll(1, dims=1), attend)


class TrialEngine:
    """A target on a device and a draft's weights beside it.

    Raises:
        PairMismatch, TensorMismatch, UnsupportedError, CapacityError: the pair cannot be run.
    """

    def __init__(
        self, draft: DraftCheckpoint, target: TargetSource, config: EngineConfig, effort: Effort, *, longest: int | None
    ) -> None:
        check_pair(draft.source, target)
        self._effort = effort
        self._config = replace(config, max_num_requests=min(config.max_num_requests, 32), prefix_cache=False)
        self._device = resolve_device(config.device)
        self._dtype = resolve_dtype(config.dtype, self._device)
        backend = resolve_kernels(config.kernels, self._device, self._dtype)
        check_capability(backend, target.config, draft.config, str(self._dtype).removeprefix("torch."))
        limits = resolve_limits(self._config, target.config, draft.config)
        prompt_len = effort.start_len + effort.lead_len if longest is None else longest
        wanted = prompt_len + effort.max_new_tokens + limits.num_lookahead_tokens
        self._limits = replace(limits, max_model_len=min(limits.max_model_len, wanted))
        self._placing: dict[str, Any] = {
            "num_positions": self._limits.max_model_len + self._limits.num_lookahead_tokens,
            "kernels": pick_kernels(backend, self._device),
            "device": self._device,
            "dtype": self._dtype,
        }
        self._target = load_target(target, **self._placing)
        self._weights = {
            name: tensor.to(self._device, self._dtype) if tensor.is_floating_point() else tensor.to(self._device)
            for name, tensor in draft.checkpoint.load_many(list(draft.select_tensors().load))
        }

    def build(self, config: DraftConfig, *, is_anchor_first: bool = False) -> Draft:
        """The draft as another config reads its weights."""
        draft = draft_families()["dflash"](config, self._weights, self._target, **self._placing)
        return AnchorFirst(draft) if is_anchor_first else draft

    def run(self, draft: Draft, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
        """Complete the prompts greedily; stop tokens are passed over, so that every reading sees the same text."""
        params = SamplingParams(max_new_tokens=self._effort.max_new_tokens, ignore_eos=True)
        with self._open(draft) as llm:
            return [output for output in llm.generate(prompts, params) if output.error is None]

    def make_prompts(self) -> list[list[int]]:
        """Random ids, each continued by the target: sampled, since greedy text of random ids soon repeats itself."""
        effort, vocab_size = self._effort, self._target.config.vocab_size
        generator = random.Random(effort.seed)
        starts = [[generator.randrange(vocab_size) for _ in range(effort.start_len)] for _ in range(effort.num_prompts)]
        params = [
            SamplingParams(max_new_tokens=effort.lead_len, temperature=1.0, seed=effort.seed + index, ignore_eos=True)
            for index in range(len(starts))
        ]
        with self._open(None) as llm:
            outputs = llm.generate(starts, params)
        return [[*output.prompt_token_ids, *output.token_ids] for output in outputs]

    def _open(self, draft: Draft | None) -> LLM:
        limits = self._limits if draft is not None else replace(self._limits, num_draft_tokens=0)
        return LLM.from_models(self._target, draft, limits, config=self._config, device=self._device, dtype=self._dtype)
