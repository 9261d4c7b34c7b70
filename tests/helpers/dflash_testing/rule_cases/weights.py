"""Faults in the values of the weights."""

from dataclasses import replace
from typing import Any

import numpy as np

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import SPEC, Case, add, both, edit, nothing, top

WIDE = replace(support.SMALL, hidden=128, head_dim=16)


THREE = replace(support.SMALL, layers=3, windows=(None, None, None))
DOWN = "model.safetensors:layers.1.mlp.down_proj.weight"


def _structured(arrays: dict[str, Any]) -> None:
    """Every matrix except one holds more than noise."""
    for name, item in arrays.items():
        if item.ndim == 2 and DOWN.partition(":")[2] != name:
            arrays[name] = (item + 0.3).astype(np.float32) * np.sign(np.arange(len(item)) % 2 - 0.5)[:, None].astype(
                np.float32
            )


def _rounded(matrix: Any, top: int) -> Any:
    """The values on a grid of this many levels above zero."""
    step = abs(matrix).max() / top
    return ((matrix / step).round() * step).astype("f4")


def _follow_moved_id(mask: Any) -> Any:
    """The mask of the kept ids after the fifth was moved on by one."""
    moved = mask.copy()
    fifth = np.flatnonzero(mask)[4]
    moved[[fifth, fifth + 1]] = False, True
    return moved


