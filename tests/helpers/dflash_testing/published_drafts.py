"""The published drafts, with the keys of their configs in small sizes, and the result of each.

Layers, taps, blocks and kinds of attention are as published. Widths, vocabularies, windows, lengths and the target's
depth are small. Sources: the drafts' config.json as quoted in sgl-project/SpecForge configs/,
vllm-project/vllm#38300, #41703, #43397, #46104, #56692, z-lab/dflash#152, and the models' own loaders.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from dflash_testing import checkpoints as support
from dflash_testing.checkpoints import REMOVED, SMALL, Arrays, Json, Shape
from dflash_testing.families import MARKOV, is_of_family, own_shapes

RUNS = "runs"


@dataclass(frozen=True, kw_only=True)
class PublishedDraft:
    """One row of docs/reference/drafts.md.

    outcome   RUNS, or the reason of the refusal in the table
    rule      id of the rule that refuses the draft
    named     a name in every refusal of the draft: a config key, or the draft's own kind
    options   options that commands need to convert and run it
    """

    name: str
    beyond: str
    rule: str = ""
    named: str = ""
    shape: Shape = SMALL
    changes: Json = field(default_factory=dict)
    nested: Json = field(default_factory=dict)
    body: Json = field(default_factory=dict)
    dialect: str = "native"
    outcome: str = RUNS
    note: str = ""
    options: tuple[str, ...] = ()

    @property
    def config(self) -> Json:
        if self.dialect == "speculators":
            config = support.speculators_config(self.shape, **self.changes)
            config["transformer_layer_config"] |= self.body
            return config
        config = support.native_config(self.shape, **self.changes)
        config["dflash_config"] |= self.nested
        return config

    @property
    def arrays(self) -> Arrays:
        arrays = support.body_arrays(self.shape)
        if is_of_family(self.config):
            arrays |= support.random_arrays(own_shapes(self.config, self.shape), seed=3)
        if self.shape.draft_vocab != self.shape.vocab:
            arrays |= support.reduced_arrays(self.shape, support.target_arrays(self.shape))
        return arrays


def shape(layers: int, taps: int, block: int, **changes: Any) -> Shape:
    """Return a shape with these layers, taps and block rows, and a target with two layers per tap and one more."""
    changes.setdefault("windows", (None,) * layers)
    spread = tuple(range(1, 2 * taps, 2))
    return replace(SMALL, layers=layers, taps=spread, block=block, target_layers=2 * taps + 1, **changes)


def windows(*kinds: str) -> tuple[int | None, ...]:
    return tuple(16 if kind == "s" else None for kind in "".join(kinds))


ZLAB: Json = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "is_causal": REMOVED}
"""z-lab's configs leave out causality: sliding layers are causal, full layers are not."""

SPEC: Json = {"speculators_version": "0.5.0.dev163", "sliding_window_non_causal": REMOVED}

CONVOLVED: Json = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 4}

