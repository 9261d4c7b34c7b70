"""Small random models of transformers' own classes, saved and opened as targets, and drafts that know the text.

The models are in float32 on the CPU. Their weights vary enough for texts without ties and without loops.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.models.hosting.hosted import HostedTarget, load_hosted
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.target_loading import find_target_runtime, load_target
from dflash_testing.pairs import ScriptedDraft, placement

Json = dict[str, Any]

BODY: Json = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS: Json = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED: Json = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5}

GEMMA4: Json = {
    **MIXED,
    **{"global_head_dim": 16, "num_key_value_heads": 4, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    **{"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 97},
    "final_logit_softcapping": 2.0,
}

LATENT: Json = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

SERVED: Mapping[str, Json] = {
    "gemma2": {**MIXED, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    "gpt_oss": {**MIXED, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gemma4_text": GEMMA4,
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 24, "final_logit_softcapping": 2.0},
    "qwen3_moe": EXPERTS,
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": 5},
    "qwen2": {**MIXED, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {},
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "arcee": {},
    "bitnet": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**MIXED, "logit_scale": 0.25},
    "cohere2_moe": {**MIXED, **EXPERTS, "logit_scale": 0.25, "first_k_dense_replace": 1},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "deepseek_v3": LATENT,
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": MIXED,
    "flex_olmo": EXPERTS,
    "flint": {**MIXED, **EXPERTS},
    "gemma": {},
    "gemma4_unified_text": GEMMA4,
    "glm": {},
    "glm4": {},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm4_moe_lite": {**LATENT, "head_dim": 8, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "granite_swa": {**MIXED, "attention_multiplier": 0.2, "logits_scaling": 3.0},
    "granitemoe": {"num_local_experts": 4, "logits_scaling": 3.0},
    "granitemoe_swa": {**MIXED, "num_local_experts": 4, "logits_scaling": 3.0},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": EXPERTS,
    "laguna": {**MIXED, **EXPERTS, "shared_expert_intermediate_size": 16},
    "mellum": {**MIXED, **EXPERTS},
    "minimax_m2": {**EXPERTS, "num_local_experts": 8},
    "mistral4": {**LATENT, "head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "nemotron": {},
    "olmo2": {},
    "olmo3": {**MIXED, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "olmoe": EXPERTS,
    "phi3": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "vaultgemma": {**MIXED, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 1.0},
}
"""Model type -> the keys of its config beyond `BODY`. By default tests run `DEFAULT`; slow tests run all."""

DEFAULT = (*tuple(SERVED)[:3], "deepseek_v3")

LINEAR: Json = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA2: Json = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8,
}  # fmt: skip
INDEXED: Json = {**LATENT, "head_dim": 8, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16}
SHORT_CONVOLUTIONS: Json = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
INKLING: Json = {
    "layer_types": ["hybrid_sliding", "hybrid"] * 2, "sliding_window_size": 5, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "unpadded_vocab_size": 90,
}  # fmt: skip
DEFAULT_ROPE: Json = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}

OWN_CACHE: Mapping[str, Json] = {
    "qwen3_5_text": LINEAR,
    "mamba": {"state_size": 8},
    "deepseek_v3": {},
    "bailing_hybrid": {**LATENT, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "deepseek_v2": {},
    "deepseek_v32": INDEXED,
    "deepseek_v4": {
        "head_dim": 8, "num_key_value_heads": 1, "q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2,
        "qk_rope_head_dim": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16, "sliding_window": 16,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
    },
    "diffllama": {},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64, "mamba_expand": 2},
    "falcon_mamba": {"state_size": 8},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0},
    "gemma4_text": {
        **MIXED, "global_head_dim": 16, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    },
    "glm4_moe_lite": {},
    "glm_moe_dsa": INDEXED,
    "gpt_oss": {**MIXED, **DEFAULT_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        **MAMBA2, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "inkling_text": {**INKLING, "logits_mup_width_multiplier": 3.0},
    "inkling2_text": {**INKLING, "n_layers_per_attn_res_block": 2},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        **LATENT, "head_dim": 8, "num_experts": 8, "num_experts_per_token": 2,
        "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    },
    "lfm2": {**SHORT_CONVOLUTIONS, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**SHORT_CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
    "lfm3": {},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 7, "num_local_experts": 4,
        "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
    },
    "longcat_flash": {
        **LATENT, "head_dim": 8, "num_hidden_layers": 8, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
        "moe_topk": 2, "zero_expert_num": 2,
    },
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 8},
    "mimo_v2_flash": {**MIXED, "head_dim": 8, "v_head_dim": 4},
    "minimax": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 4, "block_size": 8},
    "mistral4": {},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8,
    },
    "olmo_hybrid": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_next": {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16},
    "rwkv": {"attention_hidden_size": 32},
    "zamba2": {
        "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "chunk_size": 8,
        "layers_block_type": ["mamba", "hybrid"] * 2,
    },
}  # fmt: skip
"""Model type with its own cache -> the keys of its config beyond `BODY`.

