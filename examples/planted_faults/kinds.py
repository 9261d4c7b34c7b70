"""Kinds of faults for drafts of any size: one change each, in two strengths, with a pattern of its right causes.

A kind gets a draft's config in the native dialect and its tensors, and changes both. "mild" is one layer or a small
amount, "strong" all layers or a large amount.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Strength = Literal["mild", "strong"]
STRENGTHS: tuple[Strength, ...] = ("mild", "strong")
FAMILIES = ("bundled", "windowed", "hybrid")


class NotApplicable(Exception):
    """The shapes of a draft do not allow the fault."""


@dataclass(frozen=True)
class Kind:
    """One kind of fault. `right` is a regular expression of causes that are right."""

    name: str
    plant: Callable[[Config, Tensors, Strength], object]
    right: str
    families: tuple[str, ...] = FAMILIES
    is_undoable: bool = True


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS = ("q_norm", "k_norm")
NORMS = (*HEAD_NORMS, *LAYER_NORMS, "hidden_norm")
SAME = {
    "q_norm": "[qk]_norm", "k_norm": "[qk]_norm", "up_proj": "(up|down)_proj|MLP", "down_proj": "(up|down)_proj|MLP",
    "v_proj": "[vo]_proj|attention", "o_proj": "[vo]_proj|attention", "q_proj": "[qk]_(proj|norm)",
    "k_proj": "[qk]_(proj|norm)", "gate_proj": "gate_proj|MLP",
}  # fmt: skip
"""Parts whose changes of some kinds cannot be told apart: part -> pattern."""


def chosen(tensors: Tensors, part: str, strength: Strength, *, last: bool = False) -> list[str]:
    """Names of a part: of one layer if mild, of all layers if strong."""
    names = sorted(name for name in tensors if f".{part}." in f".{name}")
    if not names:
        raise NotApplicable(part)
    return names if strength == "strong" else [names[-1 if last else len(names) // 2]]


def edit(part: str, change: Callable[[Tensor, Config, Strength], Tensor], *, last: bool = False) -> Any:
    """Change a part."""

    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        for name in chosen(tensors, part, strength, last=last):
            tensors[name] = change(tensors[name], config, strength).contiguous()

    return plant


def both(*plants: Any) -> Any:
    return lambda config, tensors, strength: [plant(config, tensors, strength) for plant in plants]


def heads(order: Callable[[int], Tensor], dim: int = 0) -> Any:
    """Whole heads in another order."""

    def change(item: Tensor, config: Config, _: Strength) -> Tensor:
        size = config["head_dim"]
        grid = torch.arange(item.shape[dim]).view(-1, size)
        if len(grid) < 2:
            raise NotApplicable("one head")
        return item.index_select(dim, grid[order(len(grid))].flatten())

    return change


def inside(order: Callable[[int], Tensor]) -> Any:
    """The rows of every head in another order."""

    def change(item: Tensor, config: Config, _: Strength) -> Tensor:
        rows = torch.arange(len(item)).view(-1, config["head_dim"])[:, order(config["head_dim"])]
        return item[rows.flatten()]

    return change


def axis(order: Callable[[int], Tensor], dim: int) -> Any:
    return lambda item, config, strength: item.index_select(dim, order(item.shape[dim]))


def reverse(count: int) -> Tensor:
    return torch.arange(count).flip(0)


def halves(count: int) -> Tensor:
    return torch.arange(count).roll(count // 2)


def interleave(count: int) -> Tensor:
    return torch.arange(count).view(2, -1).t().flatten()


def separate(count: int) -> Tensor:
    return torch.arange(count).view(-1, 2).t().flatten()


def tiled(item: Tensor, config: Config, _: Strength, dim: int = 0) -> Tensor:
    count, groups, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    order = torch.arange(count).view(groups, -1).t().flatten()
    return item.index_select(dim, torch.arange(count * size).view(-1, size)[order].flatten())


def by_column(item: Tensor, *_: Any) -> Tensor:
    return item.t().contiguous().view(item.shape)


def times(factor: float) -> Any:
    return lambda item, *_: item * factor


def noise(share: float) -> Any:
    def change(item: Tensor, _: Config, __: Strength) -> Tensor:
        random = torch.randn(item.shape, generator=torch.Generator().manual_seed(item.numel()))
        return (1 - share) * item + share * random * item.std() * (1 if share == 1 else 4)

    return change


def faint(dim: int) -> Any:
    """Every third row or column nearly zero."""

    def change(item: Tensor, *_: Any) -> Tensor:
        item = item.clone()
        (item[::3] if dim == 0 else item[:, ::3]).mul_(0.01)
        return item

    return change


def outlier(item: Tensor, *_: Any) -> Tensor:
    item = item.clone()
    item[len(item) // 3] = 40.0
    return item


def clip(item: Tensor, *_: Any) -> Tensor:
    limit = float(item.abs().mean()) * 0.4
    return item.clamp(-limit, limit)


def exchange(first: str, second: str) -> Any:
    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        for one, other in zip(chosen(tensors, first, strength), chosen(tensors, second, strength), strict=True):
            if tensors[one].shape != tensors[other].shape:
                raise NotApplicable("shapes")
            tensors[one], tensors[other] = tensors[other], tensors[one]

    return plant


def across(*parts: str) -> Any:
    """Parts of two layers exchanged: the first two, or the first and the last."""

    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        last = 1 if strength == "mild" else config["num_hidden_layers"] - 1
        for part in parts:
            for one in [name for name in tensors if name.startswith("layers.0.") and f".{part}." in name]:
                other = one.replace("layers.0.", f"layers.{last}.")
                tensors[one], tensors[other] = tensors[other], tensors[one]

    return plant


def keep_layers(pick: Callable[[int], list[int]]) -> Any:
    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        order = pick(config["num_hidden_layers"])
        old = {name: tensors.pop(name) for name in list(tensors) if name.startswith("layers.")}
        for place, source in enumerate(order):
            for name, item in old.items():
                if name.startswith(f"layers.{source}."):
                    tensors[name.replace(f"layers.{source}.", f"layers.{place}.")] = item.clone()
        config["num_hidden_layers"] = len(order)
        config["layer_types"] = [config["layer_types"][source] for source in order]

    return plant


def config_kind(**values: tuple[Any, Any]) -> Any:
    """Config keys with a mild and a strong value."""
    return lambda config, tensors, strength: config.update(
        {key: pair[strength == "strong"] for key, pair in values.items()}
    )


def nested(change: Callable[[Config, Config, Strength], object]) -> Any:
    return lambda config, tensors, strength: change(config["dflash_config"], config, strength)


def taps(change: Callable[[list[int], int, Strength], list[int]]) -> Any:
    def plant(inner: Config, config: Config, strength: Strength) -> None:
        new = change(list(inner["target_layer_ids"]), config["num_target_layers"], strength)
        if not all(0 <= tap < config["num_target_layers"] for tap in new):
            raise NotApplicable("taps")
        inner["target_layer_ids"] = new

    return nested(plant)


def drop_tap(config: Config, tensors: Tensors, strength: Strength) -> None:
    ids, size = config["dflash_config"]["target_layer_ids"], config["hidden_size"]
    at = 0 if strength == "mild" else len(ids) - 1
    columns = list(tensors["fc.weight"].split(size, dim=1))
    del ids[at], columns[at]
    tensors["fc.weight"] = torch.cat(columns, dim=1).contiguous()


def window(width: int, strong: int) -> Any:
    def plant(config: Config, _: Tensors, strength: Strength) -> None:
        count = config["num_hidden_layers"]
        config.update(
            layer_types=["sliding_attention"] * count, use_sliding_window=True, max_window_layers=0,
            sliding_window=width if strength == "mild" else strong,
        )  # fmt: skip

    return plant


def lose_windows(config: Config, _: Tensors, strength: Strength) -> None:
    types = config["layer_types"]
    if "sliding_attention" not in types:
        raise NotApplicable("no window")
    config["layer_types"] = types[::-1] if strength == "mild" else ["full_attention"] * len(types)
    if strength == "strong":
        config.update(sliding_window=None, use_sliding_window=False)


def fc_columns(change: Callable[[Tensor, int], Tensor]) -> Any:
    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        weight, count = tensors["fc.weight"], len(config["dflash_config"]["target_layer_ids"])
        tensors["fc.weight"] = change(weight, count).reshape(weight.shape).contiguous()

    return plant


def kinds() -> Iterator[Kind]:
    """All kinds."""
    from planted_faults.layout_kinds import format_kinds, layout_kinds
    from planted_faults.regrouped_kinds import regrouped_kinds

    yield from layout_kinds()
    yield from format_kinds()
    yield from regrouped_kinds()
    yield from config_kinds()
    yield from order_kinds()
    yield from owner_kinds()
    yield from size_kinds()
    yield from damage_kinds()


def config_kinds() -> Iterator[Kind]:
    yield Kind(
        "taps later",
        taps(lambda ids, n, s: [min(i + 1, n - 1) for i in ids] if s == "strong" else [*ids[:-1], ids[-1] + 1]),
        "R01|C07|C10|tap|layer",
    )
    yield Kind(
        "taps earlier",
        taps(lambda ids, n, s: [i - 1 for i in ids] if s == "strong" else [*ids[:-2], ids[-2] - 1, ids[-1]]),
        "R01|C07|tap",
        ("windowed", "hybrid"),
    )
    yield Kind(
        "taps in another order",
        taps(lambda ids, n, s: ids[::-1] if s == "strong" else [ids[1], ids[0], *ids[2:]]),
        "R01|C07|tap",
    )
    yield Kind(
        "first tap elsewhere",
        taps(lambda ids, n, s: [ids[0] + 1 if s == "mild" else n - 1, *ids[1:]]),
        "R01|C07|C10|tap",
    )
    yield Kind("rope base low", config_kind(rope_theta=(50_000.0, 5_000.0)), "R04|P05|rope")
    yield Kind("rope base high", config_kind(rope_theta=(2e7, 1e10)), "R04|P05|rope")
    yield Kind(
        "linear rope scaling",
        config_kind(rope_scaling=({"rope_type": "linear", "factor": 2.0}, {"rope_type": "linear", "factor": 8.0})),
        "R04|P05|rope",
    )
    yield Kind(
        "mask of another id", nested(lambda i, c, s: i.update(mask_token_id=4 if s == "mild" else 60)), "R03|C14|mask"
    )
    yield Kind("window narrow", window(7, 3), "R07|window")
    yield Kind("windows lost", lose_windows, "R07|window", ("windowed",))
    yield Kind("causal", config_kind(is_causal=(True, True)), "R02|causal")
    yield Kind("large eps", config_kind(rms_norm_eps=(0.05, 1.0)), "R11|C43|eps")
    yield Kind("short block", config_kind(block_size=(5, 3)), "R08|block")
    yield Kind("long block", config_kind(block_size=(11, 20)), "R08|block")
    yield Kind(
        "embedding scaled",
        nested(lambda i, c, s: i.update(input_embedding_scale=3.0 if s == "mild" else 12.0)),
        "R10|embedding|C29",
    )
    yield Kind("a tap dropped", drop_tap, "tap", is_undoable=False)


def order_kinds() -> Iterator[Kind]:
    for part, dim in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
        yield Kind(f"heads of {part} reversed", edit(part, heads(reverse, dim)), f"heads|{SAME[part]}")
    yield Kind("KV heads reversed", both(edit("k_proj", heads(reverse)), edit("v_proj", heads(reverse))), "heads")
    yield Kind("query heads tiled", edit("q_proj", tiled), "heads|q_proj")
    yield Kind(
        "query heads tiled with outputs",
        both(edit("q_proj", tiled), edit("o_proj", lambda i, c, s: tiled(i, c, s, 1))),
        "heads",
    )
    rope = "rope|q_proj|k_proj|dimensions"
    yield Kind("interleaved rope", both(*(edit(part, inside(interleave)) for part in ("q_proj", "k_proj"))), rope)
    yield Kind(
        "interleaved rope, norms too",
        both(*(edit(part, inside(interleave)) for part in ("q_proj", "k_proj", "q_norm", "k_norm"))),
        rope,
    )
    yield Kind("rope of halves of halves", both(*(edit(part, inside(separate)) for part in ("q_proj", "k_proj"))), rope)
    yield Kind("interleaved keys only", edit("k_proj", inside(interleave)), rope)
    yield Kind("halves of queries exchanged", edit("q_proj", inside(halves)), rope)
    for part in MLP:
        yield Kind(
            f"channels of {part} in halves",
            edit(part, axis(halves, 1 if part == "down_proj" else 0)),
            "MLP|gate|up_|down",
        )
        yield Kind(
            f"channels of {part} interleaved",
            edit(part, axis(interleave, 1 if part == "down_proj" else 0)),
            "MLP|gate|up_|down",
        )
    for part in ("q_proj", "v_proj", "gate_proj", "up_proj"):
        yield Kind(f"inputs of {part} in halves", edit(part, axis(halves, 1)), f"input channels|{SAME[part]}")
    for part in ("o_proj", "down_proj"):
        yield Kind(f"outputs of {part} reversed", edit(part, axis(reverse, 0)), f"output channels|{SAME[part]}")
    yield Kind("outputs of fc in halves", edit("fc", axis(halves, 0)), "fc")
    yield Kind("features interleaved", fc_columns(lambda w, n: w.view(len(w), n, -1).transpose(1, 2)), "fc|tap")
    yield Kind("features separated", fc_columns(lambda w, n: w.view(len(w), -1, n).transpose(1, 2)), "fc|tap")
    yield Kind("blocks of fc rotated", fc_columns(lambda w, n: w.view(len(w), n, -1).roll(1, 1)), "fc|tap|R01")
    for part in (*ATTENTION, *MLP, "fc"):
        yield Kind(f"{part} by columns", edit(part, by_column), f"columns|{SAME.get(part, part)}|{part}")
    for norm in (*LAYER_NORMS, "hidden_norm", "q_norm"):
        yield Kind(f"{norm} reversed", edit(norm, axis(reverse, 0)), f"{SAME.get(norm, norm)}")


def owner_kinds() -> Iterator[Kind]:
    for first, second in (
        HEAD_NORMS,
        LAYER_NORMS,
        ("gate_proj", "up_proj"),
        ("k_proj", "v_proj"),
        ("hidden_norm", "norm"),
    ):
        yield Kind(
            f"{first} and {second} exchanged",
            exchange(first, second),
            f"{first}.*{second}|exchanged|{SAME.get(first, first)}",
        )
    groups = {
        "attention": ATTENTION, "MLP": MLP, "layer norms": LAYER_NORMS, "queries, keys and values": ATTENTION[:3],
        "keys and values": ATTENTION[1:3], "gate and up": MLP[:2],
    }  # fmt: skip
    for name, parts in groups.items():
        yield Kind(f"{name} of two layers exchanged", across(*parts), f"{name}|exchanged|layers|" + "|".join(parts))
    for part in (*ATTENTION, *MLP, *LAYER_NORMS):
        yield Kind(f"{part} of two layers exchanged", across(part), f"{part}|{SAME.get(part, part)}|layers")
    yield Kind("layers in reverse", keep_layers(lambda n: list(range(n))[::-1]), "order")
    yield Kind("layers rotated", keep_layers(lambda n: [*range(1, n), 0]), "order")
    yield Kind("last layer dropped", keep_layers(lambda n: list(range(n - 1))), "layer", is_undoable=False)
    yield Kind("first layer dropped", keep_layers(lambda n: list(range(1, n))), "layer", is_undoable=False)
    yield Kind(
        "a layer copied over", keep_layers(lambda n: [0, 0, *range(2, n)]), "N17|same values|layer 1", is_undoable=False
    )


def size_kinds() -> Iterator[Kind]:
    for norm in NORMS:
        yield Kind(f"{norm} times 4", edit(norm, times(4.0)), f"{SAME.get(norm, norm)}|N36")
        yield Kind(f"{norm} by 4", edit(norm, times(0.25)), f"{SAME.get(norm, norm)}|N36")
        yield Kind(f"{norm} minus 1", edit(norm, lambda item, *_: item - 1), f"{SAME.get(norm, norm)}|N31|1 \\+ w")
        yield Kind(f"{norm} plus 1", edit(norm, lambda item, *_: item + 1), f"{SAME.get(norm, norm)}|w - 1")
    for part in ("v_proj", "o_proj", "up_proj", "down_proj", "gate_proj"):
        yield Kind(f"{part} times 4", edit(part, times(4.0)), f"{SAME[part]}|N36")
        yield Kind(f"{part} by 8", edit(part, times(0.125)), f"{SAME[part]}|N36")
    for part in ("q_proj", "v_proj", "down_proj", "hidden_norm"):
        yield Kind(f"{part} negated", edit(part, times(-1.0)), f"{SAME.get(part, part)}|negat")


def damage_kinds() -> Iterator[Kind]:
    for part in (*ATTENTION, *MLP, "fc"):
        right = f"{SAME.get(part, part)}|{part}"
        yield Kind(f"noise in {part}", edit(part, noise(0.5)), right, is_undoable=False)
        yield Kind(f"{part} replaced by noise", edit(part, noise(1.0), last=True), right, is_undoable=False)
    for part, dim in (("o_proj", 1), ("q_proj", 0), ("down_proj", 1), ("gate_proj", 0), ("fc", 1), ("v_proj", 0)):
        yield Kind(
            f"parts of {part} nearly zero", edit(part, faint(dim)), f"{SAME.get(part, part)}|N34", is_undoable=False
        )
    for norm in NORMS:
        yield Kind(f"outlier in {norm}", edit(norm, outlier), f"{SAME.get(norm, norm)}|N35", is_undoable=False)
    for part in ("down_proj", "q_proj", "fc"):
        yield Kind(f"{part} clipped", edit(part, clip), f"{SAME.get(part, part)}|N38", is_undoable=False)
