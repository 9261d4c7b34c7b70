"""TensorRT-LLM's settings for a draft. No rule describes its loader, so drafts are not validated for it."""

import json
from collections.abc import Sequence

NAME = "tensorrt-llm"


def without(engines: str) -> str:
    """Return a list of engines such as `vllm,tensorrt-llm` without TensorRT-LLM."""
    return ",".join(part for part in engines.split(",") if part.strip() != NAME)


def speculative_settings(draft: str, num_draft_tokens: int, schedule: Sequence[tuple[int, int, int]] = ()) -> str:
    """Return the text for the YAML file of `trtllm-serve --config`. Its max_draft_len is block_size - 1.

    Keys of draft_len_schedule are the largest batch sizes of ranges. Early releases read them as the smallest.
    Source: NVIDIA/TensorRT-LLM llmapi/llm_args.py::DFlashDecodingConfig, _torch/speculative/utils.py, of 1.4.0rc1.
    """
    longest = max((number for *_, number in schedule), default=num_draft_tokens)
    lines = ["speculative_config:", "  decoding_type: DFlash", f"  speculative_model: {json.dumps(draft)}"]
    lines.append(f"  max_draft_len: {longest}")
    if schedule:
        inner = ", ".join(f"{last}: {number}" for _, last, number in schedule)
        lines.append(f"  draft_len_schedule: {{{inner}}}")
    return "\n".join(lines)
