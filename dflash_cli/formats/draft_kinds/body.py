"""Keys and tensors that several kinds share: a Qwen3 or Llama decoder, and the context projection of DFlash.

Sources: z-lab/dflash 0.1.0 model.py; vLLM 0.33.0 model_executor/models/qwen3_dflash.py and llama_eagle3.py.
"""

from dflash_cli.formats.draft_kinds.table import BODY, Key, Tensors

SIZES = (
    Key(size="hidden", names=(f"{BODY}hidden_size",)),
    Key(size="inner", names=(f"{BODY}intermediate_size",)),
    Key(size="layers", names=(f"{BODY}num_hidden_layers",)),
    Key(size="heads", names=(f"{BODY}num_attention_heads",)),
    Key(size="kv_heads", names=(f"{BODY}num_key_value_heads",)),
    Key(size="vocab", names=(f"{BODY}vocab_size",)),
    Key(size="eps", names=(f"{BODY}rms_norm_eps",), form="positive"),
    Key(size="positions", names=(f"{BODY}max_position_embeddings",)),
    Key(size="bias", names=(f"{BODY}attention_bias",), form="flag", is_needed=False),
    Key(size="kinds", names=(f"{BODY}layer_types",), form="kinds", is_needed=False),
    Key(size="model_type", names=(f"{BODY}model_type",), form="text", is_needed=False),
)
QWEN3_HEAD = Key(size="head_dim", names=(f"{BODY}head_dim",), default=128)
"""Config classes of Qwen3 take 128 if the key is absent."""
LLAMA_HEAD = Key(size="head_dim", names=(f"{BODY}head_dim",), is_needed=False, default="hidden_per_head")
"""Config classes of Llama take hidden_size / num_attention_heads if the key is absent."""

WIDTH = Key(size="width", names=("target_hidden_size", f"{BODY}target_hidden_size"), is_needed=False)
DERIVED = {"features": "width or hidden"}

BLOCK = Key(size="block", names=("dflash_config.block_size", "block_size"))
TAPS = Key(
    size="taps",
    names=("dflash_config.target_layer_ids", "target_layer_ids", "aux_hidden_state_layer_ids"),
    form="layers",
)
MASK = Key(size="mask", names=("dflash_config.mask_token_id", "mask_token_id"), form="index")
REDUCED = Key(size="draft_vocab", names=("draft_vocab_size", f"{BODY}draft_vocab_size"), is_needed=False)

DFLASH_KEYS = (*SIZES, QWEN3_HEAD, WIDTH, BLOCK, TAPS, MASK, REDUCED)

ATTENTION = Tensors(
    shapes={
        "layers.{layers}.self_attn.q_proj.weight": "heads*head_dim, hidden",
        "layers.{layers}.self_attn.k_proj.weight": "kv_heads*head_dim, hidden",
        "layers.{layers}.self_attn.v_proj.weight": "kv_heads*head_dim, hidden",
        "layers.{layers}.self_attn.o_proj.weight": "hidden, heads*head_dim",
    }
)
BIASES = Tensors(
    shapes={
        "layers.{layers}.self_attn.q_proj.bias": "heads*head_dim",
        "layers.{layers}.self_attn.k_proj.bias": "kv_heads*head_dim",
        "layers.{layers}.self_attn.v_proj.bias": "kv_heads*head_dim",
        "layers.{layers}.self_attn.o_proj.bias": "hidden",
    },
    when="bias",
)
HEAD_NORMS = Tensors(
    shapes={
        "layers.{layers}.self_attn.q_norm.weight": "head_dim",
        "layers.{layers}.self_attn.k_norm.weight": "head_dim",
    }
)
REST_OF_LAYER = Tensors(
    shapes={
        "layers.{layers}.input_layernorm.weight": "hidden",
        "layers.{layers}.post_attention_layernorm.weight": "hidden",
        "layers.{layers}.mlp.gate_proj.weight": "inner, hidden",
        "layers.{layers}.mlp.up_proj.weight": "inner, hidden",
        "layers.{layers}.mlp.down_proj.weight": "hidden, inner",
    }
)
PROJECTION = Tensors(
    shapes={"fc.weight": "hidden, taps*features", "hidden_norm.weight": "hidden", "norm.weight": "hidden"}
)
CONVOLUTIONS = Tensors(
    shapes={
        f"layers.{{layers}}.{name}.{part}": shape
        for name in ("attention_conv", "mlp_conv")
        for part, shape in (
            ("base_kernel", "2, conv_taps, hidden"),
            ("kernel_projection.weight", "2*conv_taps*conv_groups, hidden"),
        )
    },
    when="conv_taps",
)
"""Grouped convolutions around each sublayer. Source: z-lab/dflash 0.1.0 model.py GroupedDynamicCausalConv."""
BORROWED = Tensors(
    shapes={
        "embed_tokens.weight": "vocab, hidden",
        "lm_head.weight": "out, hidden",
        "d2t": "out",
        "t2d": "vocab",
        "verifier_norm.weight": "hidden",
        "verifier_lm_head.weight": "out, hidden",
    },
    is_needed=False,
)
"""Copies of the target's tensors, and the id map of a reduced vocabulary."""
OUT = {"out": "draft_vocab or vocab"}

DFLASH_LAYERS = (PROJECTION, ATTENTION, BIASES, HEAD_NORMS, REST_OF_LAYER, BORROWED)
