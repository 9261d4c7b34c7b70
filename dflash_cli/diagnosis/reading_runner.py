"""The runner of alternative readings. It loads the weights once, and each reading builds a draft from them.

This module imports torch, so it is imported only when a search starts.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.diagnosis.alternatives import LARGEST_BLOCK, AlternativeReading
from dflash_cli.diagnosis.answered_prompts import answered
from dflash_cli.diagnosis.further_training import Ends, Trainable
from dflash_cli.diagnosis.reading_screen import KnownTexts, ReadingScreen
from dflash_cli.diagnosis.run_settings import SearchBudget
from dflash_kernels.suite import REFERENCE
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.device.setup.loading import LoadedPair, load_pair
from dflash_runtime.device.setup.settings import resolve_limits
from dflash_runtime.drafts.draft import Draft, build_draft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.layers import Linear
from dflash_runtime.models.target_loading import find_target_runtime
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from torch import Tensor


class ReadingRunner:
    """A target and a draft's weights on a device.

    Raises:
        PairMismatch, TensorMismatch, UnsupportedError, CapacityError: the pair cannot be run.
    """

    def __init__(
        self,
        draft: DraftCheckpoint,
        target: TargetSource,
        config: EngineConfig,
        effort: SearchBudget,
        *,
        longest: int | None,
    ) -> None:
        self._effort = effort
        config = replace(config, max_num_requests=min(config.max_num_requests, 32), prefix_cache=False)
        _, target_config = find_target_runtime(target, config.wanted_runtime)
        limits = resolve_limits(config, target_config, draft.config)
        # New prompts are also made from given prompts, by a sampled lead.
        prompt_len = (effort.start_len if longest is None else longest) + effort.lead_len
        self.text_len = prompt_len + effort.max_new_tokens
        wanted = self.text_len + LARGEST_BLOCK * limits.num_lookahead_tokens
        config = replace(config, max_model_len=min(limits.max_model_len, wanted))
        self._pair = load_pair(target, draft, config).with_plain_draft()

    def build(self, reading: AlternativeReading) -> LoadedPair:
        """The pair under another reading of its draft."""
        pair = self._pair
        assert pair.draft_weights is not None
        if reading.rewrite is not None:
            pair = replace(pair, draft_weights=reading.rewrite(pair.draft_weights, reading.config))
        limits = replace(pair.limits, num_draft_tokens=reading.config.num_draft_tokens)
        return replace(pair, limits=limits).with_draft(reading.config)

    def trainable(self, reading: AlternativeReading) -> Trainable:
        """The draft under a reading, to be built from weights with gradients."""
        pair, weights = self._pair, self.weights
        placement, target = replace(pair.placement, kernels=REFERENCE), pair.target
        ends = Ends(target.embedding, Linear(target.head.weight, target.head.bias), target.embedding_scale)

        def build(weights: "Mapping[str, Tensor]") -> Draft:
            return build_draft(reading.config, weights, ends, placement)

        return Trainable(
            reading.config, weights if reading.rewrite is None else reading.rewrite(weights, reading.config), build
        )

    def screen(self, outputs: Sequence[RequestOutput], taps: Collection[int]) -> ReadingScreen:
        """The screen that counts acceptance along these outputs, for readings that tap only these layers."""
        assert self._pair.draft is not None
        return ReadingScreen(self.read(outputs, taps), self._pair.draft.config)

    def read(self, outputs: Sequence[RequestOutput], taps: Collection[int]) -> KnownTexts:
        """The texts of these outputs, with the target's outputs of these layers."""
        return KnownTexts(self._pair, outputs, taps)

    @property
    def weights(self) -> "Mapping[str, Tensor]":
        """The draft's weights."""
        assert self._pair.draft_weights is not None
        return self._pair.draft_weights

    @property
    def target_config(self) -> TargetConfig:
        """The target's config as the code that runs it reads it."""
        return self._pair.target.config

    @property
    def target_runtime(self) -> str:
        """The code that runs the target: native, transformers or transformers-cache."""
        return self._pair.target_runtime

    @property
    def target_quantization(self) -> str | None:
        """The packing of the target's weights, None if they are plain."""
        return self._pair.target_quantization

    @property
    def warnings(self) -> tuple[str, ...]:
        """The warnings of the pair."""
        return self._pair.warnings

    def rare_ids(self, count: int) -> list[int]:
        """Ids with unused rows in the target's embedding: rows near the mean of all rows, or of extreme norm.

        A row that no text uses keeps its initial values, and the mask's row is usually unused.
        """
        rows = self._pair.target.embedding.float()
        distances = (rows - rows.mean(dim=0)).norm(dim=1)
        nearest = distances.argsort()[: count - count // 4].tolist()
        norms = rows.norm(dim=1).argsort()
        return list(dict.fromkeys([*nearest, *norms[: count // 8].tolist(), *norms[-(count // 8) :].tolist()]))

    def run(self, pair: LoadedPair, prompts: Sequence[Sequence[int]]) -> list[RequestOutput]:
        """One greedy output per prompt. An output may have failed.

        Generation ignores stop tokens, so that every reading sees the same text.
        """
        params = SamplingParams(max_new_tokens=self._effort.max_new_tokens, ignore_eos=True)
        with LLM(pair) as llm:
            return llm.generate(prompts, params)

    def make_prompts(self, numbers: range, given: Sequence[Sequence[int]] = ()) -> list[list[int]]:
        """One prompt per number: random ids or a given prompt, continued by the target.

        The continuation is sampled, because greedy text of random ids soon repeats itself. A given prompt may
        fail, for example because it is too long.

        Raises:
            DFlashError: the target does not continue random ids. NaN in its weights is a reason.
        """
        effort, vocab_size = self._effort, self._pair.limits.vocab_size
        generator = random.Random(effort.seed)
        drawn = [[generator.randrange(vocab_size) for _ in range(effort.start_len)] for _ in range(numbers.stop)]
        starts = [given[number % len(given)] if given else drawn[number] for number in numbers]
        params = [
            SamplingParams(max_new_tokens=effort.lead_len, temperature=1.0, seed=effort.seed + number, ignore_eos=True)
            for number in numbers
        ]
        with LLM(self._pair.without_draft()) as llm:
            outputs = llm.generate(starts, params)
        found = [output for output in outputs if output.error is None] if given else answered(outputs)[0]
        return [[*output.prompt_token_ids, *output.token_ids] for output in found]
