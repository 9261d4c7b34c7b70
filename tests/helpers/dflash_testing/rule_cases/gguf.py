"""Drafts in a GGUF file with one fault in their metadata."""

from pathlib import Path
from typing import Any

import numpy as np

from dflash_testing import checkpoints as support
from dflash_testing import gguf_files
from dflash_testing.rule_cases.base import Case, nothing

WINDOWED = support.Shape(windows=(16, None))


def case(rule: str, key: str, *names: str, shape: support.Shape = support.SMALL, **changes: Any) -> Case:
    """A draft for llama.cpp with `changes` of its metadata."""
    fields = {name: changes.pop(name) for name in ("severity", "engines", "target") if name in changes}
    place = f"draft.gguf:{key}" if key else "draft.gguf"
    return Case(rule=rule, at=place, names=names, spoil=gguf_files.as_gguf(shape, **changes), **fields)


def with_a_narrow_norm(folder: Path) -> None:
    gguf_files.as_gguf()(folder)
    stored = gguf_files.tensors()
    ones = np.ones(support.SMALL.hidden, dtype=np.float16)
    stored["output_norm.weight"] = (ones.shape, gguf_files.F16, ones.tobytes())
    gguf_files.write(folder / "draft.gguf", gguf_files.metadata(), stored)


CASES = [
    case("G01", "general.architecture", "dflash-draft", general__architecture="dflash-draft"),
    case(
        "G02", "dflash.attention.sliding_window_pattern", "16", shape=WINDOWED,
        dflash__attention__sliding_window_pattern=support.REMOVED,
    ),
    case(
        "G02", "dflash.attention.sliding_window", "1", shape=WINDOWED,
        dflash__attention__sliding_window=support.REMOVED,
    ),
    case(
        "G02", "dflash.attention.sliding_window_pattern", "3", "2", shape=WINDOWED,
        dflash__attention__sliding_window_pattern=[True, False, False],
    ),
    case("G03", "dflash.target_layers", "0, 2", "1, 3", dflash__target_layers=[0, 2]),
    case(
        "G04", "dflash.mask_token_id", "31", "tokenizer.ggml.mask_token_id",
        tokenizer__ggml__mask_token_id=support.REMOVED, dflash__mask_token_id=31,
    ),
    case("S44", "tokenizer.ggml.tokens", severity="warning", tokenizer__ggml__tokens=support.REMOVED,
         dflash__vocab_size=32),
    case("S44", "tokenizer.ggml.tokens", "32", "40", engines="llama.cpp", dflash__vocab_size=40),
    Case(rule="S45", at="draft.gguf:norm.weight", names=("F16",), engines="llama.cpp", spoil=with_a_narrow_norm),
    case("C05", "dflash.target_layers", dflash__target_layers=support.REMOVED),
    case("C03", "dflash.block_size", dflash__block_size=support.REMOVED),
    case("C12", "tokenizer.ggml.mask_token_id", "40", "32", tokenizer__ggml__mask_token_id=40),
    case("C12", "tokenizer.ggml.mask_token_id", tokenizer__ggml__mask_token_id=support.REMOVED),
    case("C19", "dflash.attention.causal", severity="warning", shape=WINDOWED,
         dflash__attention__causal=support.REMOVED),
    case("C48", "dflash.rope.dimension_count", "4", "8", dflash__rope__dimension_count=4),
    case("C48", "dflash.rope.scaling.attn_factor", "0.5", dflash__rope__scaling__attn_factor=0.5),
    case("C00", "", "dflash.attention.value_length", "4", "8", dflash__attention__value_length=4),
    case("C00", "", "dflash.attention.head_count_kv", dflash__attention__head_count_kv=[2, 1]),
    case("P06", "dflash.target_layers", "8", dflash__target_layers=[1, 9], target=nothing),
]  # fmt: skip
