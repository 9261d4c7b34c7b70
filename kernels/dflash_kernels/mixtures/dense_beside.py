"""The choice of experts with a dense feed-forward beside it, which reads other rows.

For one row, the router's product runs beside gate and up of the dense feed-forward, and its `down` beside the choice.

Axis letters: T rows, E experts, C chosen experts per row, F inner width, P parts.
"""

from typing import NamedTuple

from torch import Tensor

from dflash_kernels.mixtures.expert_choice import choose_experts, choose_experts_ref, choose_from
from dflash_kernels.products.activation import Gate
from dflash_kernels.products.product import gated_product, gated_product_ref, product_parts, product_parts_ref
from dflash_kernels.products.row_product import cut_of_row, row_product


class Dense(NamedTuple):
    """A dense feed-forward and its rows."""

    rows: Tensor
    """[T, hidden]"""
    gate_up: Tensor
    """[2 F, hidden], gate rows, then up rows."""
    down: Tensor
    """[hidden, F]"""
    gate: Gate


def choose_beside_ref(
    hidden: Tensor,
    router: Tensor,
    num_chosen: int,
    has_normalised_scores: bool,
    factors: Tensor | None,
    dense: Dense,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `choose_experts_ref`, and the parts of the dense feed-forward's output.

    hidden   [T, hidden]  the router's rows
    router   [E, hidden]
    factors  one number per expert, or None
    Returns ids [T, C] int64, scores [T, C], and parts [P, T, hidden] that the caller must add up.
    """
    parts = product_parts_ref(gated_product_ref(dense.rows, dense.gate_up, dense.gate), dense.down)
    chosen, scores = choose_experts_ref(hidden, router, num_chosen, has_normalised_scores, factors=factors)
    return chosen, scores, parts


def choose_beside(
    hidden: Tensor,
    router: Tensor,
    num_chosen: int,
    has_normalised_scores: bool,
    factors: Tensor | None,
    dense: Dense,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `choose_beside_ref`. For one row, two of four launches run beside the launch before."""
    gate_up, routing = cut_of_row(dense.rows, dense.gate_up, is_gated=True), cut_of_row(hidden, router)
    if gate_up is None or routing is None:
        parts = product_parts(gated_product(dense.rows, dense.gate_up, dense.gate), dense.down)
        return *choose_experts(hidden, router, num_chosen, has_normalised_scores, factors=factors), parts
    # Launches beside each other: what one of them reads or writes is alive until the last one has its memory.
    inner = row_product(dense.rows, dense.gate_up, gate_up, gate=dense.gate)[0]
    logits = row_product(hidden, router, routing, is_beside=True)
    chosen, scores = choose_from(logits, hidden.dtype, num_chosen, has_normalised_scores, factors=factors)
    down = cut_of_row(inner, dense.down)
    if down is None:
        return chosen, scores, product_parts(inner, dense.down)
    return chosen, scores, row_product(inner, dense.down, down, is_beside=True)
