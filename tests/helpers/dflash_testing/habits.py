"""Drafts with exporter habits that engines treat differently."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_testing import checkpoints as support
from dflash_testing.rule_cases.base import MIXED, Case, both, build, fuse, nested, rename, top, without


def make(path: Path, habit: str) -> Path:
    """Write a draft with one habit. `plain` is a draft without any."""
    return build(CASES[habit], path)


def _use_encoder_names(arrays: dict[str, Any]) -> None:
    rename("fc.", "encoder.fc.")(arrays)
    rename("hidden_norm.", "encoder.output_norm_enc.")(arrays)


def _flatten(config: dict[str, Any]) -> None:
    """Change a config to the form of z-lab's MLX exports: every key at the top level, without `architectures`."""
    config.update(config.pop("dflash_config"))
    del config["architectures"]


def _case(**changes: Any) -> Case:
    return Case(**changes)


def _write(name: str) -> Callable[[Path], object]:
    def spoil(path: Path) -> None:
        if name.endswith(".safetensors"):
            from safetensors.numpy import save_file

            save_file({"embedding": np.zeros(support.SMALL.hidden, dtype=np.float32)}, path / name)
        else:
            (path / name).write_bytes(b"")

    return spoil


CASES: Mapping[str, Case] = {
    "plain": _case(),
    "model-prefix": _case(tensors=rename("", "model.")),
    "other-prefix": _case(tensors=rename("", "dflash_module.")),
    "encoder-names": _case(tensors=_use_encoder_names),
    "fused-projections": _case(tensors=fuse),
    "no-head-dim": _case(config=without("head_dim")),
    "interleaved-rope": _case(config=top(is_neox_style=False)),
    "interleaved-rope-by-its-name": _case(config=top(rope_is_neox_style=False)),
    "gemma-norms": _case(config=top(use_gemma_norm=True)),
    "nested-style": _case(config=nested(use_gemma_norm=True, is_neox_style=False)),
    "unsorted-taps": _case(config=nested(target_layer_ids=[2, 0])),
    "repeated-taps": _case(config=nested(target_layer_ids=[2, 2])),
    "use-swa": _case(config=nested(use_swa=True, swa_window_size=16)),
    "flat-mlx": _case(config=_flatten),
    "mixed-unstated": _case(shape=MIXED, config=without("is_causal")),
    "mixed-specforge": _case(shape=MIXED, config=both(without("is_causal"), nested(attention_mode="dflash"))),
    "mask-pickle": _case(spoil=_write("mask_embedding.pt")),
    "mask-safetensors": _case(spoil=_write("mask_embedding.safetensors")),
}
