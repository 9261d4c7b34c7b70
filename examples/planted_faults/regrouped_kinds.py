"""Kinds of faults in the grouping of intact values: by layers, shards, taps, heads or dimensions."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from planted_faults.kinds import MLP, Config, Kind, NotApplicable, Strength, Tensors, axis, both, edit, inside


def rolled(*parts: str) -> Any:
    """Parts of every layer moved to the next layer, or to the layer before."""

    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        count = config["num_hidden_layers"]
        if count < 3:
            raise NotApplicable("an exchange")
        old = {name: item for name, item in tensors.items() if any(f".{part}." in name for part in parts)}
        for name, item in old.items():
            layer = int(name.split(".")[1])
            new = (layer + (1 if strength == "mild" else -1)) % count
            tensors[name.replace(f"layers.{layer}.", f"layers.{new}.")] = item

    return plant


def dealt(dims: dict[str, int]) -> Any:
    """Rows or columns of every matrix dealt to two or four shards in turn."""

    def plant(_: Config, tensors: Tensors, strength: Strength) -> None:
        count = 2 if strength == "mild" else 4
        for name, item in tensors.items():
            part = name.split(".")[-2]
            if part in dims:
                order = torch.arange(item.shape[dims[part]]).view(-1, count).t().flatten()
                tensors[name] = item.index_select(dims[part], order).contiguous()

    return plant


def in_blocks(config: Config, tensors: Tensors, strength: Strength) -> None:
    """Columns of fc with a block of each tap, then the next block of each tap."""
    weight, count = tensors["fc.weight"], len(config["dflash_config"]["target_layer_ids"])
    size = 2 if strength == "mild" else 16
    tensors["fc.weight"] = weight.view(len(weight), count, -1, size).transpose(1, 2).reshape(weight.shape).contiguous()


def first_dimensions(change: Callable[[int], Tensor]) -> Any:
    """The first half or quarter of the dimensions of every head in another order."""

    def of(item: Tensor, config: Config, strength: Strength) -> Tensor:
        count = config["head_dim"] // (2 if strength == "mild" else 4)
        reordered: Tensor = inside(lambda size: torch.cat((change(count), torch.arange(count, size))))(
            item, config, strength
        )
        return reordered

    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        for name in [name for name in tensors if "q_proj" in name or "k_proj" in name]:
            tensors[name] = of(tensors[name], config, strength).contiguous()

    return plant


def side_by_side(count: int) -> Tensor:
    return torch.arange(count).view(2, -1).t().flatten()


def as_query_heads(item: Tensor, config: Config, _: Strength) -> Tensor:
    """Keys with dimensions paired as if there were as many KV heads as query heads."""
    rows = torch.arange(len(item)).view(config["num_attention_heads"], -1)
    return item[rows[:, side_by_side(rows.shape[1])].flatten()]


def ranks(item: Tensor, _: Config, strength: Strength) -> Tensor:
    first, second, third, fourth = item.chunk(4)
    return torch.cat((second, first, third, fourth) if strength == "mild" else (third, fourth, second, first))


def in_all_but_one(part: str, factor: float) -> Any:
    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        if config["num_hidden_layers"] < 3:
            raise NotApplicable("two layers")
        kept = 0 if strength == "mild" else config["num_hidden_layers"] - 1
        for name in tensors:
            if f".{part}." in name and f"layers.{kept}." not in name:
                tensors[name] = tensors[name] * factor

    return plant


def of_windows(change: Any) -> Any:
    """A change of the layers with a window only."""

    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        chosen = [at for at, kind in enumerate(config["layer_types"]) if kind == "sliding_attention"]
        if not 1 < len(chosen) < config["num_hidden_layers"]:
            raise NotApplicable("windows")
        own = {name: item for name, item in tensors.items() if any(name.startswith(f"layers.{at}.") for at in chosen)}
        change(config, own, "strong")
        tensors.update(own)

    return plant


def regrouped_kinds() -> Iterator[Kind]:
    yield Kind("MLP rolled over layers", rolled(*MLP), "MLP")
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    yield Kind("attention rolled over layers", rolled(*attention), "attention")
    rows = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", *MLP), 0)
    yield Kind("rows dealt to shards", dealt(rows), "matrices")
    yield Kind("parallel matrices dealt to shards", dealt({**rows, "o_proj": 1, "down_proj": 1}), "matrices")
    yield Kind("features in blocks of each tap", in_blocks, "fc|tap")
    yield Kind("rope of the first dimensions", first_dimensions(side_by_side), "rope|q_proj|dimensions")
    yield Kind("keys paired as query heads", edit("k_proj", as_query_heads), "k_proj|rope")
    yield Kind("ranks of fc exchanged", edit("fc", ranks), "fc")
    yield Kind(
        "v_proj scaled in all layers but one", in_all_but_one("v_proj", 1 / 23), "[vo]_proj are scaled|or o_proj"
    )
    windows = both(*(edit(part, inside(side_by_side)) for part in ("q_proj", "k_proj")))
    yield Kind("rope layout of layers with a window", of_windows(windows), "rope", ("windowed",))
    yield Kind("channels of up_proj dealt", edit("up_proj", axis(side_by_side, 0)), "MLP|up_proj")