PUBLISHED = (
    PublishedDraft(name="z-lab Qwen3-8B", beyond="nothing", shape=shape(5, 5, 16), changes=ZLAB),
    PublishedDraft(
        name="z-lab Qwen3-4B", beyond="`tie_word_embeddings`", shape=shape(5, 5, 16),
        changes=ZLAB | {"tie_word_embeddings": True}, note="the flag means nothing in a draft",
    ),
    PublishedDraft(name="z-lab Llama-3.1-8B", beyond="block 10", shape=shape(5, 5, 10), changes=ZLAB),
    PublishedDraft(
        name="z-lab Qwen3.5-4B, -9B, -27B", beyond="a hybrid target; rope base 10,000,000 or 5,000,000",
        shape=shape(5, 5, 16, theta=1e7), changes=ZLAB,
    ),
    PublishedDraft(
        name="z-lab Qwen3.5-35B-A3B", beyond="8 layers, 5 taps; 4 KV heads where the target has 2",
        shape=shape(8, 5, 16, kv_heads=4), changes=ZLAB,
    ),
    PublishedDraft(
        name="z-lab Qwen3.5-122B-A10B, April", beyond="4 layers, 6 taps, windows", changes=ZLAB,
        shape=shape(4, 6, 16, windows=windows("ssss")),
    ),
    PublishedDraft(
        name="z-lab Qwen3.5-122B-A10B, June", beyond="6 layers, 8 taps, windows", changes=ZLAB,
        shape=shape(6, 8, 16, windows=windows("ssssss")),
    ),
    PublishedDraft(
        name="z-lab Qwen3.6-27B", beyond="4 sliding layers and a full one", changes=ZLAB,
        shape=shape(5, 5, 16, windows=windows("ssssf")),
    ),
    PublishedDraft(
        name="z-lab Qwen3.6-27B, first upload", beyond="YaRN, factor 64",
        shape=shape(5, 5, 16, windows=windows("ssssf")),
        changes=ZLAB | {
            "rope_scaling": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16}
        },
    ),
    PublishedDraft(
        name="z-lab gpt-oss-20b", shape=shape(8, 5, 8, bias=True, theta=150000.0),
        beyond="`model_type` gpt_oss, biases, 8 layers, 5 taps; no `layer_types`, no `num_target_layers`",
        changes=ZLAB | {
            "model_type": "gpt_oss", "layer_types": REMOVED, "num_target_layers": REMOVED,
            "initial_context_length": 64,
        },
        note="taken as full attention, with a note; `--target` to convert",
    ),
    PublishedDraft(
        name="z-lab gemma-4-31B", shape=shape(5, 6, 16, heads=8, kv_heads=2, windows=windows("ssssf")),
        beyond="6 taps, a soft cap of 30, more heads than fit its width, an embedding scale",
        changes=ZLAB | {"tie_word_embeddings": True},
        nested={"final_logit_softcapping": 30.0, "input_embedding_scale": 4.0},
        note="the scale if it is stated; P10 asks for it where it is not",
    ),
    PublishedDraft(
        name="community Qwen3.8-Flash-Next", beyond="block 7", shape=shape(5, 5, 7), changes=ZLAB,
    ),
    PublishedDraft(
        name="community North-Mini-Code", beyond="block 8, windows, a reduced vocabulary", dialect="speculators",
        shape=shape(5, 5, 8, draft_vocab=12, windows=windows("sssss")), changes=SPEC,
    ),
    PublishedDraft(
        name="SpecForge LFM2.5-1.2B", beyond="8 layers; a common token as mask", shape=shape(8, 5, 16, mask=16),
        changes={"is_causal": REMOVED}, nested={"attention_mode": "gqa"},
    ),
    PublishedDraft(
        name="SpecForge LongCat-Flash", beyond="the stop token as mask", shape=shape(5, 5, 16, mask=1),
        changes={"is_causal": REMOVED, "eos_token_id": 1}, note="warned of (C14)",
    ),
    PublishedDraft(
        name="RedHatAI Qwen3-8B", beyond="speculators, 32,000 of the target's ids, block 8", dialect="speculators",
        shape=shape(5, 5, 8, draft_vocab=12), changes=SPEC | {"max_anchors": 3072},
    ),
    PublishedDraft(
        name="RedHatAI Qwen3-30B-A3B", beyond="speculators, 5 taps of 48 layers", dialect="speculators",
        shape=shape(5, 5, 8), changes=SPEC,
    ),
    PublishedDraft(
        name="RedHatAI Mistral-Small-4", beyond="speculators, 3 taps, windows", dialect="speculators",
        shape=shape(5, 3, 8, windows=windows("sssss")), changes=SPEC,
    ),
    PublishedDraft(
        name="RedHatAI gemma-4-31B", beyond="speculators, 6 taps", dialect="speculators", shape=shape(5, 6, 8),
        changes=SPEC,
    ),
    PublishedDraft(
        name="RedHatAI DeepSeek-V4-Flash", beyond="speculators, a target with latent attention", dialect="speculators",
        shape=shape(5, 5, 8, draft_vocab=12), changes=SPEC | {"max_anchors": 3072},
    ),
    PublishedDraft(
        name="nvidia Nemotron-3.5-Lightning", beyond="an embedding of its own, NVFP4, no `block_size`",
        shape=shape(5, 6, 4),
        outcome="the draft has its own weights where a DFlash draft uses the target's", rule="C48",
        named="has_embed_tokens",
        changes={
            "has_embed_tokens": True, "has_lm_head": False, "block_size": REMOVED, "pard_token": 31,
            "quantization_config": {"quant_algo": "W4A16_NVFP4"}, "model_type": "qwen3",
        },
    ),
    PublishedDraft(
        name="XiaomiMiMo V2.5-Pro-FP4", shape=shape(5, 5, 16),
        beyond="attention sinks, scaled values, rope over half a head, `mask_embedding.pt`",
        outcome="attention values are scaled", rule="C48", named="attention_value_scale",
        changes={"layer_types": REMOVED, "partial_rotary_factor": 0.5, "v_head_dim": 8, "is_causal": REMOVED},
        nested={"use_swa": True, "swa_window_size": 16, "attention_value_scale": 0.612, "attention_sink_bias": True},
    ),
    PublishedDraft(
        name="z-lab Qwen3.8-27B-DFlash2", beyond="convolutions, a candidate selector", shape=shape(5, 5, 8),
        changes={"architectures": ["DFlash2DraftModel"], "block_size": REMOVED},
        nested={"block_size": 8, **CONVOLVED},
    ),
    PublishedDraft(
        name="z-lab Muse-Glimmer-30B-DFlash2", beyond="as above, and scaled logits with a soft cap",
        shape=shape(5, 5, 16), changes={"architectures": ["DFlash2DraftModel"]},
        nested={**CONVOLVED, "output_multiplier": 0.196, "final_logit_softcapping": 20},
    ),
    PublishedDraft(
        name="RedHatAI Qwen3-8B dflash2", beyond="DFlash 2 in speculators", dialect="speculators",
        shape=shape(8, 5, 16), changes={"speculators_model_type": "dflash2", **CONVOLVED},
    ),
    PublishedDraft(
        name="lightseekorg kimi-k3-dflash2", beyond="DFlash 2 with latent attention", shape=shape(5, 5, 8),
        changes={"architectures": ["DFlash2DraftModel"]}, nested={**CONVOLVED, "attention_mode": "mla"},
        outcome="latent attention, for which no engine has a model of a draft", rule="C48", named="attention_mode",
    ),
    PublishedDraft(
        name="RedHatAI GLM-5.3 dspark", beyond="predicts at the anchor; Markov and confidence heads",
        dialect="speculators", shape=shape(5, 5, 8), changes={"speculators_model_type": "dspark", **MARKOV},
    ),
    PublishedDraft(
        name="deepseek-ai dflash_qwen3_8b_block7", beyond="DSpark without its head; its layout is not stated",
        shape=shape(5, 5, 7), changes={"architectures": ["Qwen3DSparkModel"], "markov_rank": 0},
        options=("--layout", "anchor-first"), note="with `--layout anchor-first`",
    ),
    PublishedDraft(
        name="deepseek-ai dflash_gemma4_12b_block7", beyond="DSpark with layers of Gemma 4", shape=shape(5, 5, 7),
        changes={"architectures": ["Gemma4DSparkModel"], "markov_rank": 0},
        outcome="its layers are not the ones of a DFlash draft", rule="C01", named="DSpark",
    ),
)  # fmt: skip


def table() -> str:
    """Return the table of docs/reference/drafts.md."""
    rows = ["| draft | beyond a Qwen3 draft of a Qwen3 target | here |", "|---|---|---|"]
    for item in PUBLISHED:
        what = RUNS if item.outcome == RUNS else f"refused: {item.outcome}"
        rows.append(f"| {item.name} | {item.beyond} | {what}{f'; {item.note}' if item.note else ''} |")
    return "\n".join(rows)
