"""The choice between the Triton kernels and the PyTorch references."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dflash_kernels.attention.block_attention import block_attention, block_attention_ref
from dflash_kernels.attention.ragged_attention import ragged_attention, ragged_attention_ref
from dflash_kernels.attention.row_attention import row_attention, row_attention_ref
from dflash_kernels.attention.shared_attention import shared_attention, shared_attention_ref
from dflash_kernels.attention.tree_attention import tree_attention, tree_attention_ref
from dflash_kernels.drafts.block_conv import block_conv, block_conv_ref, conv_add_norm, conv_add_norm_ref
from dflash_kernels.drafts.candidate_walk import Walk, candidate_walk, candidate_walk_ref
from dflash_kernels.drafts.draft_tree import Tree, build_tree, build_tree_ref
from dflash_kernels.drafts.markov_walk import markov_walk, markov_walk_ref
from dflash_kernels.drafts.tree_path import (
    Path,
    PathRecords,
    follow_tree,
    follow_tree_ref,
    move_records,
    move_records_ref,
    move_rows,
    move_rows_ref,
)
from dflash_kernels.fp8.fp8_norm import add_round_norm, add_round_norm_ref
from dflash_kernels.fp8.fp8_product import (
    fp8_gated_product,
    fp8_gated_product_ref,
    fp8_product,
    fp8_product_parts,
    fp8_product_parts_ref,
    fp8_product_ref,
)
from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rounded, Rows
from dflash_kernels.kv.context_kv import context_kv_store, context_kv_store_ref
from dflash_kernels.kv.kv_store import kv_store, kv_store_ref
from dflash_kernels.kv.rope_store import rope_store, rope_store_ref
from dflash_kernels.kv.slot_mapping import locate_rows, locate_rows_ref
from dflash_kernels.launch import CANNOT_RUN, FLOATS, HAS_TRITON, IS_INTERPRETED, NOT_INSTALLED
from dflash_kernels.logits.largest_probability import Likeliest, largest_probability, largest_probability_ref
from dflash_kernels.logits.rejection import reject, reject_ref
from dflash_kernels.logits.sampling import Chosen, argmax, argmax_ref, sample, sample_ref
from dflash_kernels.logits.top_tokens import likely_tokens, likely_tokens_ref, top_tokens, top_tokens_ref
from dflash_kernels.mixtures.dense_beside import choose_beside, choose_beside_ref
from dflash_kernels.mixtures.expert_choice import choose_experts, choose_experts_ref
from dflash_kernels.mixtures.experts import experts, experts_ref
from dflash_kernels.mixtures.fp8_experts import fp8_experts, fp8_experts_ref
from dflash_kernels.norms.gated_norm import gated_norm, gated_norm_ref
from dflash_kernels.norms.output_gate import output_gate, output_gate_ref
from dflash_kernels.norms.rope_norm import (
    add_rms_norm,
    add_rms_norm_ref,
    rms_norm,
    rms_norm_ref,
    sum_rms_norm,
    sum_rms_norm_ref,
)
from dflash_kernels.norms.sandwich_norm import sandwich_norm, sandwich_norm_ref
from dflash_kernels.products.product import (
    gated_product,
    gated_product_ref,
    product,
    product_parts,
    product_parts_ref,
    product_ref,
)
from dflash_kernels.recurrent.delta_blocks import delta_blocks, delta_blocks_ref
from dflash_kernels.recurrent.delta_prompts import delta_prompts, delta_prompts_ref
from dflash_kernels.recurrent.delta_rule import delta_rule, delta_rule_ref
from dflash_kernels.recurrent.recent_conv import recent_conv, recent_conv_ref
from dflash_kernels.recurrent.state_snapshots import keep_passed, keep_passed_ref
from dflash_kernels.recurrent.tree_conv import tree_conv, tree_conv_ref
from dflash_kernels.steps.draft_odds import DraftOdds, add_outcomes, add_outcomes_ref, draft_odds, draft_odds_ref
from dflash_kernels.steps.given_rows import give_rows, give_rows_ref
from dflash_kernels.steps.odds_refit import refit_odds, refit_odds_ref
from dflash_kernels.steps.row_changes import (
    HeldRows,
    ReadyRows,
    change_rows,
    change_rows_ref,
    switch_on_rows,
    switch_on_rows_ref,
)
from dflash_kernels.steps.step_rows import (
    Bounds,
    RowState,
    StepRows,
    close_step,
    close_step_ref,
    close_tree,
    close_tree_ref,
    open_step,
    open_step_ref,
)

KernelChoice = Literal["auto", "triton", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of every kernel function. The references (`*_ref`) document the functions."""

    name: str
    kv_store: Callable[..., tuple[Tensor, Tensor]]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    sum_rms_norm: Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
    add_round_norm: Callable[[Tensor, Tensor, Tensor, float, Fp8Weight], tuple[Rounded, Tensor]]
    sandwich_norm: Callable[..., tuple[Tensor, Tensor]]
    rope_store: Callable[..., Tensor]
    product: Callable[..., Tensor]
    product_parts: Callable[..., Tensor]
    gated_product: Callable[..., Tensor]
    choose_experts: Callable[..., tuple[Tensor, Tensor]]
    choose_beside: Callable[..., tuple[Tensor, Tensor, Tensor]]
    experts: Callable[..., Tensor]
    fp8_product: Callable[[Rows, Fp8Weight], Tensor]
    fp8_product_parts: Callable[[Rows, Fp8Weight], Tensor]
    fp8_gated_product: Callable[[Rows, Fp8Weight], Tensor]
    fp8_experts: Callable[[Tensor, Fp8Weight, Fp8Weight, Tensor, Tensor], Tensor]
    context_kv_store: Callable[[Tensor, Tensor, float, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    block_attention: Callable[..., Tensor]
    row_attention: Callable[..., Tensor]
    shared_attention: Callable[..., Tensor]
    ragged_attention: Callable[..., Tensor]
    tree_attention: Callable[..., Tensor]
    block_conv: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    conv_add_norm: Callable[[Tensor, Tensor, Tensor, int, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    top_tokens: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    likely_tokens: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    candidate_walk: Callable[..., Walk]
    markov_walk: Callable[..., Tensor]
    recent_conv: Callable[..., Tensor]
    tree_conv: Callable[..., Tensor]
    delta_rule: Callable[..., Tensor]
    delta_blocks: Callable[..., Tensor]
    delta_prompts: Callable[..., Tensor]
    keep_passed: Callable[..., None]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    output_gate: Callable[[Tensor, Tensor], Tensor]
    open_step: Callable[[RowState, Tensor, int, int, Bounds], StepRows]
    close_step: Callable[[RowState, Tensor, StepRows, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    close_tree: Callable[[RowState, Tensor, StepRows, Path, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    build_tree: Callable[[Tensor, Tensor, Tensor, Tensor, int], Tree]
    follow_tree: Callable[[Tree, Tensor, int], Path]
    move_rows: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    move_records: Callable[[Tensor, PathRecords], None]
    change_rows: Callable[[HeldRows, Tensor, Tensor, int], None]
    switch_on_rows: Callable[[RowState, ReadyRows, Tensor, Tensor], Tensor]
    locate_rows: Callable[[Tensor, Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]
    argmax: Callable[[Tensor], Tensor]
    largest_probability: Callable[[Tensor], Likeliest]
    draft_odds: Callable[[Tensor, Tensor, Tensor, Tensor], DraftOdds]
    add_outcomes: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    refit_odds: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    give_rows: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]
    sample: Callable[..., Chosen]
    reject: Callable[..., tuple[Tensor, Tensor]]


REFERENCE = Kernels(
    name="reference",
    kv_store=kv_store_ref,
    rms_norm=rms_norm_ref,
    add_rms_norm=add_rms_norm_ref,
    sum_rms_norm=sum_rms_norm_ref,
    add_round_norm=add_round_norm_ref,
    sandwich_norm=sandwich_norm_ref,
    rope_store=rope_store_ref,
    product=product_ref,
    product_parts=product_parts_ref,
    gated_product=gated_product_ref,
    choose_experts=choose_experts_ref,
    choose_beside=choose_beside_ref,
    experts=experts_ref,
    fp8_product=fp8_product_ref,
    fp8_product_parts=fp8_product_parts_ref,
    fp8_gated_product=fp8_gated_product_ref,
    fp8_experts=fp8_experts_ref,
    context_kv_store=context_kv_store_ref,
    block_attention=block_attention_ref,
    row_attention=row_attention_ref,
    shared_attention=shared_attention_ref,
    ragged_attention=ragged_attention_ref,
    tree_attention=tree_attention_ref,
    block_conv=block_conv_ref,
    conv_add_norm=conv_add_norm_ref,
    top_tokens=top_tokens_ref,
    likely_tokens=likely_tokens_ref,
    candidate_walk=candidate_walk_ref,
    markov_walk=markov_walk_ref,
    recent_conv=recent_conv_ref,
    tree_conv=tree_conv_ref,
    delta_rule=delta_rule_ref,
    delta_blocks=delta_blocks_ref,
    delta_prompts=delta_prompts_ref,
    keep_passed=keep_passed_ref,
    gated_norm=gated_norm_ref,
    output_gate=output_gate_ref,
    open_step=open_step_ref,
    close_step=close_step_ref,
    close_tree=close_tree_ref,
    build_tree=build_tree_ref,
    follow_tree=follow_tree_ref,
    move_rows=move_rows_ref,
    move_records=move_records_ref,
    change_rows=change_rows_ref,
    switch_on_rows=switch_on_rows_ref,
    locate_rows=locate_rows_ref,
    argmax=argmax_ref,
    largest_probability=largest_probability_ref,
    draft_odds=draft_odds_ref,
    add_outcomes=add_outcomes_ref,
    refit_odds=refit_odds_ref,
    give_rows=give_rows_ref,
    sample=sample_ref,
    reject=reject_ref,
)

_TRITON = Kernels(
    name="triton",
    kv_store=kv_store,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    sum_rms_norm=sum_rms_norm,
    add_round_norm=add_round_norm,
    sandwich_norm=sandwich_norm,
    rope_store=rope_store,
    product=product,
    product_parts=product_parts,
    gated_product=gated_product,
    choose_experts=choose_experts,
    choose_beside=choose_beside,
    experts=experts,
    fp8_product=fp8_product,
    fp8_product_parts=fp8_product_parts,
    fp8_gated_product=fp8_gated_product,
    fp8_experts=fp8_experts,
    context_kv_store=context_kv_store,
    block_attention=block_attention,
    row_attention=row_attention,
    shared_attention=shared_attention,
    ragged_attention=ragged_attention,
    tree_attention=tree_attention,
    block_conv=block_conv,
    conv_add_norm=conv_add_norm,
    top_tokens=top_tokens,
    likely_tokens=likely_tokens,
    candidate_walk=candidate_walk,
    markov_walk=markov_walk,
    recent_conv=recent_conv,
    tree_conv=tree_conv,
    delta_rule=delta_rule,
    delta_blocks=delta_blocks,
    delta_prompts=delta_prompts,
    keep_passed=keep_passed,
    gated_norm=gated_norm,
    output_gate=output_gate,
    open_step=open_step,
    close_step=close_step,
    close_tree=close_tree,
    build_tree=build_tree,
    follow_tree=follow_tree,
    move_rows=move_rows,
    move_records=move_records,
    change_rows=change_rows,
    switch_on_rows=switch_on_rows,
    locate_rows=locate_rows,
    argmax=argmax,
    largest_probability=largest_probability,
    draft_odds=draft_odds,
    add_outcomes=add_outcomes,
    refit_odds=refit_odds,
    give_rows=give_rows,
    sample=sample,
    reject=reject,
)


def triton_kernels() -> Kernels:
    """Return the Triton kernels.

    Raises:
        RuntimeError: Triton is not installed.
    """
    if not HAS_TRITON:
        raise RuntimeError(NOT_INSTALLED)
    return _TRITON


def pick_kernels(name: KernelChoice, device: torch.device | str, dtype: torch.dtype | None = None) -> Kernels:
    """Return the implementation for a device and, if given, the dtype of a run.

    `auto` means Triton on a GPU, if Triton is installed and supports the dtype. Otherwise it means the references.

    Raises:
        ValueError: the name is unknown, or Triton cannot run here.
    """
    if name not in get_args(KernelChoice):
        raise ValueError(f"kernels: expected {', '.join(get_args(KernelChoice))}, found {name!r}")
    is_cuda = torch.device(device).type == "cuda"
    if name == "auto":
        name = "triton" if is_cuda and HAS_TRITON and dtype in (None, *FLOATS) else "reference"
    if name == "reference":
        return REFERENCE
    if not HAS_TRITON:
        raise ValueError(NOT_INSTALLED)
    if not is_cuda and not IS_INTERPRETED:
        raise ValueError(CANNOT_RUN.format(device=device))
    return triton_kernels()
