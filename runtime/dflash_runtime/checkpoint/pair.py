"""A draft and a target as the runtime reads them, and the check that they fit each other. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from dflash_runtime.checkpoint.quantised.fp8_format import refuse_packed_unless_fp8
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.targets.hf_config import read_target_config
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import PairMismatch
from dflash_runtime.json_values import is_int
from dflash_runtime.target_config import TargetConfig, TargetFacts

COPY_TARGET = "copy or download the target again"
"""Hint of errors about a target's files."""


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft's canonical config and the checkpoint that holds its tensors under canonical names."""

    config: DraftConfig
    checkpoint: Checkpoint

    def check_runnable(self) -> None:
        """See `DraftLike`."""
        refuse_packed_unless_fp8(self.checkpoint)


class DraftLike(Protocol):
    """An object with a draft's canonical config and checkpoint: a `DraftSource` or an opened draft."""

    @property
    def config(self) -> DraftConfig: ...

    @property
    def checkpoint(self) -> Checkpoint: ...

    def check_runnable(self) -> None:
        """Refuse a draft that the runtime cannot load, or would compute differently from its engine.

        Raises:
            UnsupportedError: names the setting or the weights.
        """


@dataclass(frozen=True, slots=True)
class TargetSource:
    """The facts of a target (a `TargetConfig` if the runtime can run it) and the checkpoint with its tensors."""

    facts: TargetFacts
    checkpoint: Checkpoint

    @property
    def config(self) -> TargetConfig:
        """The config that running the target needs.

        Raises:
            UnsupportedError: the target is not a decoder that this runtime runs.
            InvalidConfig: a key is missing or wrong.
        """
        if isinstance(self.facts, TargetConfig):
            return self.facts
        return read_target_config(self.checkpoint.config, self.checkpoint.config_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetExpectations:
    """A draft's statements about the target it was made for, None if it states nothing.

    Values come from a config that may be broken, so they may have any type. Only `vocab_size` and `num_target_layers`
    are compared whatever their type is; other values are compared if they are integers, because rules on the config
    report the rest. `target_layer_ids` are the tapped layers, counted from 0.
    """

    hidden_size: object
    target_hidden_size: object
    vocab_size: object
    mask_token_id: object
    target_layer_ids: tuple[int, ...]
    num_target_layers: object

    @classmethod
    def of(cls, draft: DraftConfig) -> "TargetExpectations":
        """Return the statements of a draft with a readable config."""
        return cls(
            hidden_size=draft.hidden_size,
            target_hidden_size=draft.target_hidden_size,
            vocab_size=draft.vocab_size,
            mask_token_id=draft.mask_token_id,
            target_layer_ids=draft.target_layer_ids,
            num_target_layers=draft.num_target_layers,
        )


@dataclass(frozen=True, slots=True)
class Misfit:
    """A field of a draft that does not fit the target: its name, its value, and the target's value in words."""

    field: str
    found: str
    target: str

    def __str__(self) -> str:
        return f"{self.field} {self.found}, {self.target}"


def find_misfits(draft: TargetExpectations, target: TargetFacts) -> Iterator[Misfit]:
    """Yield each field that shows that the draft was not made for this target."""
    yield from _width_misfits(draft, target)
    if draft.vocab_size is not None and draft.vocab_size != target.vocab_size:
        yield Misfit("vocab_size", repr(draft.vocab_size), f"the target's is {target.vocab_size}")
    if is_int(draft.mask_token_id) and draft.mask_token_id >= target.vocab_size:
        yield Misfit(
            "mask_token_id", str(draft.mask_token_id), f"which is outside the target's {target.vocab_size} embeddings"
        )
    highest = max(draft.target_layer_ids, default=-1)
    if highest >= target.num_layers:
        yield Misfit(
            "target_layer_ids",
            f"names layer {highest} (counted from 0)",
            f"the target has layers 0..{target.num_layers - 1}",
        )
    if draft.num_target_layers is not None and draft.num_target_layers != target.num_layers:
        yield Misfit("num_target_layers", repr(draft.num_target_layers), f"the target has {target.num_layers} layers")


def _width_misfits(draft: TargetExpectations, target: TargetFacts) -> Iterator[Misfit]:
    """Compare widths. A draft reads the target's hidden states, and shares its embedding unless it states a width."""
    stated, width = draft.target_hidden_size, draft.hidden_size
    if not is_int(width):
        return
    if is_int(stated) and stated != target.hidden_size:
        yield Misfit("target_hidden_size", str(stated), f"the target's hidden_size is {target.hidden_size}")
    elif not is_int(stated) and width != target.hidden_size:
        yield Misfit("hidden_size", str(width), f"the target's is {target.hidden_size}")


def check_pair(draft: DraftLike, target: TargetSource) -> None:
    """Refuse a draft that was not made for this target.

    Raises:
        PairMismatch: `field` is the first misfit's, `found` has the names of all.
    """
    misfits = list(find_misfits(TargetExpectations.of(draft.config), target.facts))
    if misfits:
        raise PairMismatch(
            f"does not fit the target {target.checkpoint.path}: {'; '.join(map(str, misfits))}",
            path=draft.checkpoint.path,
            field=misfits[0].field,
            found=tuple(misfit.field for misfit in misfits),
            hint="pass the target this draft was trained for with --target",
        )
