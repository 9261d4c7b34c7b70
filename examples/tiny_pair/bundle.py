"""Write the three checkpoints and the prompts, each in its dialect."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from .data import Prompt
from .draft import Draft, Head
from .settings import Settings

VERIFIER = "dflash/tiny-python-target"
ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_target(target: PreTrainedModel, folder: Path) -> None:
    """Save the target in bf16 with transformers."""
    stored = nn.Module.to(copy.deepcopy(target), device="cpu", dtype=torch.bfloat16)
    config = stored.config
    stored.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    stored.save_pretrained(folder)


def _body_config(draft: Draft, settings: Settings, special: dict[str, int]) -> dict[str, object]:
    """The config keys of both dialects."""
    shape = draft.shape
    window = next((width for width in draft.windows if width is not None), None)
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": special["end"],
        "pad_token_id": special["pad"],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "layer_types": ["full_attention" if width is None else "sliding_attention" for width in draft.windows],
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": len(draft.layers) if window is None else 0,
        "model_type": "qwen3",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": len(draft.layers),
        "num_key_value_heads": shape.num_kv_heads,
        "rms_norm_eps": shape.rms_norm_eps,
        "sliding_window": window,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": window is not None,
        "vocab_size": settings.vocab_size,
    }


def save_native_draft(draft: Draft, settings: Settings, special: dict[str, int], folder: Path) -> None:
    """Save a draft in its kind's native layout: without embedding and head, with taps counted from 0."""
    nested: dict[str, object] = {
        "mask_token_id": special["mask"],
        "target_layer_ids": list(settings.target_layer_ids),
    }
    if draft.kind == "dflash2":
        nested |= {"block_size": settings.block_size, **draft.extra_keys()}
    config = {
        "architectures": [ARCHITECTURES[draft.kind]],
        **_body_config(draft, settings, special),
        "block_size": settings.block_size,
        "dflash_config": nested,
        **(draft.extra_keys() if draft.kind == "dspark" else {}),
        "dtype": "bfloat16",
        "is_causal": False,
        "num_target_layers": settings.target.num_layers,
        "rope_scaling": None,
        "rope_theta": settings.shape.rope_theta,
    }
    _save(folder, config, draft.state_dict())


def save_speculators_draft(draft: Draft, head: Head, settings: Settings, special: dict[str, int], folder: Path) -> None:
    """Save a draft in the speculators layout: with a reduced head, id maps, and layer ids one higher than the taps."""
    body = _body_config(draft, settings, special)
    body["rope_parameters"] = {"rope_theta": settings.shape.rope_theta, "rope_type": "default"}
    greedy = {
        "proposal_type": "greedy",
        "speculative_tokens": settings.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in settings.target_layer_ids],
        "block_size": settings.block_size,
        "draft_vocab_size": len(head.token_ids),
        "dtype": "bfloat16",
        "mask_token_id": special["mask"],
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": VERIFIER},
        },
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": body,
    }
    chosen = torch.zeros(settings.vocab_size, dtype=torch.bool)
    chosen[head.token_ids.cpu()] = True
    tensors = {
        **draft.state_dict(),
        "lm_head.weight": head.weight,
        "d2t": head.token_ids.cpu() - torch.arange(len(head.token_ids)),
        "t2d": chosen,
    }
    _save(folder, config, tensors)


def _save(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    save_file({name: _stored(value) for name, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def _stored(tensor: Tensor) -> Tensor:
    """The tensor as stored: weights in bf16, id maps unchanged."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def save_prompts(prompts: Iterable[Prompt], path: Path) -> None:
    rows = (
        {"id": prompt.id, "category": prompt.category, "source": prompt.source, "prompt": prompt.text}
        for prompt in prompts
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def folder_bytes(folder: Path) -> int:
    """Bytes of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
