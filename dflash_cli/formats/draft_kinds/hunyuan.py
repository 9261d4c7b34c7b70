"""DFlash of HunYuan targets."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, named_architectures
from dflash_cli.formats.draft_kinds.body import (
    ATTENTION,
    BIASES,
    BORROWED,
    DERIVED,
    DFLASH_KEYS,
    HEAD_NORMS,
    OUT,
    PROJECTION,
    REST_OF_LAYER,
)
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Key, Tensors
from dflash_cli.formats.relatives import DRAFT_KEYS

HEAD_NORMS_OF_HUNYUAN = {
    "layers.{layers}.self_attn.query_layernorm.weight": "head_dim",
    "layers.{layers}.self_attn.key_layernorm.weight": "head_dim",
}


@FORMATS.register("hunyuan")
class HunYuan(Kind):
    """DFlash of HunYuan targets. Its projections have the same shapes as DFlash's, so it is recognised by names.

    Source: vllm-project/vllm#43397 (closed), model_executor/models/hunyuan_v1_dflash.py.
    """

    title = "HunYuan DFlash"
    architectures = r".*(HunYuan|Hunyuan)"
    model_types = frozenset({"hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl", "hunyuan_vl_text"})
    tensors = r"layers\.\d+\.self_attn\.(query|key)_layernorm\."
    difference = "it applies rope to queries and keys before their norms, DFlash after them"
    head = "none beside DFlash's layers; rope comes before the norms of queries and keys"
    stated = (
        *DFLASH_KEYS,
        Key(size="head_norms", names=("use_qk_norm",), form="flag", is_needed=False),
        Key(size="num_experts", names=("num_experts",), form="index", is_needed=False),
    )
    derived: ClassVar[Mapping[str, str]] = {**DERIVED, **OUT}
    parts = (
        PROJECTION,
        ATTENTION,
        BIASES,
        REST_OF_LAYER,
        BORROWED,
        Tensors(shapes=HEAD_NORMS_OF_HUNYUAN, when="head_norms"),
        Tensors(shapes={**HEAD_NORMS_OF_HUNYUAN, **HEAD_NORMS.shapes}, when="!head_norms", is_needed=False),
    )
    why_not_renamed = "a DFlash reader would apply rope after the norms"

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """A HunYuan target has the same names, so only a config with a draft's keys counts."""
        is_draft = any(key in config for key in DRAFT_KEYS) or "DFlash" in "".join(named_architectures(config))
        return super().evidence(config, tensor_names) if is_draft else None
