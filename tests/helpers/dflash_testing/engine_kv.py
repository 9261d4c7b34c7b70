"""Write KV of this runtime as vLLM's ExampleConnector would write it.

No engine runs here. From the write into the paged cache on, each function follows vLLM's code line by line with its
names. The docstrings name the source lines.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_runtime.kv_transfer.handoff import DRAFT_PAGES, TARGET_PAGES
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.transfers import HandoffPlan
from dflash_testing.handoffs import MemoryConnector

BLOCK_SIZE = 16


def prefill_layers(llm: LLM, prompt: Sequence[int]) -> dict[str, Tensor]:
    """The KV of a prompt: keys and values [rows, 2, KV, D] by vLLM's name of each layer.

    Both engines store keys after the rotary embedding, with positions from 0.

    Draft layers are named `layers.{layer_idx + start_layer_id}` (model_executor/models/qwen3_dflash.py:471), and
    `start_layer_id` is the number of target layers (:751).
    """
    kept = MemoryConnector()
    plan = HandoffPlan(connector=kept, keys=("kept",), is_sending=True)
    llm.generate([prompt], SamplingParams(ignore_eos=True), handoffs=plan)
    handoff = kept.saved["kept"]
    layers: dict[str, Tensor] = {}
    for model in (TARGET_PAGES, DRAFT_PAGES):
        shapes = llm.fingerprint.fields.get(f"{model} KV heads", [])
        for index, heads in enumerate(shapes):
            rows = handoff.tensors[model][:, index].transpose(1, 2).flatten(0, 1)[: len(prompt)]
            layers[layer_name(len(layers))] = rows[..., : heads[0] * heads[1]].unflatten(-1, heads)
    return layers


def layer_name(number: int) -> str:
    return f"model.layers.{number}.self_attn.attn"


def save_as_vllm(
    layers: Mapping[str, Tensor],
    prompt_token_ids: Sequence[int],
    shared_storage_path: Path,
    *,
    block_size: int = BLOCK_SIZE,
    release: str = "0.33",
    layout: str = "NHD",
    num_scheduled: int | None = None,
) -> Path:
    """Save the layers of a prompt in the step that schedules its first `num_scheduled` tokens.

    Rows of zeros in `layers` stand for rows that vLLM did not write. Returns the prompt's folder.
    """
    num_tokens = num_scheduled or len(prompt_token_ids)
    num_blocks = -(-num_tokens // block_size)
    block_ids = list(range(num_blocks))[::-1]  # another order than the text
    # ReqMeta.make_meta
    valid_num_tokens = align_to_block_size(len(prompt_token_ids), block_size)
    token_ids = torch.tensor(list(prompt_token_ids))[:valid_num_tokens]
    block_ids_tensor = torch.tensor(block_ids)
    block_offsets = torch.arange(0, block_size)
    slot_mapping = block_offsets.reshape((1, block_size)) + block_ids_tensor.reshape((num_blocks, 1)) * block_size
    written = slot_mapping.flatten()[:num_tokens]
    slot_mapping = slot_mapping.flatten()[:valid_num_tokens]
    for layer_name, rows in layers.items():
        make = {"0.33": kv_cache_of_033, "0.24": kv_cache_of_024}[release]
        kv_layer = make(rows[:num_tokens], written, num_blocks, block_size, layout)
        # save_kv_layer
        filename = _generate_filename_debug(shared_storage_path, layer_name, token_ids)
        kv_cache = extract_kv_from_layer(kv_layer, slot_mapping, block_size)
        tensors = {"kv_cache": kv_cache.detach().cpu()}
        save_file(tensors, filename)
    return filename.parent


def extract_kv_from_layer(layer: Tensor, slot_mapping: Tensor, block_size: int) -> Tensor:
    """The function of this name in example_connector.py:226. It is the same in 0.24.0."""
    block_idxs = slot_mapping // block_size
    offsets = slot_mapping % block_size
    return layer[block_idxs, :, offsets]


def align_to_block_size(num_tokens: int, block_size: int) -> int:
    """The function of this name in example_connector.py:461."""
    return (num_tokens - 1) // block_size * block_size


def _generate_filename_debug(storage_path: Path, layer_name: str, token_ids: Tensor) -> Path:
    """The path of a layer file: example_connector.py:443, the folder :416, and the hash utils/hashing.py:106."""
    token_bytes = token_ids.numpy().tobytes()
    input_ids_hash = hashlib.md5(token_bytes, usedforsecurity=False).hexdigest()
    foldername = storage_path / input_ids_hash
    foldername.mkdir(parents=True, exist_ok=True)
    return foldername / f"{layer_name}.safetensors"


def kv_cache_of_033(rows: Tensor, slots: Tensor, num_blocks: int, block_size: int, layout: str) -> Tensor:
    """The paged cache of a layer in 0.33, a view [B, H, N, 2 * D], with the rows in their slots.

    NHD is LBNHC and HND is LBHNC, which only changes strides (v1/kv_cache_layout.py). Keys and values are
    `kv_cache.transpose(1, 2).split(head_size, dim=-1)` (flash_attn.py:1448).
    """
    _, _, num_heads, head_size = rows.shape
    content = 2 * head_size
    if layout == "NHD":
        kv_cache = rows.new_zeros((num_blocks, block_size, num_heads, content)).transpose(1, 2)
    else:
        kv_cache = rows.new_zeros((num_blocks, num_heads, block_size, content))
    key_cache, value_cache = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    for cache, index in ((key_cache, 0), (value_cache, 1)):
        cache[slots // block_size, slots % block_size] = rows[:, index]
    return kv_cache


def kv_cache_of_024(rows: Tensor, slots: Tensor, num_blocks: int, block_size: int, layout: str) -> Tensor:
    """The paged cache of a layer in 0.24, [B, 2, N, H, D], with the rows in their slots.

    The stride order is (0, 1, 2, 3, 4) for NHD and (0, 1, 3, 2, 4) for HND: `get_kv_cache_stride_order`, next to
    `get_kv_cache_shape` (flash_attn.py:149).
    """
    _, _, num_heads, head_size = rows.shape
    if layout == "NHD":
        kv_cache = rows.new_zeros((num_blocks, 2, block_size, num_heads, head_size))
    else:
        kv_cache = rows.new_zeros((num_blocks, 2, num_heads, block_size, head_size)).transpose(2, 3)
    for index, cache in enumerate(kv_cache.unbind(1)):
        cache[slots // block_size, slots % block_size] = rows[:, index]
    return kv_cache
