"""DFlash of Laguna targets."""

from collections.abc import Mapping
from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import DERIVED, DFLASH_KEYS, DFLASH_LAYERS, OUT
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import BODY, Key, Service, Tensors
from dflash_cli.formats.relatives import TARGET_CLASS


@FORMATS.register("laguna")
class Laguna(Kind):
    """Laguna's DFlash.

    Sources: vLLM 0.33.0 model_executor/models/laguna_dflash.py and laguna.py; SGLang 0.5.23 srt/models/dflash.py
    DFlashLagunaForCausalLM and srt/configs/laguna.py.
    """

    title = "Laguna DFlash"
    architectures = rf"DFlashLaguna|Laguna(?!{TARGET_CLASS})"
    tensors = r"aux_hidden_norms\.|layers\.\d+\.self_attn\.g_proj\."
    difference = "its attention is gated, and each tapped layer's output has its own norm"
    head = "none; attention is gated {gating}, and {taps_count} tapped layers have norms of their own"
    stated = (
        *(key for key in DFLASH_KEYS if key.size not in ("kinds", "draft_vocab", "taps")),
        Key(size="taps", names=("dflash_config.target_layer_ids",), form="layers"),
        Key(size="kinds", names=(f"{BODY}layer_types",), form="one kind"),
        Key(size="draft_vocab", names=("draft_vocab_size",)),
        Key(
            size="gating", names=("gating",), choices=(True, "per-head", "per-element", False, "disabled"), default=True
        ),
        Key(size="heads_by_layer", names=("num_attention_heads_per_layer",), form="layers", is_needed=False),
    )
    derived: ClassVar[Mapping[str, str]] = {**DERIVED, **OUT, "taps_count": "taps"}
    parts = (
        *DFLASH_LAYERS,
        Tensors(shapes={"aux_hidden_norms.{taps}.weight": "features"}),
        Tensors(shapes={"layers.{layers}.self_attn.g_proj.weight": "heads, hidden"}, when="gating=True|per-head"),
        Tensors(
            shapes={"layers.{layers}.self_attn.g_proj.weight": "heads*head_dim, hidden"}, when="gating=per-element"
        ),
    )
    services = (
        Service(
            engine="vllm",
            architectures={"DFlashLagunaForCausalLM": (0, 25), "LagunaForCausalLM": (0, 25)},
            needs_all_ids=True,
        ),
        Service(engine="sglang", architectures={"DFlashLagunaForCausalLM": (0, 5, 23)}, needs_all_ids=True),
    )
