"""Record a small DFlash draft as llama.cpp's own writer stores it, for tests/behaviour/test_gguf_drafts.py.

Run it in an environment with the package gguf 0.19.0, which llama.cpp's converter writes files with:

    python tests/golden/gguf_file.py --output tests/golden/gguf_file.json

Names of layers' tensors come from the package's map for Qwen3, the class that the converter's class for DFlash
inherits from. The names fc and enc.output_norm are from ggml-org/llama.cpp src/models/dflash.cpp at 01b78a15. The keys
are from conversion/qwen.py of August 2026 and its base class. That class changes no element: it permutes no rows of q
and k, adds nothing to norms, and transposes nothing.
"""

import argparse
import base64
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import numpy as np

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 16, 24, 4, 2, 8, 2, 32
TAPS, BLOCK, MASK, WINDOW, POSITIONS, EPS, THETA = (0, 2), 4, 31, 16, 128, 1e-6, 1000000.0
OWN_NAMES = {"fc": "fc", "hidden_norm": "enc.output_norm"}
"""Names outside the map for Qwen3."""


def main() -> None:
    """Record the file, with a window in the first layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "draft.gguf"
        names = write(path)
        data = base64.b64encode(path.read_bytes()).decode()
    document = {"gguf": version("gguf"), "names": names, "file": data}
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")


def shapes() -> dict[str, tuple[int, ...]]:
    """Hugging Face's name of each tensor -> its shape."""
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)
    }  # fmt: skip
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN), "self_attn.v_proj": (keys, HIDDEN), "self_attn.o_proj": (HIDDEN, queries),
        "self_attn.q_norm": (HEAD_DIM,), "self_attn.k_norm": (HEAD_DIM,), "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
    }  # fmt: skip
    return found | {f"layers.{at}.{name}.weight": shape for at in range(LAYERS) for name, shape in layer.items()}


def write(path: Path) -> dict[str, str]:
    """Write the draft, and return Hugging Face's name of each tensor -> its name in the file."""
    writer: Any = gguf.GGUFWriter(path, "dflash")
    writer.add_type("model")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(LAYERS)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_vocab_size(VOCAB)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(THETA)
    writer.add_causal_attention(False)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern([True, False])
    writer.add_uint32("dflash.block_size", BLOCK)
    writer.add_array("dflash.target_layers", [tap + 1 for tap in TAPS])
    writer.add_mask_token_id(MASK)
    of_qwen3 = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, LAYERS)
    names = {}
    for name, shape in shapes().items():
        module = name.removesuffix(".weight")
        stored = OWN_NAMES.get(module) or of_qwen3.get_name(f"model.{module}")
        names[name] = f"{stored}.weight"
        numbers = np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(np.float32) / 256
        if len(shape) > 1:
            writer.add_tensor(names[name], (numbers.view(np.uint32) >> 16).astype(np.uint16),
                              raw_dtype=gguf.GGMLQuantizationType.BF16)  # fmt: skip
        else:
            writer.add_tensor(names[name], numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return names


if __name__ == "__main__":
    main()
