"""Multi-token prediction layers in a file of their own."""

from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import QWEN3_HEAD, SIZES
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import BODY, Key, Renaming, Service, Tensors

FIRST_RELEASES = {
    (0, 24): (
        "MiMoMTPModel", "MiMoV2MTPModel", "MiMoV2OmniMTPModel", "DeepSeekMTPModel", "DeepSeekV4MTPModel",
        "MiniMaxM3MTP", "Gemma4MTPModel", "ErnieMTPModel", "ExaoneMoeMTP", "Exaone4_5_MTP", "NemotronHMTPModel",
        "LongCatFlashMTPModel", "Glm4MoeMTPModel", "Glm4MoeLiteMTPModel", "GlmOcrMTPModel", "OpenPanguMTPModel",
        "Qwen3NextMTP", "Step3p5MTP", "Qwen3_5MTP", "Qwen3_5MoeMTP", "HYV3MTPModel",
    ),
    (0, 25): ("BailingMoeV25MTPModel",),
    (0, 26): ("InklingMTPModel",),
    (0, 27): ("KimiK3MTPModel",),
    (0, 28): ("Dots3NoteMTPModel", "BailingMoeV3MTPModel", "InternS2MobiusMTP"),
    (0, 29): ("DeepseekV32MTPModel", "Qwen4ExpMTP", "HYV4MTPModel"),
    (0, 30): ("Glm5NextMTPModel",),
    (0, 33): ("ParseAuxMTPModel", "Step5MTP"),
}  # fmt: skip
OF_SGLANG = (
    "Ernie4_5_MoeForCausalLMMTP", "ExaoneMoEForCausalLMMTP", "Gemma4AssistantForCausalLM", "IQuestQ1MTP",
    "InklingForConditionalGenerationMTP", "MiMoMTP", "MiMoV2MTP", "NemotronHForCausalLMMTP", "Qwen3MoeForCausalLMMTP",
    "Qwen3NextForCausalLMMTP", "Qwen3_5ForCausalLMMTP", "Qwen4ExpForCausalLMMTP", "Step3p5MTP",
)  # fmt: skip
"""Sources: registry.py of each release of vLLM; EntryClass of SGLang 0.5.23 srt/models."""

OWN = {
    "fc.weight": ("input_proj.weight", "hidden, 2*hidden"),
    "norm.weight": ("final_layernorm.weight", "hidden"),
    "pre_fc_norm_hidden.weight": ("hidden_layernorm.weight", "hidden"),
    "pre_fc_norm_embedding.weight": ("token_layernorm.weight", "hidden"),
    "layers.0.input_layernorm.weight": ("input_layernorm.weight", "hidden"),
    "layers.0.post_attention_layernorm.weight": ("post_attention_layernorm.weight", "hidden"),
    "layers.0.self_attn.o_proj.weight": ("self_attn.o_proj.weight", "hidden, heads*head_dim"),
}
"""Name in a target's file after `mtp.` -> name in speculators' after `mtp_layers.0.`, and its shape."""


@FORMATS.register("mtp")
class Mtp(Kind):
    """Multi-token prediction layers. The table lists the layout of Qwen3-Next and Qwen3.5.

    Sources: vLLM 0.33.0 model_executor/models/qwen3_5_mtp.py and qwen3_next_mtp.py; SGLang 0.5.23
    srt/models/qwen3_5_mtp.py; speculators 0.9.0 models/mtp and convert/mtp/converter.py.
    """

    title = "MTP"
    serve_method: ClassVar[str] = "mtp"
    types = frozenset({"mtp"})
    architectures = r".*MTP"
    difference = "it is a chain of prediction layers that belong to the target"
    head = "none of its own: {num_layers} prediction layers of the target, which draft token by token"
    is_chain = True
    listed = r"Qwen3(Next|_5)"
    free = r"mtp\.layers\.\d+\.(self_attn|mlp)\.|mtp_layers\.\d+\.(self_attn|mlp)\.|(model\.)?embed_tokens\.|lm_head\."
    stated = (
        *SIZES,
        QWEN3_HEAD,
        Key(
            size="num_layers",
            names=("num_nextn_predict_layers", f"{BODY}mtp_num_hidden_layers", f"{BODY}num_nextn_predict_layers"),
            default=1,
        ),
        Key(size="gate", names=(f"{BODY}attn_output_gate",), form="flag", is_needed=False),
        Key(size="num_experts", names=(f"{BODY}num_experts",), form="index", is_needed=False),
    )
    parts = (
        Tensors(shapes={f"mtp.{name}": shape for name, (_, shape) in OWN.items()}, only="native"),
        Tensors(shapes={f"mtp_layers.0.{name}": shape for name, shape in OWN.values()}, only="speculators"),
    )
    services = (
        Service(
            engine="vllm",
            architectures={name: release for release, names in FIRST_RELEASES.items() for name in names},
        ),
        Service(engine="sglang", architectures=dict.fromkeys(OF_SGLANG, (0, 5, 23))),
    )
    renamings = (
        *(
            Renaming(
                to=to,
                architecture=f"{{family}}{ending}",
                families=families,
                tensors={
                    **{rf"^mtp_layers\.0\.{new}$": f"mtp.{old}" for old, (new, _) in list(OWN.items())[:4]},
                    r"^mtp_layers\.0\.": "mtp.layers.0.",
                },
                keys={"num_nextn_predict_layers": "mtp_num_hidden_layers"},
            )
            for to, ending, families in (
                (
                    "native",
                    "MTP",
                    {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"},
                ),
                (
                    "vllm",
                    "MTP",
                    {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5", "qwen3_5_moe_text": "Qwen3_5Moe"},
                ),
                ("sglang", "ForCausalLMMTP", {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5"}),
            )
        ),
        Renaming(
            to="speculators",
            since="native",
            variant="speculators",
            architecture="MTPDraftModel",
            tensors={
                **{rf"^mtp\.{old}$": f"mtp_layers.0.{new}" for old, (new, _) in list(OWN.items())[:4]},
                r"^mtp\.layers\.0\.": "mtp_layers.0.",
            },
            keys={"mtp_num_hidden_layers": "num_nextn_predict_layers"},
        ),
    )
