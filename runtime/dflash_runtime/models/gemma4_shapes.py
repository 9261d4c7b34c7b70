"""The tensors of a layer of a Gemma 4 decoder, by name and shape. Needs no torch."""

from dflash_runtime.checkpoint.layout import Shape
from dflash_runtime.target_config import TargetConfig

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
EXPERT_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")


def has_equal_kv(config: TargetConfig, layer: int) -> bool:
    """Whether the values of a layer are its keys before their norm and rope."""
    return config.gemma is not None and config.gemma.has_equal_kv and config.windows[layer] is None


def mixer_shapes(config: TargetConfig, layer: int) -> dict[str, Shape]:
    """Return the tensors of attention, norms and scale, by their names in the layer."""
    num_kv, size = config.kv_shapes[layer]
    hidden, queries, keys = config.hidden_size, config.num_heads * size, num_kv * size
    shapes: dict[str, Shape] = {
        "q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden),
        "o_proj": (hidden, queries), "q_norm": (size,), "k_norm": (size,),
    }  # fmt: skip
    if has_equal_kv(config, layer):
        del shapes["v_proj"]
    named = {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}
    return {**named, **{f"{norm}.weight": (hidden,) for norm in NORMS}, "layer_scalar": (1,)}


def experts_beside_shapes(config: TargetConfig) -> dict[str, Shape]:
    """Return the tensors of experts beside a dense feed-forward, by their names in the layer. None without experts."""
    own, hidden = config.experts, config.hidden_size
    if own is None:
        return {}
    count, inner = own.num_experts, own.intermediate_size
    return {
        **{f"{norm}.weight": (hidden,) for norm in EXPERT_NORMS},
        "router.proj.weight": (count, hidden), "router.scale": (hidden,), "router.per_expert_scale": (count,),
        "experts.gate_up_proj": (count, 2 * inner, hidden), "experts.down_proj": (count, hidden, inner),
    }  # fmt: skip
