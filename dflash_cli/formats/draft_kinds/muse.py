"""The assistant model of Muse Glimmer: DFlash under other names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.draft_kinds.body import (
    ATTENTION,
    BLOCK,
    BORROWED,
    DERIVED,
    HEAD_NORMS,
    MASK,
    OUT,
    QWEN3_HEAD,
    REDUCED,
    REST_OF_LAYER,
    SIZES,
    TAPS,
    WIDTH,
)
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.table import Renaming, Service, Tensors
from dflash_cli.formats.relatives import TARGET_CLASS

DEFAULTS = {
    "hidden": 6656, "inner": 19968, "layers": 5, "heads": 32, "kv_heads": 8, "vocab": 202048, "eps": 1e-5,
    "positions": 131072, "block": 16, "mask": 201818, "taps": [1, 13, 25, 37, 49],
}  # fmt: skip
"""Size -> the default of transformers' config class, or of vLLM for the vocabulary."""


@FORMATS.register("muse")
class Muse(Kind):
    """The assistant model of Muse Glimmer.

    Sources: transformers 5.23.0 models/muse_glimmer_assistant; vLLM 0.33.0 config/speculative.py and registry.py;
    SGLang 0.5.23 srt/models/dflash.py; ggml-org/llama.cpp conversion/muse_glimmer.py.
    """

    title = "Muse Glimmer assistant"
    model_types = frozenset({"muse_glimmer_assistant"})
    architectures = rf"MuseGlimmerAssistant|MuseSpark(?!{TARGET_CLASS})"
    difference = "its context encoder has other tensor names, and readers of DFlash do not find its settings"
    head = "none beside DFlash's layers; the context projection is named encoder"
    stated = tuple(
        replace(key, default=DEFAULTS.get(key.size, key.default), is_needed=key.is_needed and key.size != "vocab")
        for key in (*SIZES, QWEN3_HEAD, WIDTH, BLOCK, TAPS, MASK, REDUCED)
    )
    derived: ClassVar[Mapping[str, str]] = {**DERIVED, **OUT}
    parts = (
        Tensors(
            shapes={
                "encoder.fc.weight": "hidden, taps*features",
                "encoder.output_norm_enc.weight": "hidden",
                "norm.weight": "hidden",
            }
        ),
        ATTENTION,
        HEAD_NORMS,
        REST_OF_LAYER,
        BORROWED,
    )
    services = (
        Service(
            engine="vllm",
            architectures={"MuseGlimmerAssistantModel": (0, 28), "DFlashMuseGlimmerAssistantModel": (0, 28)},
        ),
        Service(engine="sglang", architectures={"MuseGlimmerAssistantModel": (0, 5, 23)}, needs_all_ids=True),
        Service(engine="llama.cpp", architectures={"MuseGlimmerAssistantModel": ()}, needs_all_ids=True),
    )
    renamings = (
        Renaming(
            to="native",
            architecture="DFlashDraftModel",
            tensors={r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."},
            keys={"mask_token_id": "dflash_config.mask_token_id", "target_layer_ids": "dflash_config.target_layer_ids"},
            added={
                "model_type": "qwen3",
                "is_causal": False,
                "vocab_size": "{vocab}",
                "attention_bias": False,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            },
        ),
    )
