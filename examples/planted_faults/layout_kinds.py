"""Kinds of faults in one layer, in blocks of fc, in several matrices at once, and in number formats."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from planted_faults.kinds import MLP, Config, Kind, Strength, Tensors, both, by_column, edit, times


def layers_of(config: Config, strength: Strength) -> list[int]:
    count = config["num_hidden_layers"]
    return list(range(count)) if strength == "strong" else [count // 2]


def blocks(change: Any) -> Any:
    """Change the columns of fc of the last tap (mild) or of every tap (strong)."""

    def plant(config: Config, tensors: Tensors, strength: Strength) -> None:
        count = len(config["dflash_config"]["target_layer_ids"])
        parts = list(tensors["fc.weight"].chunk(count, dim=1))
        for tap in range(count) if strength == "strong" else (count - 1,):
            parts[tap] = change(parts[tap], tap)
        tensors["fc.weight"] = torch.cat(parts, dim=1).contiguous()

    return plant


def last_taps_side_by_side(config: Config, tensors: Tensors, strength: Strength) -> None:
    count = len(config["dflash_config"]["target_layer_ids"])
    first = 0 if strength == "strong" else count - 2
    parts = tensors["fc.weight"].chunk(count, dim=1)
    mixed = torch.stack(parts[first:], dim=2).flatten(1)
    tensors["fc.weight"] = torch.cat((*parts[:first], mixed), dim=1).contiguous()


def fused(config: Config, tensors: Tensors, strength: Strength) -> None:
    """Gate and up stored row by row and split in halves."""
    for layer in layers_of(config, strength):
        names = [f"layers.{layer}.mlp.{part}.weight" for part in ("gate_proj", "up_proj")]
        rows = torch.stack([tensors[name] for name in names], dim=1).flatten(0, 1)
        for name, half in zip(names, rows.chunk(2), strict=True):
            tensors[name] = half.contiguous()


def by_channel(item: Tensor, config: Config, _: Strength) -> Tensor:
    grid = item.view(len(item), config["num_attention_heads"], config["head_dim"])
    return grid.transpose(1, 2).reshape(item.shape)


def ranks_rolled(item: Tensor, *_: Any) -> Tensor:
    parts = item.chunk(4, dim=1)
    return torch.cat((*parts[1:], parts[0]), dim=1)


def folded(config: Config, tensors: Tensors, strength: Strength) -> None:
    for layer in layers_of(config, strength):
        norm = tensors[f"layers.{layer}.post_attention_layernorm.weight"]
        for part in ("gate_proj", "up_proj"):
            tensors[f"layers.{layer}.mlp.{part}.weight"] = tensors[f"layers.{layer}.mlp.{part}.weight"] * norm


def exchanged_with_norm(config: Config, tensors: Tensors, strength: Strength) -> None:
    """The MLP of two layers with its norm; the last two layers if mild, the first two if strong."""
    one = 0 if strength == "strong" else config["num_hidden_layers"] - 2
    for part in (*(f"mlp.{part}" for part in MLP), "post_attention_layernorm"):
        first, second = f"layers.{one}.{part}.weight", f"layers.{one + 1}.{part}.weight"
        tensors[first], tensors[second] = tensors[second], tensors[first]


def half_bits(config: Config, tensors: Tensors, strength: Strength) -> None:
    for layer in layers_of(config, strength):
        for part in MLP:
            name = f"layers.{layer}.mlp.{part}.weight"
            tensors[name] = tensors[name].half().view(torch.bfloat16).float()


def one_sided(config: Config, tensors: Tensors, strength: Strength) -> None:
    for layer in layers_of(config, strength):
        name = f"layers.{layer}.mlp.down_proj.weight"
        tensors[name] = tensors[name] - tensors[name].amin(dim=1, keepdim=True)


def without_row_scales(config: Config, tensors: Tensors, strength: Strength) -> None:
    for layer in layers_of(config, strength):
        for part in ("up_proj", "down_proj"):
            name = f"layers.{layer}.mlp.{part}.weight"
            tensors[name] = tensors[name] / tensors[name].abs().amax(dim=1, keepdim=True)


def layout_kinds() -> Iterator[Kind]:
    """Faults that a reading undoes bit for bit."""
    yield Kind("blocks of fc by columns", blocks(lambda block, _: by_column(block)), "fc")
    yield Kind("taps of fc side by side", last_taps_side_by_side, "fc|tap")
    yield Kind("taps of fc scaled", blocks(lambda block, tap: block * 4.0**tap), "fc|tap")
    yield Kind("gate and up fused row by row", fused, "fused|gate|MLP")
    yield Kind("o_proj by dimensions of heads", edit("o_proj", by_channel), "o_proj|attention")
    row_parallel = both(edit("o_proj", ranks_rolled), edit("down_proj", ranks_rolled))
    yield Kind("ranks of row-parallel matrices rolled", row_parallel, "o_proj and down_proj")
    yield Kind("MLP and norm of two layers", exchanged_with_norm, "MLP")
    negated = both(edit("o_proj", times(-1.0)), edit("down_proj", times(-1.0)))
    yield Kind("o_proj and down_proj negated", negated, "o_proj and down_proj|negated")
    everything = both(*(edit(part, by_column) for part in ("o_proj", *MLP)))
    yield Kind("o_proj and MLP by columns", everything, "columns")


def format_kinds() -> Iterator[Kind]:
    """Faults in values that were unpacked in the wrong way."""
    yield Kind("norm folded and kept", folded, "norms? (is|are) folded|MLP|post_attention")
    yield Kind("float16 bits of the MLP", half_bits, "bits|MLP|(gate|up|down)_proj")
    yield Kind("zero points of down_proj", one_sided, "N40|zero point|down_proj")
    yield Kind("row scales of the MLP lost", without_row_scales, "N41|(up|down)_proj", is_undoable=False)
    residual = edit("o_proj", lambda item, config, _: item * (2 * config["num_hidden_layers"]) ** -0.5)
    yield Kind("residual factor of o_proj", residual, "[vo]_proj|attention")