CASES = [
    Case(
        rule="N34", at=DOWN, names=("25%", "columns"), severity="info", level="weights",
        tensors=edit(DOWN.partition(":")[2], lambda item: item * np.where(np.arange(24) < 6, 1e-3, 1).astype("f4")),
    ),
    Case(
        rule="N35", at="model.safetensors:norm.weight", names=("median",), severity="info", level="weights",
        tensors=edit("norm.weight", lambda item: np.where(np.arange(16) == 3, 40, item).astype("f4")),
    ),
    Case(
        rule="N36", at=DOWN, names=("times",), severity="info", level="weights", shape=THREE,
        tensors=edit(DOWN.partition(":")[2], lambda item: item * 8),
    ),
    Case(
        rule="N37", at=DOWN, names=("singular",), severity="info", level="weights", shape=THREE, tensors=_structured,
    ),
    Case(
        rule="N38", at=DOWN, names=("largest",), severity="info", level="weights",
        tensors=edit(DOWN.partition(":")[2], lambda item: item.clip(-0.05, 0.05)),
    ),
    Case(
        rule="N39", at=DOWN, names=("50%", "rows"), severity="info", level="weights",
        tensors=edit(DOWN.partition(":")[2], lambda item: np.concatenate([item[:8], item[:8]])),
    ),
    Case(
        rule="N43", at=DOWN, names=("25%", "zero"), severity="info", level="weights",
        tensors=edit(DOWN.partition(":")[2], lambda item: item * (np.arange(24) % 4 != 0).astype("f4")),
    ),
    Case(
        rule="N40", at=DOWN, names=("one sign",), severity="info", level="weights",
        tensors=edit(DOWN.partition(":")[2], lambda item: item - item.min(axis=1, keepdims=True)),
    ),
    Case(
        rule="N41", at=DOWN, names=("100%", "1"), severity="info", level="weights",
        tensors=edit(DOWN.partition(":")[2], lambda item: item / abs(item).max(axis=1, keepdims=True)),
    ),
    Case(
        rule="N41", at=DOWN, names=("448", "e4m3"), severity="info", level="weights",
        tensors=edit(DOWN.partition(":")[2], lambda item: item * np.float32(448 / abs(item).max())),
    ),
    Case(
        rule="N42", at=DOWN, names=("4 levels",), severity="info", level="weights",
        tensors=edit(DOWN.partition(":")[2], lambda item: _rounded(item, 3)),
    ),
    Case(
        rule="N13", at="model.safetensors:norm.weight", names=("1",), level="weights",
        tensors=edit("norm.weight", lambda item: np.where(np.arange(16) == 3, np.nan, item).astype(np.float32)),
    ),
    Case(
        rule="N13", at="model.safetensors:norm.weight", names=("zero",), level="weights",
        tensors=add("norm.weight", 16),
    ),
    Case(
        rule="N14", at="model.safetensors:fc.weight", names=("2",), severity="warning", level="weights",
        tensors=edit("fc.weight", lambda item: item * (np.arange(32) < 16).astype(np.float32)),
    ),
    Case(
        rule="M05", at="model.safetensors:t2d", names=("11",), dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("t2d", lambda item: item & (np.arange(32) != 0)),
    ),
    Case(
        rule="M06", at="model.safetensors:d2t", names=("0..41", "32"), dialect=SPEC, shape=support.REDUCED,
        level="weights",
        tensors=edit("d2t", lambda item: item + np.arange(12)),
    ),
    Case(
        rule="M13", at="model.safetensors:d2t", names=("1",), severity="info", dialect=SPEC, shape=support.REDUCED,
        level="weights",
        tensors=edit("d2t", lambda item: np.roll(item + np.arange(12), 1) - np.arange(12)),
    ),
    Case(
        rule="M06", at="model.safetensors:d2t", names=("t2d",), dialect=SPEC, shape=support.REDUCED, level="weights",
        tensors=edit("t2d", lambda item: np.roll(item, 1)),
    ),
    Case(
        rule="M09", at="model.safetensors:d2t", names=("31",), severity="warning", dialect=SPEC, shape=support.REDUCED,
        level="weights", target=top(eos_token_id=31),
    ),
    Case(
        rule="M10", at="model.safetensors:lm_head.weight", names=("0", "lm_head.weight"), severity="warning",
        dialect=SPEC, shape=support.REDUCED,
        level="weights", target=nothing, tensors=edit("lm_head.weight", lambda item: item + 1),
    ),
    Case(
        rule="M07", at="model.safetensors:d2t", names=("12",), severity="warning", dialect=SPEC, shape=support.REDUCED,
        level="weights",
        tensors=edit("d2t", np.zeros_like),
    ),
    Case(
        rule="N17", at="model.safetensors:layers.1.mlp.up_proj.weight", names=("layers.0.mlp.up_proj.weight",),
        severity="warning", level="weights",
        tensors=lambda arrays: arrays.update({"layers.1.mlp.up_proj.weight": arrays["layers.0.mlp.up_proj.weight"]}),
    ),
    Case(
        rule="N18", at="model.safetensors:fc.weight", names=("50000",), severity="warning", level="weights",
        tensors=edit("fc.weight", lambda item: np.where(np.arange(32) == 5, 50000, item).astype(np.float32)),
    ),
    Case(
        rule="N19", at="model.safetensors:norm.weight", names=("1",), severity="warning", level="weights",
        tensors=edit("norm.weight", np.ones_like),
    ),
    Case(
        rule="M08", at="model.safetensors:d2t", names=("30",), severity="info", level="weights", dialect=SPEC,
        shape=replace(support.REDUCED, mask=30),
    ),
    Case(
        rule="M11", at="model.safetensors:d2t", names=("1",), level="weights", dialect=SPEC,
        shape=support.REDUCED, tensors=edit("d2t", lambda item: item - (np.arange(12) == 1)),
    ),
    Case(
        rule="N13", at="model.safetensors:layers.0.self_attn.k_proj.bias", names=("7",), severity="warning",
        level="weights",
        shape=replace(support.SMALL, bias=True),
        tensors=lambda arrays: arrays.update(
            {name: np.zeros_like(item) for name, item in arrays.items() if name.endswith(".bias")}
        ),
    ),
    Case(
        rule="N31", at="model.safetensors:hidden_norm.weight", names=("10 of 10",), level="weights",
        tensors=lambda arrays: arrays.update(
            {name: item - 1 for name, item in arrays.items() if name.endswith("norm.weight")}
        ),
    ),
    Case(
        rule="N32", at="model.safetensors:fc.weight", names=("8 of 16",), severity="warning", level="weights",
        tensors=edit("fc.weight", lambda item: item * (np.arange(16) < 8).astype(np.float32)[:, None]),
    ),
    Case(
        rule="N33", at="model.safetensors:fc.weight", names=("128",), severity="warning", level="weights", shape=WIDE,
        tensors=edit("fc.weight", lambda item: (np.round(item * 100) / 100).astype(np.float32)),
    ),
    Case(
        rule="N33", at="model.safetensors:fc.weight", names=("float32", "bfloat16"), severity="info", level="weights",
        shape=WIDE,
        tensors=edit(
            "fc.weight",
            lambda item: (np.ascontiguousarray(item).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
        ),
    ),
    Case(
        rule="M12", at="model.safetensors:lm_head.weight", names=("12 of 12",), dialect=SPEC, shape=support.REDUCED,
        level="weights", target=nothing, tensors=edit("lm_head.weight", lambda item: np.roll(item, 1, axis=0)),
    ),
    Case(
        rule="M12", at="model.safetensors:lm_head.weight", names=("1 of 12",), dialect=SPEC, shape=support.REDUCED,
        level="weights", target=nothing,
        tensors=both(
            edit("d2t", lambda item: item + (np.arange(12) == 4)),
            edit("t2d", _follow_moved_id),
        ),
    ),
    Case(
        rule="P31", at="tokenizer.json:model.vocab", names=("2 of 3", "'b'", "2", "1"), severity="warning",
        level="weights", target=nothing, files={"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 2, "c": 1}}}},
        target_files={"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}}},
    ),
    Case(
        rule="P31", at="tokenizer.json:model.vocab", names=("1",), severity="warning", level="weights", target=nothing,
        files={"tokenizer.json": {"model": {"vocab": {"a": 0}}}},
        target_files={"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}}},
    ),
    Case(
        rule="P32", at="conversion.json:target.fingerprint", severity="warning",
        level="weights", target=nothing,
        files={"conversion.json": {"target": {"fingerprint": {"headers": "0" * 64, "rows": None}}}},
    ),
]  # fmt: skip
