"""One reading of a draft's tensors, the draft that it reads, and the words for its parts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.weight_rewrites import ENDS, HEAD_NORMS, LAYER_NORMS, Rewrite, Spot
from dflash_runtime.draft_config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor

Where = int | tuple[int, ...] | None
"""One layer, several layers, or all layers (None)."""

MOST_LAYERS_ALONE = 8
"""In drafts with more layers, single layers are not tried."""

IN_LAYERS = (*rewrites.STACKED, "self_attn.o_proj", "mlp.down_proj", *HEAD_NORMS, *LAYER_NORMS)


@dataclass(frozen=True, slots=True)
class WeightReading:
    """One rewrite with its name and the fault that it would undo.

    touches      the parts that it changes, each in one layer, or in all layers (None)
    is_guess     it is one of many, to be tried only if a probe makes one of its parts suspect
    is_neutral   it leaves a part out: a damaged part harms more than a missing one, but nothing is restored
    is_scale     it multiplies a part by a factor
    changes_values   it changes values in another way than by a factor: offsets, bits, zero points
    shift        the amount that it adds to norms
    equal        names of readings that equal it by the algebra of the network
    halves       the halves of an exchange. Each of them accepts less than the exchange, if the parts are exchanged.
    """

    name: str
    rewrite: Rewrite
    cause: str
    touches: frozenset[Spot]
    is_guess: bool = False
    is_neutral: bool = False
    is_scale: bool = False
    changes_values: bool = False
    shift: float = 0.0
    equal: tuple[str, ...] = ()
    halves: tuple[Rewrite, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightSpace:
    """A draft's config and its weights as the runtime holds them. Without weights, nothing is looked at."""

    config: DraftConfig
    weights: "Mapping[str, Tensor]" = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        """Whether the tensors belong to a DFlash draft; a draft of another family has other tensors."""
        layers = (f"layers.{number}.{name}.weight" for number in range(self.config.num_layers) for name in IN_LAYERS)
        return not self.weights or {*(f"{name}.weight" for name in ENDS), *layers} <= self.weights.keys()

    @property
    def layers(self) -> tuple[int | None, ...]:
        """None for all layers together, then every single layer."""
        count = self.config.num_layers
        return (None, *(range(count) if 1 < count <= MOST_LAYERS_ALONE else ()))

    @property
    def groups(self) -> "tuple[Where, ...]":
        """The same, and all layers with a window, and all layers without one."""
        windows = self.config.windows
        kinds = [tuple(at for at, width in enumerate(windows) if (width is None) == is_full) for is_full in (0, 1)]
        return (*self.layers, *(kind for kind in kinds if 1 < len(kind) < len(windows)))


def spots(parts: Iterable[str], where: Where) -> frozenset[Spot]:
    layers = where if isinstance(where, tuple) else (where,)
    return frozenset((part, None if part in ENDS else layer) for part in parts for layer in layers)


def named(name: str, where: Where) -> str:
    if where is None:
        return name
    return f"{name} in layer {where}" if isinstance(where, int) else f"{name} in layers {', '.join(map(str, where))}"


def only(where: Where) -> tuple[int, ...] | None:
    return (where,) if isinstance(where, int) else where


def short(part: str) -> str:
    return part.rpartition(".")[2]
