"""Rewrite a dump of this project in the format of vLLM or SGLang.

No engine runs here. Each function follows the engine's code line by line, with its names, from where the code has the
outputs of the tapped layers; the lines are named beside it.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_cli.acceptance.dumps.dump_format import Dump, DumpedText

BLOCK_SIZE = 16


def save_as_vllm(dump: Dump, folder: Path, *, include_output_tokens: bool = True, responses: bool = True) -> list[int]:
    """vLLM 0.33.0; returns the layer ids that the server would have been given.

    models/qwen2.py: `_maybe_add_hidden_state(aux, idx + 1, ...)` after layer idx, so id i + 1 is the output of layer i.
    v1/spec_decode/extract_hidden_states.py:129: `torch.stack(target_hidden_states, dim=1)`.
    """
    folder.mkdir()
    lines = []
    for number, text in enumerate(dump.texts):
        stacked_hidden_states = torch.stack(list(text.read().unbind(dim=1)), dim=1)
        all_token_ids = list(text.token_ids[: text.prompt_len + text.answer_len])
        # example_hidden_states_connector.py, request_finished
        if include_output_tokens:
            token_ids = torch.tensor(all_token_ids[:-1])
        else:
            token_ids = torch.tensor(all_token_ids[: text.prompt_len])
        filename = folder / f"cmpl-{number}-0.safetensors"
        kv_cache, slot_mapping = _fill_kv_cache(stacked_hidden_states)
        # _submit_async_write
        num_tokens = token_ids.shape[0]
        tensors = {
            "hidden_states": extract_from_kv_cache(kv_cache, slot_mapping, num_tokens).contiguous(),
            "token_ids": token_ids.clone(),
        }
        save_file(tensors, filename)
        filename.with_name(filename.name + ".lock").touch()
        lines.append(_vllm_response(text, all_token_ids, f"/server/{filename.name}"))
    if responses:
        (folder / "responses.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [tap + 1 for tap in dump.taps]


def extract_from_kv_cache(kv_cache: Tensor, slot_mapping: Tensor, num_tokens: int) -> Tensor:
    """example_hidden_states_connector.py, the function of this name."""
    block_size = kv_cache.shape[2]
    return kv_cache[slot_mapping // block_size, :, slot_mapping % block_size][:num_tokens]


def _fill_kv_cache(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in blocks [num_blocks, num_heads, block_size, head_size], in an order of blocks that is not the text's."""
    num_tokens, num_heads, head_size = hidden_states.shape
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    block_ids_t = torch.arange(num_blocks).flip(0)
    block_offsets = torch.arange(0, BLOCK_SIZE, dtype=torch.long)
    slot_mapping = block_offsets.reshape((1, BLOCK_SIZE)) + block_ids_t.reshape((num_blocks, 1)) * BLOCK_SIZE
    slot_mapping = slot_mapping.flatten()
    kv_cache = torch.full((num_blocks, num_heads, BLOCK_SIZE, head_size), torch.nan, dtype=hidden_states.dtype)
    slots = slot_mapping[:num_tokens]
    kv_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = hidden_states
    return kv_cache, slot_mapping


def _vllm_response(text: DumpedText, all_token_ids: list[int], path: str) -> dict[str, Any]:
    """entrypoints/openai/completion/protocol.py: CompletionResponse, with `return_token_ids`."""
    choice = {
        "index": 0,
        "text": "",
        "finish_reason": str(text.finish_reason),
        "token_ids": all_token_ids[text.prompt_len :],
        "prompt_token_ids": all_token_ids[: text.prompt_len],
    }
    return {"object": "text_completion", "choices": [choice], "kv_transfer_params": {"hidden_states_path": path}}


def save_as_sglang(dump: Dump, file: Path, *, chunk_len: int | None = None, cached_tokens: int = 0) -> list[int]:
    """SGLang 0.5.23; returns the layer ids that the server would have been given.

    models/qwen3.py:805: `layers_to_capture = [val + 1 for val in layer_ids]`, captured before layer val + 1.
    """
    with file.open("w") as stream:
        for text in dump.texts:
            packed = text.read().flatten(1)  # layers/aux_hidden_states.py: [tokens, K * hidden]
            hidden_states: list[Any] = []
            # batch_result_processor.py, _append_prefill_hidden_states: once for each chunk of the prompt
            step = chunk_len or text.prompt_len
            for begin in range(cached_tokens, text.prompt_len, step):
                req_hidden_states = packed[begin : min(begin + step, text.prompt_len)]
                hidden_states.append(req_hidden_states.clone().tolist())
            # _append_decode_hidden_states: one row for each token that was decoded after the first
            hidden_states.extend(packed[text.prompt_len : text.prompt_len + text.answer_len - 1].tolist())
            # output_streamer.py:672: hs[: req.finished_len]
            hidden_states = hidden_states[: text.answer_len]
            answer = text.token_ids[text.prompt_len : text.prompt_len + text.answer_len]
            meta_info = {
                "id": f"rid-{text.row.index}",
                "finish_reason": {"type": str(text.finish_reason)},
                "prompt_tokens": text.prompt_len,
                "completion_tokens": text.answer_len,
                "cached_tokens": cached_tokens,
                "hidden_states": hidden_states,
            }
            prompt = list(text.token_ids[: text.prompt_len])
            response = {"output_ids": list(answer), "meta_info": meta_info, "prompt_token_ids": prompt}
            stream.write(json.dumps(response) + "\n")
    return list(dump.taps)
