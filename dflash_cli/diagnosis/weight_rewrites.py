"""Other ways to read a draft's tensors. Each rewrite turns the runtime's weights into other weights.

Projections are stacked as in `models.weights`: `qkv_proj` has rows for queries, keys and values, `gate_up_proj` has
rows for gate and up. A rewrite imports torch when it runs.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from dflash_runtime.config import DraftConfig

if TYPE_CHECKING:
    from torch import Tensor

Rewrite = Callable[["Mapping[str, Tensor]", DraftConfig], "Mapping[str, Tensor]"]

HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm")


def shift_norms(amount: float) -> Rewrite:
    """Add to the weight of every norm. In Gemma's convention, norms hold offsets from 1."""
    return lambda weights, _: {
        name: tensor + amount if name.endswith("norm.weight") else tensor for name, tensor in weights.items()
    }


def swap_names(first: str, second: str) -> Rewrite:
    """Exchange two parts of the same shape in every layer."""

    def rewrite(weights: "Mapping[str, Tensor]", _: DraftConfig) -> "Mapping[str, Tensor]":
        return {_swapped(name, first, second): tensor for name, tensor in weights.items()}

    return rewrite


def order_layers(order: tuple[int, ...]) -> Rewrite:
    """Layer i takes the tensors of layer `order[i]`."""
    renamed = {f"layers.{source}.": f"layers.{index}." for index, source in enumerate(order)}

    def rewrite(weights: "Mapping[str, Tensor]", _: DraftConfig) -> "Mapping[str, Tensor]":
        return {
            next((new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old)), name): tensor
            for name, tensor in weights.items()
        }

    return rewrite


def swap_gate_up(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
    """Exchange the rows of gate and up."""
    return _edit(weights, ("gate_up_proj",), lambda rows: rows.roll(config.intermediate_size, dims=0))


def swap_keys_values(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
    """Exchange the rows of keys and values."""
    import torch

    sizes = _head_rows(config)

    def swap(rows: "Tensor") -> "Tensor":
        queries, keys, values = rows.split(sizes)
        return torch.cat((queries, values, keys))

    return _edit(weights, ("qkv_proj",), swap)


def pair_dimensions(*, to_halves: bool, with_norms: bool) -> Rewrite:
    """Reorder the dimensions of each head between the two layouts of rope, pairs side by side and halves.

    With `to_halves`, rows in pairs become rows in halves, which the runtime rotates. Some exporters reorder the
    projections but not the norms of queries and keys.
    """

    def rewrite(weights: "Mapping[str, Tensor]", config: DraftConfig) -> "Mapping[str, Tensor]":
        import torch

        order = torch.cat((torch.arange(0, config.head_dim, 2), torch.arange(1, config.head_dim, 2)))
        order = order if to_halves else order.argsort()
        sizes = _head_rows(config)

        def reorder(rows: "Tensor") -> "Tensor":
            rotated, values = rows.split((sizes[0] + sizes[1], sizes[2]))
            heads = rotated.unflatten(0, (-1, config.head_dim))
            return torch.cat((heads[:, order.to(rows.device)].flatten(0, 1), values))

        edited = _edit(weights, ("qkv_proj",), reorder)
        return _edit(edited, HEAD_NORMS, lambda norm: norm[order.to(norm.device)]) if with_norms else edited

    return rewrite


def _edit(
    weights: "Mapping[str, Tensor]", parts: Iterable[str], change: "Callable[[Tensor], Tensor]"
) -> "Mapping[str, Tensor]":
    """The weights, with a change applied to every tensor of these parts, biases included."""
    wanted = tuple(f".{part}.{kind}" for part in parts for kind in ("weight", "bias")) + tuple(
        f"{part}.weight" for part in parts if part in HEAD_NORMS
    )
    return {name: change(tensor) if name.endswith(wanted) else tensor for name, tensor in weights.items()}


def _head_rows(config: DraftConfig) -> tuple[int, int, int]:
    """The number of rows for queries, keys and values in a stacked projection."""
    keys = config.num_kv_heads * config.head_dim
    return config.num_heads * config.head_dim, keys, keys


def _swapped(name: str, first: str, second: str) -> str:
    if f".{first}." in name:
        return name.replace(f".{first}.", f".{second}.")
    return name.replace(f".{second}.", f".{first}.")
