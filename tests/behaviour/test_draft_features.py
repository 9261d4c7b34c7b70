"""Features of published drafts beyond a Qwen3 target's shape, each compared with a plain computation in float32.

The plain computation follows the paper's definition: whole matrices, one softmax over context and block, and the rope
of transformers' own class. It shares only the config and the weights with the runtime.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dflash_kernels.suite import REFERENCE
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, owned_shapes
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.models.target import Target
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.pairs import (
    placement,
    random_draft,
    random_draft_config,
    random_llm,
    random_prompts,
    random_target,
    random_weights,
)

CONTEXT = 37
PROMPTS = random_prompts((3, 18), 97)
PARAMS = SamplingParams(max_new_tokens=6)
YARN = {"factor": 64.0, "original_max_position_embeddings": 16}

FEATURES: dict[str, dict[str, Any]] = {
    "heads of another size and number": {"head_dim": 16, "num_heads": 6, "num_kv_heads": 1},
    "eight taps": {"target_layer_ids": (0, 1, 2, 3, 4, 6, 7, 9)},
    "taps at both ends": {"target_layer_ids": (0, 9)},
    "more layers than taps": {"num_layers": 5},
    "sliding and full layers": {"num_layers": 3, "windows": (8, 8, None), "causal": (True, True, False)},
    "sliding layers without causality": {"windows": (8, 8)},
    "a causal block": {"causal": (True, True)},
    "biases": {"attention_bias": True},
    "attention sinks": {"has_sinks": True, "windows": (8, None)},
    "an embedding scale": {"input_embedding_scale": 32**0.5},
    "a soft cap on logits": {"final_logit_softcapping": 30.0, "output_multiplier": 0.196, "logit_scale": 3.0},
    "a reduced vocabulary": {"draft_vocab_size": 40},
    "another width": {"hidden_size": 24, "target_hidden_size": 32},
    "another width and a reduced vocabulary": {"hidden_size": 24, "target_hidden_size": 32, "draft_vocab_size": 40},
    "yarn": {"rope": RopeConfig(theta=1e6, kind="yarn", params=YARN)},
    "linear rope": {"rope": RopeConfig(theta=1e4, kind="linear", params={"factor": 4.0})},
    "llama 3 rope": {
        "rope": RopeConfig(
            theta=5e5,
            kind="llama3",
            params={
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        )
    },
    "a copied partial rope": {"rope": RopeConfig(theta=1e4, params={"partial_rotary_factor": 0.5})},
    "a copied partial rope with yarn": {
        "rope": RopeConfig(theta=1e6, kind="yarn", params={**YARN, "partial_rotary_factor": 0.5})
    },
    **{f"a block of {size}": {"block_size": size} for size in (7, 10, 16)},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(num_layers=10)


@pytest.fixture(scope="module")
def plain_text(target: Target) -> list[tuple[int, ...]]:
    return [item.token_ids for item in random_llm(target, None, 0).generate(PROMPTS, PARAMS)]


def make(target: Target, name: str) -> tuple[DraftConfig, dict[str, Tensor], DFlashDraft]:
    config = random_draft_config(target.config, **FEATURES[name])
    weights = random_weights(owned_shapes(config), torch.float32, 1)
    if config.has_reduced_vocab:
        ids = torch.linspace(0, config.vocab_size - 1, config.draft_vocab_size).long()
        weights[DRAFT_TO_TARGET] = ids - torch.arange(config.draft_vocab_size)
    return config, weights, DFlashDraft(config, stack_projections(dict(weights).items()), target, placement())


@pytest.mark.parametrize("name", FEATURES)
def test_block_logits(target: Target, name: str) -> None:
    config, weights, draft = make(target, name)
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(CONTEXT, config.num_taps * config.feature_size, generator=generator)
    block = torch.full((config.block_size,), config.mask_token_id)
    block[0] = 5
    cache = KVCache(config, 1, CONTEXT, placement())
    with torch.inference_mode():
        draft.write_context(features, torch.arange(CONTEXT), cache, torch.arange(CONTEXT))
        positions = torch.arange(CONTEXT, CONTEXT + config.block_size)
        attend = PagedAttention.in_order(REFERENCE, cache, CONTEXT, config.causal, config.windows)
        found = draft.logits(block[None], positions[None], attend)[0]
        wanted = plain_logits(config, weights, target, features, block)
    assert found.shape == (config.num_draft_tokens, config.draft_vocab_size)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max().clamp(min=1)


@pytest.mark.parametrize(("kind", "factor"), [("gemma3_text", 32**0.5), ("qwen3", 1.0)])
def test_a_missing_scale_is_the_targets_scale(kind: str, factor: float) -> None:
    target = random_target(num_layers=10, model_type=kind)
    block, generator = torch.arange(8)[None], torch.Generator().manual_seed(3)
    found = []
    for changes in ({"has_target_scale": True}, {"input_embedding_scale": factor}):
        draft = random_draft(target, **changes)
        cache = KVCache(draft.config, 1, CONTEXT, placement())
        draft.write_context(
            torch.randn(CONTEXT, 64, generator=generator.manual_seed(3)), torch.arange(CONTEXT), cache,
            torch.arange(CONTEXT),
        )  # fmt: skip
        attend = PagedAttention.in_order(REFERENCE, cache, CONTEXT, draft.config.causal, draft.config.windows)
        found.append(draft.logits(block, block + CONTEXT, attend))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", FEATURES)
def test_text_equals_plain_decoding(target: Target, plain_text: list[tuple[int, ...]], name: str) -> None:
    config, _, draft = make(target, name)
    drafted = random_llm(target, draft, config.num_draft_tokens).generate(PROMPTS, PARAMS)
    assert [item.token_ids for item in drafted] == plain_text
    assert all(item.acceptance_lengths for item in drafted)


def plain_logits(
    config: DraftConfig, weights: dict[str, Tensor], target: Target, features: Tensor, block: Tensor
) -> Tensor:
    """Compute logits [N - 1, V] of a block after a context, layer by layer from the definition."""
    embedding = weights["embed_tokens.weight"] if config.feature_size != config.hidden_size else target.embedding
    head = weights.get("lm_head.weight", target.head.plain)
    context = norm(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], config)
    cos, sin = rope_of(config, CONTEXT + len(block))
    rows = embedding[block] * config.input_embedding_scale
    for layer in range(config.num_layers):
        part = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        rows = rows + attention(config, part, layer, context, rows, cos, sin)
        normed = norm(rows, part["post_attention_layernorm.weight"], config)
        inner = silu(normed @ part["mlp.gate_proj.weight"].T) * (normed @ part["mlp.up_proj.weight"].T)
        rows = rows + inner @ part["mlp.down_proj.weight"].T
    logits = norm(rows, weights["norm.weight"], config)[1:] @ head.T * config.output_multiplier * config.logit_scale
    cap = config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def attention(
    config: DraftConfig, part: dict[str, Tensor], layer: int, context: Tensor, rows: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    normed = norm(rows, part["input_layernorm.weight"], config)
    both = torch.cat((context, normed))

    def heads(name: str, source: Tensor) -> Tensor:
        made = source @ part[f"self_attn.{name}.weight"].T + part.get(f"self_attn.{name}.bias", torch.zeros(()))
        return made.view(len(source), -1, config.head_dim)

    query = norm(heads("q_proj", normed), part["self_attn.q_norm.weight"], config)
    keys = norm(heads("k_proj", both), part["self_attn.k_norm.weight"], config)
    query, keys = rotated(query, cos[CONTEXT:], sin[CONTEXT:]), rotated(keys, cos, sin)
    group = config.num_heads // config.num_kv_heads
    keys, values = keys.repeat_interleave(group, 1), heads("v_proj", both).repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", query, keys) / config.head_dim**0.5
    distance = torch.arange(CONTEXT, len(both))[:, None] - torch.arange(len(both))[None]
    window = config.windows[layer]
    hidden = (distance < 0) & torch.tensor(config.causal[layer])
    if window is not None:
        hidden |= distance.abs() >= window
    sinks = part.get("self_attn.attention_sink_bias", torch.full((config.num_heads,), float("-inf")))
    scores = torch.cat((scores.masked_fill(hidden, float("-inf")), sinks[:, None, None].expand(-1, len(rows), 1)), -1)
    shares = scores.softmax(-1)[..., :-1]
    mixed = torch.einsum("hnm,mhd->nhd", shares, values).flatten(1)
    return mixed @ part["self_attn.o_proj.weight"].T + part.get("self_attn.o_proj.bias", torch.zeros(()))


def norm(rows: Tensor, weight: Tensor, config: DraftConfig) -> Tensor:
    return rows * (rows.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def rope_of(config: DraftConfig, length: int) -> tuple[Tensor, Tensor]:
    params = {key: value for key, value in config.rope.to_parameters().items() if key != "partial_rotary_factor"}
    qwen3 = Qwen3Config(
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=params,
    )
    cos, sin = Qwen3RotaryEmbedding(qwen3)(torch.zeros(1), torch.arange(length)[None])
    return cos[0], sin[0]
