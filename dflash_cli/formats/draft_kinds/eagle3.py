"""EAGLE-3."""

from collections.abc import Mapping
from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import DERIVED, LLAMA_HEAD, OUT, SIZES, WIDTH
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key, Renaming, Service, Tensors

FIRST = "layers.0"
LATER = "layers.{1:layers}"
LAYERS = (
    Tensors(shapes={"fc.weight": "hidden, taps*features", "norm.weight": "hidden"}),
    Tensors(
        shapes={
            f"{FIRST}.hidden_norm.weight": "hidden",
            f"{FIRST}.self_attn.q_proj.weight": "heads*head_dim, 2*hidden",
            f"{FIRST}.self_attn.k_proj.weight": "kv_heads*head_dim, 2*hidden",
            f"{FIRST}.self_attn.v_proj.weight": "kv_heads*head_dim, 2*hidden",
            f"{LATER}.self_attn.q_proj.weight": "heads*head_dim, hidden",
            f"{LATER}.self_attn.k_proj.weight": "kv_heads*head_dim, hidden",
            f"{LATER}.self_attn.v_proj.weight": "kv_heads*head_dim, hidden",
            "layers.{layers}.self_attn.o_proj.weight": "hidden, heads*head_dim",
            "layers.{layers}.input_layernorm.weight": "hidden",
            "layers.{layers}.post_attention_layernorm.weight": "hidden",
            "layers.{layers}.mlp.gate_proj.weight": "inner, hidden",
            "layers.{layers}.mlp.up_proj.weight": "inner, hidden",
            "layers.{layers}.mlp.down_proj.weight": "hidden, inner",
        }
    ),
    Tensors(
        shapes={
            "layers.{layers}.self_attn.q_proj.bias": "heads*head_dim",
            "layers.{layers}.self_attn.k_proj.bias": "kv_heads*head_dim",
            "layers.{layers}.self_attn.v_proj.bias": "kv_heads*head_dim",
        },
        when="bias",
    ),
    Tensors(
        shapes={
            "layers.{layers}.self_attn.o_proj.bias": "hidden",
            "layers.{layers}.self_attn.q_norm.weight": "head_dim",
            "layers.{layers}.self_attn.k_norm.weight": "head_dim",
            f"{LATER}.hidden_norm.weight": "hidden",
        },
        is_needed=False,
    ),
    Tensors(shapes={"input_norm.weight": "taps*features"}, when="norm_before_fc"),
    Tensors(shapes={"fc_norm.{taps}.weight": "features"}, when="norm_by_tap"),
    Tensors(shapes={"lm_head.weight": "out, hidden", "d2t": "out"}, when="left_out"),
    Tensors(shapes={"lm_head.weight": "out, hidden"}, when="!left_out", is_needed=False),
    Tensors(
        shapes={
            "embed_tokens.weight": "vocab, hidden",
            "t2d": "vocab",
            "verifier_norm.weight": "features",
            "verifier_lm_head.weight": "out, features",
        },
        is_needed=False,
    ),
)
SETTINGS = (
    *SIZES,
    LLAMA_HEAD,
    WIDTH,
    Key(size="draft_vocab", names=("draft_vocab_size",), default="vocab"),
    Key(
        size="aux",
        names=("eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"),
        form="layers",
        is_needed=False,
    ),
    Key(size="num_aux", names=("num_aux_hidden_states",), is_needed=False),
    Key(size="use_aux", names=("eagle_config.use_aux_hidden_state",), form="flag", is_needed=False),
    Key(size="norm_first", names=("norm_before_residual",), form="flag", is_needed=False, only="native"),
    Key(size="norm_before_fc", names=("eagle_config.norm_before_fc", "norm_before_fc"), form="flag", is_needed=False),
    Key(size="norm_by_tap", names=("fc_norm", "use_aux_norm"), form="flag", is_needed=False),
    Key(size="norm_output", names=("norm_output",), form="flag", is_needed=False),
)
SIZES_OF_TAPS = {**DERIVED, **OUT, "taps": "num_aux or aux or 3", "left_out": "vocab-out"}
NATIVE_KEYS = {"eagle_aux_hidden_state_layer_ids": "eagle_config.eagle_aux_hidden_state_layer_ids"}
FAMILIES = {"llama": "Llama", "qwen3": "Qwen3"}
VLLM_NAMES = (
    "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3Qwen3ForCausalLM",
    "Qwen3ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM",
    "MiniMaxM2ForCausalLM", "Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)  # fmt: skip
"""Entries of `architectures` that vLLM registers, with and without the prefix that it adds."""


@FORMATS.register("eagle3")
class Eagle3(Kind):
    """EAGLE-3. Some of its tensors have DFlash's names, so it is recognised by the others.

    Sources: vLLM 0.24.0 to 0.33.0 model_executor/models/llama_eagle3.py, registry.py and
    transformers_utils/configs/eagle.py;
    SGLang 0.5.23 srt/models/llama_eagle3.py; speculators 0.9.0 models/eagle3; ggml-org/llama.cpp#18039, #24977 and
    conversion/llama.py.
    """

    title = "EAGLE-3"
    serve_method: ClassVar[str] = "eagle3"
    types = frozenset({"eagle3"})
    architectures = r".*Eagle3"
    tensors = r"midlayer\.|layers\.0\.hidden_norm\."
    difference = "it drafts one token at a time, each from the previous token's hidden state"
    head = "its own head over {out} of {vocab} ids; {taps} tapped layers feed it; it drafts token by token"
    is_chain = True
    listed = r"(?!.*Deepseek)"
    aliases: ClassVar[Mapping[str, str]] = {
        "midlayer.": "layers.0.",
        "aux_norm_low.": "fc_norm.0.",
        "aux_norm_mid.": "fc_norm.1.",
        "aux_norm_high.": "fc_norm.2.",
    }
    stated = (
        *SETTINGS,
        Key(size="norm_first", names=("norm_before_residual",), form="flag", default=True, only="speculators"),
    )
    derived: ClassVar[Mapping[str, str]] = SIZES_OF_TAPS
    parts = LAYERS
    services = (
        Service(
            engine="vllm",
            architectures=dict.fromkeys(VLLM_NAMES, (0, 24)),
            types={"eagle3": (0, 24)},
            of_types={"model_type": (None, "llama", "qwen3")},
        ),
        Service(
            engine="sglang",
            architectures=dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"), (0, 5, 23)),
            ignores={"norm_first": (None, False), "bias": (None, False)},
        ),
        Service(
            engine="llama.cpp",
            architectures=dict.fromkeys(("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"), ()),
            types={"eagle3": ()},
            demands={"layers": (1,)},
            note="it always taps the outputs of the layers 1, n/2 - 1 and n - 4",
        ),
    )
    renamings = (
        *(
            Renaming(to=to, since="speculators", architecture="LlamaForCausalLMEagle3", keys=NATIVE_KEYS,
                     demands={"model_type": (None, "llama"), **demands})
            for to, demands in (("native", {}), ("sglang", {"norm_first": (None, False)}))
        ),
        Renaming(
            to="sglang", since="native", architecture="LlamaForCausalLMEagle3", demands={"norm_first": (None, False)}
        ),
        Renaming(to="vllm", since="native", architecture="Eagle3{family}ForCausalLM", families=FAMILIES),
        Renaming(
            to="speculators",
            since="native",
            variant="speculators",
            architecture="Eagle3Speculator",
            tensors={r"^midlayer\.": "layers.0."},
            keys={new: old for old, new in NATIVE_KEYS.items()},
            added={"norm_before_residual": False},
        ),
    )  # fmt: skip
