"""Kinds of faults for drafts that choose their tokens one after another: DFlash 2 and DSpark.

A mild fault of convolutions is in one layer, a strong one in all layers.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from planted_faults.kinds import Config, Kind, NotApplicable, Strength, Tensors, by_column, kinds

DFLASH2, DSPARK = "dflash2", "dspark"
WALKING = (DFLASH2, DSPARK)

SHARED = (
    "first tap elsewhere", "blocks of fc rotated", "rope base high", "mask of another id", "causal", "short block",
    "embedding scaled",
)  # fmt: skip
"""Kinds of DFlash drafts that are also planted in drafts of both families."""

BEFORE, AFTER = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
PREDECESSORS, SUCCESSORS = (f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor"))
PROJECTION = "candidate_selector.hidden_projection.weight"
BASE, DYNAMIC = "base_kernel", "kernel_projection.weight"
CONVOLUTIONS = ("attention_conv", "mlp_conv")


def every_kind() -> Iterator[Kind]:
    """Every kind of every family."""
    for kind in kinds():
        yield replace(kind, families=(*kind.families, *WALKING)) if kind.name in SHARED else kind
    yield from walking_kinds()


def walking_kinds() -> Iterator[Kind]:
    """The kinds that only these families have."""
    yield Kind("is_causal not stated, layers slide", all_sliding, "R02|C19|causal", WALKING)
    yield Kind("logits scaled", nested(output_multiplier=(8.0, 0.05)), "R17|scale of the logits", WALKING)
    yield Kind("logits capped", nested(final_logit_softcapping=(6.0, 2.0)), "R17|cap of the logits", WALKING)
    yield from convolution_kinds()
    yield from pair_kinds(DFLASH2, "codebook", PREDECESSORS, SUCCESSORS)
    yield from pair_kinds(DSPARK, "Markov factor", BEFORE, AFTER)
    yield from selector_kinds()
    yield from markov_kinds()


def nested(**values: tuple[Any, Any]) -> Callable[[Config, Tensors, Strength], None]:
    def plant(config: Config, _: Tensors, strength: Strength) -> None:
        config["dflash_config"].update({key: pair[strength == "strong"] for key, pair in values.items()})

    return plant


def all_sliding(config: Config, _: Tensors, strength: Strength) -> None:
    """Every layer slides, and nothing states the causality: engines then make the draft causal."""
    del config["is_causal"]
    config["layer_types"] = ["sliding_attention"] * len(config["layer_types"])
    config.update(use_sliding_window=True, sliding_window=512 if strength == "mild" else 256)


def convolved(
    base: Callable[[Tensor], Tensor] | None, dynamic: Callable[[Tensor], Tensor] | None, only: str = "_conv"
) -> Callable[[Config, Tensors, Strength], None]:
    """Change convolutions: kernels [2, S, H], and rows of the projection as [2, S, G, H]."""

    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        taps = config["dflash_config"]["conv_kernel_size"]
        for name in list(tensors):
            is_chosen = only in name and (strength == "strong" or name.startswith("layers.1."))
            if is_chosen and name.endswith(BASE) and base is not None:
                tensors[name] = base(tensors[name]).contiguous()
            if is_chosen and name.endswith(DYNAMIC) and dynamic is not None:
                item = tensors[name]
                tensors[name] = dynamic(item.view(2, taps, -1, item.shape[1])).reshape(item.shape)

    return plant


def exchange_convolutions(_: Config, tensors: Tensors, strength: Strength) -> None:
    layers = range(3) if strength == "strong" else (1,)
    for layer in layers:
        for part in (BASE, DYNAMIC):
            one, other = (f"layers.{layer}.{name}.{part}" for name in CONVOLUTIONS)
            tensors[one], tensors[other] = tensors[other], tensors[one]


def without_itself(kernel: Tensor) -> Tensor:
    kernel = kernel.clone()
    kernel[:, 0] -= 1
    return kernel


def flipped(axis: int) -> Callable[[Tensor], Tensor]:
    return lambda item: item.flip(axis)


def noisy(item: Tensor) -> Tensor:
    random = torch.randn(item.shape, generator=torch.Generator().manual_seed(item.numel()))
    return random * item.float().std()


def convolution_kinds() -> Iterator[Kind]:
    sides, taps = (flipped(0),) * 2, (flipped(1),) * 2
    for name, plant, right in (
        ("sides of convolutions exchanged", convolved(*sides), "before and after"),
        ("sides of attention_conv exchanged", convolved(*sides, "attention_conv"), "before and after.*attention_conv"),
        ("sides of base_kernel exchanged", convolved(flipped(0), None), "before and after.*base_kernel"),
        ("taps of convolutions reversed", convolved(*taps), "taps of convolutions"),
        ("taps of mlp_conv reversed", convolved(*taps, "mlp_conv"), "taps of convolutions.*mlp_conv"),
        ("attention_conv and mlp_conv exchanged", exchange_convolutions, "attention_conv and mlp_conv are exchanged"),
        ("kernels without the row itself", convolved(without_itself, None), "offsets from the row"),
        ("kernel_projection by groups", convolved(None, lambda item: item.permute(2, 0, 1, 3)), "rows of kernel_proj"),
        ("kernel_projection negated", convolved(None, lambda item: -item), "kernel_projection are scaled or negated"),
        ("base_kernel times 2", convolved(lambda item: item * 2, None), "base_kernel are scaled or negated"),
    ):
        yield Kind(name, plant, right, (DFLASH2,))
    yield Kind(
        "base_kernel replaced by noise", convolved(noisy, None), "convolutions are damaged|base_kernel", (DFLASH2,),
        is_undoable=False,
    )  # fmt: skip


def edit(change: Callable[[Tensor, Strength], Tensor], *names: str) -> Callable[[Config, Tensors, Strength], None]:
    def plant(_: Config, tensors: Tensors, strength: Strength) -> None:
        for name in names:
            if name not in tensors:
                raise NotApplicable(name)
            tensors[name] = change(tensors[name], strength).contiguous()

    return plant


def rolled(item: Tensor, strength: Strength) -> Tensor:
    return item.roll(1 if strength == "mild" else -1, 0)


def pair_kinds(family: str, title: str, first: str, second: str) -> Iterator[Kind]:
    """Faults of two tables with a row per token."""
    one, other = (name.split(".")[1] for name in (first, second))

    def exchange(_: Config, tensors: Tensors, __: Strength) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    for name, plant, right in (
        (f"{title}s exchanged", exchange, f"{one} and {other} are exchanged"),
        (f"rows of the first {title} shifted", edit(rolled, first), f"rows of {one} belong"),
        (f"rows of the second {title} shifted", edit(rolled, second), f"rows of {other} belong"),
        (f"rows of both {title}s shifted", edit(rolled, first, second), f"rows of {one} and {other} belong"),
        (f"second {title} by columns", edit(lambda item, _: by_column(item), second), f"{other} are stored by columns"),
        (f"columns of the second {title} reversed", edit(lambda item, _: item.flip(1), second), "columns of.*order"),
        (f"second {title} scaled", edit(scaled, second), f"{other} are scaled or negated"),
    ):
        yield Kind(name, plant, right, (family,))
    noise = edit(lambda item, _: noisy(item), first)
    right = f"{first}|the (selector|Markov head) is damaged"
    yield Kind(f"first {title} replaced by noise", noise, right, (family,), is_undoable=False)


def scaled(item: Tensor, strength: Strength) -> Tensor:
    return item * (4 if strength == "mild" else -1)


def selector_kinds() -> Iterator[Kind]:
    right = "values of hidden_projection are in another order"
    halved = edit(lambda item, _: item.roll(len(item) // 2, 0), PROJECTION)
    yield Kind("halves of hidden_projection exchanged", halved, right, (DFLASH2,))
    zero = edit(lambda item, strength: item * (0.0 if strength == "strong" else 0.1), SUCCESSORS)
    yield Kind("the selector hardly counts", zero, "N13.*codebook|codebook.*scaled", (DFLASH2,), is_undoable=False)
    yield Kind("few candidates", nested(selector_top_k=(2, 1)), "R15|candidates", (DFLASH2,))


def markov_kinds() -> Iterator[Kind]:
    def fill_in(config: Config, _: Tensors, strength: Strength) -> None:
        config.update(sample_from_anchor=False, dspark_bonus_anchor=True)
        if strength == "strong":
            del config["dspark_bonus_anchor"]

    def few(config: Config, _: Tensors, strength: Strength) -> None:
        config["dspark_draft_topk"] = 2 if strength == "mild" else 1

    def gated(config: Config, tensors: Tensors, strength: Strength) -> None:
        if strength == "mild":
            config["markov_head_type"] = "gated"
        else:
            tensors["markov_head.gate_proj.weight"] = torch.zeros(64, 256)

    yield Kind("fill-in stated", fill_in, "R12|anchor-first", (DSPARK,))
    yield Kind("few candidates of the bias", few, "R15|candidates", (DSPARK,))
    yield Kind("another kind of Markov head", gated, "N01|N02", (DSPARK,))
