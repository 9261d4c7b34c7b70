"""EAGLE and EAGLE-2."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, named_architectures
from dflash_cli.formats.draft_kinds.body import ATTENTION, BIASES, LLAMA_HEAD, OUT, REDUCED, SIZES
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key, Renaming, Service, Tensors
from dflash_cli.formats.relatives import DRAFT_KEYS

FAMILIES = {
    "cohere": "Cohere", "llama": "Llama", "llama4": "Llama4", "minicpm": "MiniCPM", "mistral": "Mistral",
    "qwen2": "Qwen2",
}  # fmt: skip
OF_VLLM = ("Cohere", "Llama", "Llama4", "MiniCPM", "Mistral", "MistralLarge3")
OF_SGLANG = ("Llama", "Mistral", "MistralLarge3", "Qwen2")


@FORMATS.register("eagle")
class Eagle(Kind):
    """EAGLE and EAGLE-2. The head has a target's architecture name. Its fc.weight stands without a norm.

    Sources: vLLM 0.24.0 to 0.33.0 model_executor/models/llama_eagle.py, registry.py and
    transformers_utils/configs/eagle.py;
    SGLang 0.5.23 srt/models/llama_eagle.py, qwen2_eagle.py and mistral_eagle.py.
    """

    title = "EAGLE"
    priority = 12
    serve_method: ClassVar[str] = "eagle"
    types = frozenset({"eagle"})
    architectures = r".*Eagle"
    difference = "it drafts one token at a time, each from the previous token's hidden state and embedding"
    head = "none of its own: it borrows the target's; it drafts token by token from one layer's output"
    is_chain = True
    stated = (
        *SIZES,
        LLAMA_HEAD,
        REDUCED,
        Key(size="fc_bias", names=("bias",), form="flag", is_needed=False),
    )
    derived: ClassVar[Mapping[str, str]] = OUT
    parts = (
        Tensors(shapes={"fc.weight": "hidden, 2*hidden"}),
        Tensors(shapes={"fc.bias": "hidden"}, when="fc_bias"),
        ATTENTION,
        BIASES,
        Tensors(
            shapes={
                "layers.{1:layers}.input_layernorm.weight": "hidden",
                "layers.{layers}.post_attention_layernorm.weight": "hidden",
                "layers.{layers}.mlp.gate_proj.weight": "inner, hidden",
                "layers.{layers}.mlp.up_proj.weight": "inner, hidden",
                "layers.{layers}.mlp.down_proj.weight": "hidden, inner",
            }
        ),
        Tensors(shapes={"embed_tokens.weight": "vocab, hidden", "lm_head.weight": "out, hidden"}, is_needed=False),
    )
    services = (
        Service(
            engine="vllm",
            architectures=dict.fromkeys(
                [f"{prefix}{family}ForCausalLM" for family in OF_VLLM for prefix in ("", "Eagle")], (0, 24)
            ),
            demands={"fc_bias": (None, False)},
        ),
        Service(
            engine="sglang",
            architectures=dict.fromkeys([f"{family}ForCausalLMEagle" for family in OF_SGLANG], (0, 5, 23)),
        ),
    )
    renamings = (
        Renaming(to="vllm", architecture="Eagle{family}ForCausalLM", families=FAMILIES),
        Renaming(to="sglang", architecture="{family}ForCausalLMEagle", families=FAMILIES),
        Renaming(to="native", architecture="{family}ForCausalLM", families=FAMILIES),
    )

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """A DFlash draft also has fc.weight, with hidden_norm.weight and the architecture of a draft."""
        is_head = "fc.weight" in tensor_names and not any("hidden_norm" in name for name in tensor_names)
        is_draft = any(key in config for key in DRAFT_KEYS) or "DFlash" in "".join(named_architectures(config))
        found = super().evidence(config, tensor_names)
        return (
            "it has the tensor fc.weight without hidden_norm.weight"
            if not found and is_head and not is_draft
            else found
        )
