"""A draft and a target as the runtime takes them, and whether they fit each other. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from dflash_runtime.checkpoint.canonical_names import find_quantization, refuse_packed
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.hf_config import read_target_config
from dflash_runtime.config import DraftConfig, TargetConfig, TargetFacts
from dflash_runtime.errors import PairMismatch
from dflash_runtime.json_values import is_int


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft's canonical config and the checkpoint that holds its tensors under canonical names."""

    config: DraftConfig
    checkpoint: Checkpoint

    def check_runnable(self) -> None:
        """See `DraftLike`."""
        refuse_packed(self.checkpoint.path, find_quantization(self.checkpoint))


class DraftLike(Protocol):
    """Whatever has a draft's canonical config and its checkpoint: a `DraftSource`, or what opened the files."""

    @property
    def config(self) -> DraftConfig: ...

    @property
    def checkpoint(self) -> Checkpoint: ...

    def check_runnable(self) -> None:
        """Refuse what the runtime cannot load, or would compute otherwise than the file says.

        Raises:
            UnsupportedError: naming it.
        """


@dataclass(frozen=True, slots=True)
class TargetSource:
    """What is known of a target, a `TargetConfig` where it can be run, and the checkpoint that holds its tensors."""

    facts: TargetFacts
    checkpoint: Checkpoint

    @property
    def config(self) -> TargetConfig:
        """What running it needs.

        Raises:
            UnsupportedError: it is no dense decoder, which is all the runtime runs.
            InvalidConfig: a key is missing or wrong.
        """
        if isinstance(self.facts, TargetConfig):
            return self.facts
        return read_target_config(self.checkpoint.config, self.checkpoint.config_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetExpectations:
    """What a draft states of the target it was made for, None where it states nothing.

    Values come from a config that may be broken, so they may be of any type. A value that is no integer is left to the
    rules on the config itself; only `vocab_size` and `num_target_layers` are compared whatever their type is.
    `target_layer_ids` are the layers whose outputs are tapped, counted from 0.
    """

    hidden_size: object
    target_hidden_size: object
    vocab_size: object
    mask_token_id: object
    target_layer_ids: tuple[int, ...]
    num_target_layers: object

    @classmethod
    def of(cls, draft: DraftConfig) -> "TargetExpectations":
        """Those of a draft that was read."""
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
    """One way in which a draft does not fit a target: a field of the draft, its value, and the target's value."""

    field: str
    found: str
    target: str

    def __str__(self) -> str:
        return f"{self.field} {self.found}, {self.target}"


def find_misfits(draft: TargetExpectations, target: TargetFacts) -> Iterator[Misfit]:
    """Every way in which the draft cannot have been made for this target."""
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
    """The draft reads the target's hidden states, and borrows its embedding and head unless it states another width."""
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
        PairMismatch: naming every misfit.
    """
    misfits = list(find_misfits(TargetExpectations.of(draft.config), target.facts))
    if misfits:
        raise PairMismatch(
            f"does not fit the target {target.checkpoint.path}: {'; '.join(map(str, misfits))}",
            path=draft.checkpoint.path,
            hint="pass the target this draft was trained for with --target",
        )
