"""Compare the logits of a draft and its converted form for the same inputs, in float32 on the CPU.

The features of each target layer are random numbers seeded with the layer's number, so a draft that taps other layers
gets other features. The embedding and the head are the target's if a target is given, and random otherwise. A draft
that walks chooses its first token after a fixed one, so its scores for that token are compared, too.

Axis letters: T context rows, N block rows, F features, V output vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.target_copies import target_tensor
from dflash_runtime.checkpoint.layout import EMBEDDING, HEAD
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import GateFailed

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-5
"""The largest difference, relative to the largest logit. Heads of different heights round differently."""

IMPOSSIBLE = -60.0
"""Log probability that stands for any lower one."""

MIN_CONTEXT_LEN = 64


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """The largest difference between the logits of two drafts, over the ids that both propose."""

    max_difference: float
    largest_logit: float
    same_best_share: float


def verify_logits(
    source: DraftCheckpoint,
    result: DraftCheckpoint,
    target: TargetSource | None = None,
    *,
    is_rounded: bool = False,
) -> LogitComparison:
    """Compare the logits of two drafts. Logits of a result that `is_rounded` to another number format may differ.

    Raises:
        GateFailed: the logits differ by more than TOLERANCE.
    """
    import torch

    borrowed = _borrow(source.config, target)
    with torch.inference_mode():
        one, other = (DraftBlock.after(item, borrowed, _features(item.config)) for item in (source, result))
        columns = torch.full((source.config.vocab_size,), -1)
        columns[other.target_ids] = torch.arange(len(other.target_ids))
        columns = columns[one.target_ids]
        is_shared, shared = columns >= 0, columns[columns >= 0]
        ours = torch.cat((one.logits()[:, is_shared], _centred(one.first_scores()[:, is_shared])))
        theirs = torch.cat((other.logits()[:, shared], _centred(other.first_scores()[:, shared])))
        found = LogitComparison(
            max_difference=float((ours - theirs).abs().max()),
            largest_logit=float(ours.abs().max()),
            same_best_share=float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()),
        )
    if not is_rounded and not found.max_difference <= TOLERANCE * max(1.0, found.largest_logit):
        raise GateFailed(
            f"the result's logits differ from the source's by up to {found.max_difference:g}; the largest logit is "
            f"{found.largest_logit:g}",
            id="logits-differ",
            found=found.max_difference,
            expected=f"at most {TOLERANCE:g} of the largest logit",
        )
    return found


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """A loaded draft, and the ids [1, N], positions [1, N] and attention of one block."""

    model: Any
    inputs: "tuple[Tensor, Tensor, Any]"

    @classmethod
    def after(cls, draft: DraftCheckpoint, borrowed: Any, features: "Tensor", anchor_id: int = 0) -> "DraftBlock":
        """Load a draft, and give it a block after a context of features [T, F]."""
        import torch

        from dflash_kernels.suite import REFERENCE
        from dflash_runtime.device.storage.kv import KVCache, PagedAttention
        from dflash_runtime.drafts.draft import load_draft
        from dflash_runtime.models.placement import Placement

        config, context_len = draft.config, len(features)
        num_rows = config.num_draft_tokens + 1
        placement = Placement(torch.device("cpu"), torch.float32, REFERENCE, context_len + num_rows)
        model = load_draft(draft.source, borrowed, placement)
        cache = KVCache(config, 1, context_len, placement)
        model.write_context(features, torch.arange(context_len), cache, torch.arange(context_len))
        ids = torch.full((1, num_rows), config.mask_token_id)
        ids[0, 0] = anchor_id
        attend = PagedAttention.in_order(REFERENCE, cache, context_len, config.causal, config.windows)
        return cls(model, (ids, torch.arange(context_len, context_len + num_rows)[None], attend))

    @property
    def target_ids(self) -> "Tensor":
        """The target's token id of each column, [V]."""
        import torch

        config, ids = self.model.config, self.model.target_ids
        return torch.arange(config.vocab_size) if ids is None else ids

    def logits(self) -> "Tensor":
        """Logits [K, V], without the choice of tokens before."""
        logits: Tensor = self.model.logits(*self.inputs)[0]
        return logits

    def first_scores(self) -> "Tensor":
        """Log probabilities [1, V] of the first token of a draft that walks; [0, V] for other drafts."""
        import torch

        from dflash_runtime.drafts.draft import Draws, WalkingDraft

        if not isinstance(self.model, WalkingDraft):
            return torch.empty(0, len(self.target_ids))
        position = self.inputs[1][:, 1:2]
        draws = Draws(torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.int64), position)
        probs = self.model.propose(*self.inputs, 1, draws).distribution
        assert isinstance(probs, torch.Tensor), "the references write whole distributions"
        return probs.log().clamp(min=IMPOSSIBLE).float()


def _centred(rows: "Tensor") -> "Tensor":
    """Rows of log probabilities, less each row's largest: sums over other sets of tokens differ."""
    return rows - rows.amax(-1, keepdim=True) if len(rows) else rows


def _context_len(config: DraftConfig) -> int:
    """The number of context rows: more than every window, if the draft's positions allow it."""
    windows = [window for window in config.windows if window is not None]
    wanted = max(MIN_CONTEXT_LEN, *(window + 8 for window in windows)) if windows else MIN_CONTEXT_LEN
    return max(1, min(wanted, config.max_position_embeddings - config.num_draft_tokens - 1))


def _features(config: DraftConfig) -> "Tensor":
    """Random features [T, F], with a generator for each tapped layer."""
    import torch

    context_len = _context_len(config)
    parts = [
        torch.randn(context_len, config.feature_size, generator=torch.Generator().manual_seed(layer))
        for layer in config.target_layer_ids
    ]
    return torch.cat(parts, dim=-1)


@dataclass(frozen=True, slots=True)
class _Borrowed:
    """The weights that a draft borrows from its target. The embedding is not scaled."""

    embedding: Any
    head: Any
    embedding_scale: float = 1.0


def _borrow(config: DraftConfig, target: TargetSource | None) -> _Borrowed:
    import torch

    from dflash_runtime.models.layers import Linear

    def rows(name: str, seed: int) -> "Tensor":
        info = target_tensor(target, name) if target is not None else None
        if target is not None and info is not None:
            return target.checkpoint.load(info.name).float()
        return torch.randn(config.vocab_size, config.hidden_size, generator=torch.Generator().manual_seed(seed))

    return _Borrowed(rows(EMBEDDING, -1), Linear(rows(HEAD, -2)))
