"""GGUF files of any content, written without the code under test."""

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_testing import checkpoints as support

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
F32, F16, Q4_0, Q8_0, Q4_K, BF16 = 0, 1, 2, 8, 12, 30
ALIGNMENT = 32

ENDS = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight"}
PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip

Tensor = tuple[tuple[int, ...], int, bytes]
"""Shape from the outermost dimension on, number of the element type, bytes."""


def stored_name(name: str) -> str:
    """The name in GGUF of a draft's tensor."""
    if name in ENDS:
        return ENDS[name]
    _, layer, part = name.removesuffix(".weight").split(".", 2)
    return f"blk.{layer}.{PARTS[part]}.weight"


def metadata(shape: support.Shape = support.SMALL, **changes: Any) -> dict[str, Any]:
    """The metadata of a draft with a tokenizer. `changes` have `__` for dots; `support.REMOVED` leaves a key out."""
    windows = [window for window in shape.windows if window is not None]
    keys: dict[str, Any] = {
        "general.architecture": "dflash",
        "dflash.block_count": shape.layers,
        "dflash.context_length": 128,
        "dflash.embedding_length": shape.hidden,
        "dflash.feed_forward_length": shape.inner,
        "dflash.attention.head_count": shape.heads,
        "dflash.attention.head_count_kv": shape.kv_heads,
        "dflash.attention.key_length": shape.head_dim,
        "dflash.attention.value_length": shape.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": 1e-6,
        "dflash.attention.causal": False,
        "dflash.rope.freq_base": shape.theta,
        "dflash.block_size": shape.block,
        "dflash.target_layers": [tap + 1 for tap in shape.taps],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"token{at}" for at in range(shape.vocab)],
        "tokenizer.ggml.mask_token_id": shape.mask,
    }
    if windows:
        keys["dflash.attention.sliding_window"] = windows[0]
        keys["dflash.attention.sliding_window_pattern"] = [window is not None for window in shape.windows]
    keys |= {key.replace("__", "."): value for key, value in changes.items()}
    return {key: value for key, value in keys.items() if value is not support.REMOVED}


def tensors(arrays: support.Arrays | None = None) -> dict[str, Tensor]:
    """A draft's tensors in F32, under their names in GGUF."""
    found = support.body_arrays() if arrays is None else arrays
    return {stored_name(name): (array.shape, F32, array.astype(np.float32).tobytes()) for name, array in found.items()}


def encode(keys: Mapping[str, Any], stored: Mapping[str, Tensor]) -> bytes:
    """The bytes of a file."""
    table, data = b"", b""
    for name, (shape, kind, content) in stored.items():
        table += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += content + bytes(-len(content) % ALIGNMENT)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(stored), len(keys)) + b"".join(map(entry, keys, keys.values())) + table
    return head + bytes(-len(head) % ALIGNMENT) + data


def write(path: Path, keys: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Path:
    """A file with that metadata and these tensors."""
    path.write_bytes(encode(keys, stored))
    return path


def make_gguf(path: Path, shape: support.Shape = support.SMALL, **changes: Any) -> Path:
    """A sound draft, apart from `changes` of its metadata."""
    return write(path, metadata(shape, **changes), tensors(support.body_arrays(shape)))


def make_split(folder: Path, num_files: int = 3) -> list[Path]:
    """A sound draft in several files. The first has the metadata and no tensor, as `--no-tensor-first-split` writes."""
    folder.mkdir(exist_ok=True, parents=True)
    stored, files = [*tensors().items()], []
    for index in range(num_files):
        keys = {"split.no": index, "split.count": num_files, "split.tensors.count": len(stored)}
        part = dict(stored[index - 1 :: num_files - 1]) if index else {}
        path = folder / f"draft-Q8_0-{index + 1:05}-of-{num_files:05}.gguf"
        files.append(write(path, metadata() | keys if index == 0 else keys, part))
    return files


def as_gguf(shape: support.Shape = support.SMALL, **changes: Any) -> Callable[[Path], None]:
    """A function that replaces the files in a draft's folder by a GGUF file."""

    def replace(folder: Path) -> None:
        for file in list(folder.iterdir()):
            file.unlink()
        make_gguf(folder / "draft.gguf", shape, **changes)

    return replace


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(name: str, value: Any) -> bytes:
    """A key with its value."""
    if isinstance(value, list):
        kind = kind_of(value[0]) if not is_count(value[0]) else INT32
        return text(name) + struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(pack(kind, item) for item in value)
    kind = kind_of(value)
    return text(name) + struct.pack("<I", kind) + pack(kind, value)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def kind_of(value: Any) -> int:
    return {bool: BOOL, int: UINT32, float: FLOAT32, str: STRING}[type(value)]


def pack(kind: int, value: Any) -> bytes:
    codes = {UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}
    return text(value) if kind == STRING else struct.pack(codes[kind], value)
