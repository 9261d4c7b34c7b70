"""Faults in the weights themselves."""

from dataclasses import replace

import numpy as np

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import SPEC, Case, add, edit, nothing, top

CASES = [
    Case(
        rule="N13", message="NaN or infinite values: 1", level="weights",
        tensors=edit("norm.weight", lambda item: np.where(np.arange(16) == 3, np.nan, item).astype(np.float32)),
    ),
    Case(rule="N13", message="every value is zero", level="weights", tensors=add("norm.weight", 16)),
    Case(
        rule="N14", message="columns of layer 2", severity="warning", level="weights",
        tensors=edit("fc.weight", lambda item: item * (np.arange(32) < 16).astype(np.float32)),
    ),
    Case(
        rule="M05", message="marks 11 ids", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("t2d", lambda item: item & (np.arange(32) != 0)),
    ),
    Case(
        rule="M06", message="look like ids", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("d2t", lambda item: item + np.arange(12)),
    ),
    Case(
        rule="M06", message="do not ascend", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("d2t", lambda item: np.where(np.arange(12) == 5, 0, item)),
    ),
    Case(
        rule="M06", message="other ids than t2d", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("t2d", lambda item: np.roll(item, 1)),
    ),
    Case(
        rule="M09", message="leaves out the stop token 31", severity="warning", dialect=SPEC, shape=support.REDUCED,
        level="weights", target=top(eos_token_id=31),
    ),
    Case(
        rule="M10", message="row 0 of lm_head.weight", severity="warning", dialect=SPEC, shape=support.REDUCED,
        level="weights", target=nothing, tensors=edit("lm_head.weight", lambda item: item + 1),
    ),
    Case(
        rule="M07", message="first 12 ids", dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("d2t", np.zeros_like),
    ),

    Case(
        rule="N17", message="the same values as layers.0.mlp.up_proj.weight", severity="warning", level="weights",
        tensors=lambda arrays: arrays.update({"layers.1.mlp.up_proj.weight": arrays["layers.0.mlp.up_proj.weight"]}),
    ),
    Case(
        rule="N18", message="reaches 50000", severity="warning", level="weights",
        tensors=edit("fc.weight", lambda item: np.where(np.arange(32) == 5, 50000, item).astype(np.float32)),
    ),
    Case(
        rule="N19", message="every value is 1", severity="warning", level="weights",
        tensors=edit("norm.weight", np.ones_like),
    ),
    Case(
        rule="M08", message="propose its mask token 30", severity="info", level="weights", dialect=SPEC,
        shape=replace(support.REDUCED, mask=30),
    ),
    Case(
        rule="M11", message="repeated target ids: 1", level="weights", dialect=SPEC,
        shape=support.REDUCED, tensors=edit("d2t", lambda item: item - (np.arange(12) == 1)),
    ),
]  # fmt: skip
