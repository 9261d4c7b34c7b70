"""A draft and a target as the runtime takes them, and whether they fit each other. Needs no torch."""

from dataclasses import dataclass
from typing import Protocol

from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.config import DraftConfig, TargetConfig
from dflash_runtime.errors import PairMismatch


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft's canonical config and the checkpoint that holds its tensors under canonical names."""

    config: DraftConfig
    checkpoint: Checkpoint


class DraftLike(Protocol):
    """Whatever has a draft's canonical config and its checkpoint: a `DraftSource`, or what opened the files."""

    @property
    def config(self) -> DraftConfig: ...

    @property
    def checkpoint(self) -> Checkpoint: ...


@dataclass(frozen=True, slots=True)
class TargetSource:
    """A target's config and the checkpoint that holds its tensors."""

    config: TargetConfig
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Misfit:
    """One way in which a draft does not fit a target: the draft's field, and what is wrong in words."""

    field: str
    message: str


def find_misfits(draft: DraftConfig, target: TargetConfig) -> list[Misfit]:
    """Every way in which the draft cannot have been made for this target; empty where they fit."""
    misfits = []
    if draft.feature_size != target.hidden_size:
        misfits.append(
            Misfit(
                "hidden_size",
                f"the draft reads features {draft.feature_size} wide, the target's hidden_size is {target.hidden_size}",
            )
        )
    elif draft.hidden_size != target.hidden_size:
        misfits.append(
            Misfit(
                "hidden_size",
                f"the draft's hidden_size is {draft.hidden_size}, but it borrows an embedding and a head "
                f"{target.hidden_size} wide",
            )
        )
    if draft.vocab_size != target.vocab_size:
        misfits.append(
            Misfit(
                "vocab_size",
                f"the draft's vocab_size is {draft.vocab_size}, the target's is {target.vocab_size}",
            )
        )
    if draft.mask_token_id >= target.vocab_size:
        misfits.append(
            Misfit(
                "mask_token_id",
                f"mask_token_id {draft.mask_token_id} is outside the target's {target.vocab_size} embeddings",
            )
        )
    if max(draft.target_layer_ids) >= target.num_layers:
        misfits.append(
            Misfit(
                "target_layer_ids",
                f"layer {max(draft.target_layer_ids)} is tapped, the target has layers 0..{target.num_layers - 1}",
            )
        )
    if draft.num_target_layers not in (None, target.num_layers):
        misfits.append(
            Misfit(
                "num_target_layers",
                f"the draft was made for a target of {draft.num_target_layers} layers, this one has "
                f"{target.num_layers}",
            )
        )
    return misfits


def check_pair(draft: DraftLike, target: TargetSource) -> None:
    """Refuse a draft that was not made for this target.

    Raises:
        PairMismatch: naming every misfit.
    """
    misfits = find_misfits(draft.config, target.config)
    if misfits:
        raise PairMismatch(
            f"does not fit the target {target.checkpoint.path}: {'; '.join(misfit.message for misfit in misfits)}",
            path=draft.checkpoint.path,
            hint="pass the target this draft was trained for with --target",
        )