Tests run the first three by default: one has a state, one reads one token at a time, and one is stateless.
"""

NOT_RUN, UNKNOWN = "target-not-run", "target-unknown-to-transformers"

REFUSED: Mapping[str, tuple[Json, str, str]] = {
    "gemma3_text": ({"use_bidirectional_attention": True}, NOT_RUN, "use_bidirectional_attention"),
    "bart": ({}, NOT_RUN, "is_encoder_decoder"),
    "gemma3n_text": ({}, NOT_RUN, "altup_num_inputs"),
    "kimi_k3": ({"text_config": {**BODY, "attn_res_block_size": 12}}, UNKNOWN, "attn_res_block_size 12"),
    "kimi_linear": (
        {"attn_res_block_size": 12, "routed_expert_hidden_size": 16, "kv_lora_rank": 16}, NOT_RUN,
        "routed_expert_hidden_size 16",
    ),
    "qwen4_exp_text": ({}, NOT_RUN, "hc_count"),
    "never_published": ({}, UNKNOWN, "dflash_runtime/models/families"),
    "new_remote": ({"auto_map": {"AutoConfig": "code.Config"}}, UNKNOWN, "trust_remote_code"),
    "clip": ({}, "target-without-causal-model", ""),
}  # fmt: skip
"""Model type that nothing runs -> the keys of its config beyond `BODY`, the refusal's id, and a name in the refusal."""

OWN_CACHE_DEFAULT = tuple(OWN_CACHE)[:3]


def skip_unknown(kind: str) -> None:
    """Skip the test if this release of transformers does not know the model type."""
    from transformers import CONFIG_MAPPING, __version__

    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this release of transformers does not know {kind}")
    if kind == "olmo3" and __version__ < "5.23":
        pytest.skip("transformers 5.17 reads another form of this rope")


def make_model(path: Path, kind: str, **changes: Any) -> Any:
    """Return a random model of transformers, saved in a directory as safetensors."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, logging

    skip_unknown(kind)
    logging.disable_progress_bar()
    config = AutoConfig.for_model(kind, **{**BODY, **SERVED.get(kind, {}), **OWN_CACHE.get(kind, {}), **changes})
    torch.manual_seed(5)
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    auto: Any = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")) and parameter.ndim == 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return model


def run_auto(path: Path) -> HostedTarget | OwnCacheTarget:
    """Load a directory's model, which transformers' code runs over our pages or with its own cache."""
    target = load_target(open_target(path), placement(), "transformers")
    assert isinstance(target, HostedTarget | OwnCacheTarget)
    return target


def host(path: Path, **placed: Any) -> HostedTarget:
    """Load a directory's model, which transformers' code runs over our pages. `placed` changes the placement."""
    source = open_target(path)
    found, config = find_target_runtime(source, "transformers")
    assert found == "transformers"
    return load_hosted(source, config, replace(placement(), **placed))


def host_own_cache(path: Path, dtype: torch.dtype = torch.float32) -> OwnCacheTarget:
    """Load a directory's model, which transformers' code runs with its own cache."""
    target = load_target(open_target(path), placement(dtype), "transformers-cache")
    assert isinstance(target, OwnCacheTarget)
    return target


def plain_text(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return the text of transformers' own greedy generation after a prompt, which does not end at stop tokens."""
    return list(_greedy_text(model, tuple(prompt), num_tokens))


@lru_cache(maxsize=256)
def _greedy_text(model: Any, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Generate a text once for all tests that use the same model and prompt."""
    from transformers import GenerationConfig

    model.generation_config.eos_token_id = None  # transformers takes missing settings of the call from here
    config = GenerationConfig(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([prompt])
    said: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0].tolist()
    return tuple(said[len(prompt) :])


class WindowedAttention(Attend):
    """An `Attend` without a cache, written out with each layer's window, cap and sinks."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self._windows = windows

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        raise AssertionError("these models have no recurrent layer")

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        num_groups = query.shape[1] // keys.shape[1]
        keys, values = (item.repeat_interleave(num_groups, dim=1) for item in (keys, values))
        back = torch.arange(len(query))[:, None] - torch.arange(len(query))
        window = self._windows[layer]
        is_seen = (back >= 0) & (back < (window or len(query)))
        scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
        if softmax.cap is not None:
            scores = softmax.cap * torch.tanh(scores / softmax.cap)
        weights = scores.exp() * is_seen
        sums = weights.sum(-1, keepdim=True)
        if softmax.sinks is not None:
            sums = sums + softmax.sinks.exp()[:, None, None]
        return torch.einsum("hqk,khd->qhd", weights / sums, values)

    read = __call__

    def place(self, layer: int) -> None:
        return None


@dataclass(frozen=True)
class Known:
    """A text that a draft knows. The draft gets the first `num_right` tokens of each block right, the rest wrong."""

    token_ids: Sequence[int]
    num_right: int


class KnowingDraft(ScriptedDraft):
    """Proposes tokens of the texts that it knows, and recognises a text by its anchor and position."""

    def __init__(self, draft: Draft, known: Sequence[Known]) -> None:
        super().__init__(draft, lambda position: 0)
        self._texts = {(position, token): item for item in known for position, token in enumerate(item.token_ids)}

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        rows = zip(block_ids[:, 0].tolist(), positions.tolist(), strict=True)
        drafted = torch.tensor([self._propose(anchor, *row) for anchor, row in rows])
        return one_hot(drafted, self.config.vocab_size).float()[:, :num_drafts]

    def _propose(self, anchor: int, position: int, *ahead: int) -> list[int]:
        known = self._texts.get((position, anchor), Known((), 0))
        right = [known.token_ids[at] if at < len(known.token_ids) else 0 for at in ahead]
        is_right = [index < known.num_right for index in range(len(ahead))]
        return [token if keep else (token + 1) % 7 for token, keep in zip(right, is_right, strict=True)]
