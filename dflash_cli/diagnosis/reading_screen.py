"""Acceptance under a reading, without running the target again: the draft proposes blocks along known texts.

Greedy text does not depend on the draft, so the target writes each text once and its hidden states are computed once.
Each reading then drafts along the texts. `score` covers anchors spread over all texts, for a quick estimate. `walk`
takes the steps that a run of the pair takes.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from dflash_cli.acceptance.intervals.statistics import StepCounts
from dflash_cli.diagnosis.further_training import Loss, Trainable, halves, pulls, training_gain
from dflash_cli.diagnosis.run_settings import Score
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.storage.kv import KVCache
from dflash_runtime.device.text_pages import Anchor, Foretold, TextPages, read_features
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.models.weights import Weights
from dflash_runtime.scheduling.request_output import RequestOutput

LOSS_DECAY = 4.0
"""Positions over which the weight of a drafted token falls to 1/e. Source: arXiv 2602.06036."""

OF_CONTEXT = re.compile(r"(fc|hidden_norm)\.|.*\.(qkv_proj|k_norm)\.")
"""Names of the tensors that a draft's context KV depends on."""


class KnownTexts:
    """Prompts with the target's greedy continuations, and the target's outputs of some layers over them."""

    def __init__(self, pair: LoadedPair, outputs: Sequence[RequestOutput], taps: Collection[int]) -> None:
        page_size = pair.config.page_size
        texts = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        self.spans = [(len(output.prompt_token_ids), len(text)) for output, text in zip(outputs, texts, strict=True)]
        self.pages = TextPages(texts, page_size, pair.placement)
        layers = tuple(sorted(taps))
        run = pair.target, pair.placement, page_size
        features = torch.cat([read_features(*run, text, layers, pair.kv_scales) for text in texts])
        self._outputs = dict(zip(layers, features.chunk(len(layers), dim=-1), strict=True))

    def features(self, taps: Sequence[int]) -> Tensor:
        """The outputs of these layers, [T, F]."""
        return torch.cat([self._outputs[tap] for tap in taps], dim=-1)


class ReadingScreen:
    """Texts to draft along. `own` is the draft's own config with K tokens; of a longer block, only K tokens count."""

    def __init__(self, texts: KnownTexts, own: DraftConfig) -> None:
        self._texts, self._num_drafts = texts, own.num_draft_tokens
        self._is_anchor_first, num_drafts = own.sample_from_anchor, own.num_draft_tokens
        self._last: tuple[tuple[object, ...], dict[str, Tensor], KVCache] | None = None
        self._anchors = [
            (index, position)
            for index, (start, end) in enumerate(texts.spans)
            for position in range(start, end - num_drafts)
        ]

    def score(self, pair: LoadedPair, max_anchors: int) -> Score:
        """The score over at most `max_anchors` anchors, in tokens per block, the target's own token included."""
        stride = max(1, -(-len(self._anchors) // max_anchors))
        chosen = self._anchors[::stride]
        if not chosen:
            return Score(1.0, 1.0, 0.0)
        found = self._foretell(pair, chosen)
        accepted = self._texts.pages.count_right(chosen, found.ids[:, : self._num_drafts])
        chances, losses = found.chances[:, : self._num_drafts], found.losses[:, : self._num_drafts]
        assert pair.draft is not None
        # The fill-in layout gives a token less per block. Another shorter block says nothing about its last tokens.
        is_other_layout = self._is_anchor_first and not pair.draft.config.sample_from_anchor
        missing = self._num_drafts - is_other_layout - losses.shape[1]
        if missing > 0:
            losses = functional.pad(losses, (0, missing), value=math.log(pair.limits.vocab_size))
        return Score(
            accepted=1 + float(accepted.float().mean()),
            expected=1 + float(chances.cumprod(dim=1).sum(dim=1).mean()),
            loss=float(mean_loss(losses)),
        )

    def training_gain(self, draft: Trainable, max_anchors: int) -> float:
        """The share of the loss that a step of training saves (`further_training`), at some anchors.

        Raises:
            torch.OutOfMemoryError: memory does not hold the gradients.
        """
        return training_gain(draft.weights, self._training_loss(draft, max_anchors))

    def pulls(self, draft: Trainable, max_anchors: int) -> Weights:
        """Each value of the weights times its gradient, at some anchors (`further_training.pulls`).

        Raises:
            torch.OutOfMemoryError: memory does not hold the gradients.
        """
        return pulls(draft.weights, self._training_loss(draft, max_anchors))

    def _training_loss(self, draft: Trainable, max_anchors: int) -> Loss:
        parts, num_drafts = halves(self._anchors, max_anchors), draft.config.num_draft_tokens
        # A copy, because tensors of inference mode cannot be saved for gradients.
        features = self._texts.features(draft.config.target_layer_ids).clone()

        def loss(weights: Weights, half: int) -> Tensor:
            losses = self._texts.pages.losses(draft.build(weights), features, parts[half], num_drafts)
            return mean_loss(losses[:, : self._num_drafts])

        return loss

    def walk(self, pair: LoadedPair, *, is_whole: bool = False) -> StepCounts:
        """(tokens, steps) of each text, for steps with room for a whole block. Whole blocks count if `is_whole`."""
        num_drafts = pair.limits.num_draft_tokens if is_whole else self._num_drafts
        positions = [start for start, _ in self._texts.spans]
        tokens, steps = [0] * len(positions), [0] * len(positions)
        while waiting := [
            (index, positions[index])
            for index, (_, end) in enumerate(self._texts.spans)
            if positions[index] < end - max(num_drafts, self._num_drafts)
        ]:
            found = self._foretell(pair, waiting)
            accepted = self._texts.pages.count_right(waiting, found.ids[:, :num_drafts])
            for (index, _), count in zip(waiting, accepted.tolist(), strict=True):
                positions[index] += count + 1
                tokens[index] += count + 1
                steps[index] += 1
        return list(zip(tokens, steps, strict=True))

    def _foretell(self, pair: LoadedPair, anchors: Sequence[Anchor]) -> Foretold:
        assert pair.draft is not None
        return self._texts.pages.foretell(pair.draft, self._context(pair), anchors, pair.limits.num_draft_tokens)

    def _context(self, pair: LoadedPair) -> KVCache:
        """The draft's context KV of all texts under this reading, reused from the last reading if it is the same."""
        assert pair.draft is not None
        config, weights = pair.draft.config, pair.draft_weights or {}
        settings = (config.target_layer_ids, config.rope, config.rms_norm_eps)
        read = {name: tensor for name, tensor in weights.items() if OF_CONTEXT.match(name)}
        if self._last is not None and self._last[0] == settings and _are_same(self._last[1], read):
            return self._last[2]
        cache = self._texts.pages.write_context(pair.draft, self._texts.features(config.target_layer_ids))
        self._last = (settings, read, cache)
        return cache


def _are_same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Whether both have the same tensors under the same names. Readings may exchange names only."""
    return first.keys() == second.keys() and all(tensor is second[name] for name, tensor in first.items())


def mean_loss(losses: Tensor) -> Tensor:
    """The mean of losses [R, K], with less weight on later positions, as in training."""
    weights = torch.exp(-torch.arange(losses.shape[1], device=losses.device) / LOSS_DECAY)
    return (losses * weights).sum(dim=1).mean() / weights.sum()
