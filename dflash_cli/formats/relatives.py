"""Relatives of DFlash. They are recognised and refused by name, because several carry DFlash's architecture name.

A DFlash reader would load most of their tensors and propose from a model that nobody trained. Each class has the
markers of one kind, and the parts that a DFlash reader would leave out. Sources: z-lab/dflash model.py (DFlash 2),
NVIDIA/Model-Optimizer hf_spec_export.py (Domino and DSpark under DFlash's name), vllm-project/vllm
model_executor/models/registry.py, sgl-project/SpecForge modeling/draft/dflash.py.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, Format, Json, ParsedConfig, named_architectures, servers_of
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import UnknownFormat, UnsupportedError

TARGET_CLASS = r"(Text)?(ForCausalLM|ForConditionalGeneration|Model)$"
"""The end of a target's name in `architectures`. Drafts of such a target have names with the same start."""


class Relative(Format):
    """A kind of draft that is not DFlash 1. Subclasses are data: markers, and the difference from DFlash."""

    priority: ClassVar[int] = 10
    settings: ClassVar[tuple[str, ...]] = ("dflash_config.", "")

    types: ClassVar[frozenset[str]] = frozenset()
    """Its values of `speculators_model_type`."""
    projectors: ClassVar[frozenset[str]] = frozenset()
    """Its values of `dflash_config.projector_type`."""
    architectures: ClassVar[str] = r"(?!)"
    """Matches the start of its architecture names."""
    model_types: ClassVar[frozenset[str]] = frozenset()
    """Its values of `model_type`."""
    markers: ClassVar[frozenset[str]] = frozenset()
    """Config keys, at the top level or in `dflash_config`, that only this kind has."""
    tensors: ClassVar[str] = r"(?!)"
    """Matches the start of tensor names that only this kind has."""

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """The evidence of the most explicit marker. A stated speculators type overrules all but `model_type`."""
        kind = config.get("speculators_model_type")
        if kind is not None:
            is_own = isinstance(kind, str) and kind in self.types
            return f"speculators_model_type is {kind!r}" if is_own else self._model_type(config)
        nested = config.get("dflash_config")
        nested = nested if isinstance(nested, dict) else {}
        projector = nested.get("projector_type", config.get("projector_type"))
        if isinstance(projector, str) and projector in self.projectors:
            return f"dflash_config.projector_type is {projector!r}"
        for key in sorted(self.markers):
            if key in nested or key in config:
                return f"config.json has {key} {nested.get(key, config.get(key))!r}"
        return self._model_type(config) or self._architecture(config) or self._tensor(tensor_names)

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        raise UnknownFormat(
            f"{self.title} ({self.evidence(config, frozenset()) or 'by its tensors'}), not DFlash: {self.difference}",
            id="relative-of-dflash",
            path=path,
            found=self.name,
            hint=f"{served_in_words(self, config)}; dflash does not run it, and removing the extra parts would change "
            f"the model",
        )

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        raise UnsupportedError(f"dflash does not write {self.title} drafts", id="dialect-not-written", found=self.name)

    def _model_type(self, config: Mapping[str, Any]) -> str | None:
        body = config.get("transformer_layer_config", config)
        found = body.get("model_type") if isinstance(body, dict) else None
        return f"model_type is {found!r}" if isinstance(found, str) and found in self.model_types else None

    def _architecture(self, config: Mapping[str, Any]) -> str | None:
        found = next((name for name in named_architectures(config) if re.match(self.architectures, name)), None)
        return f"architectures names {found}" if found else None

    def _tensor(self, tensor_names: frozenset[str]) -> str | None:
        found = min((name for name in tensor_names if re.match(self.tensors, name)), default=None)
        return f"it has the tensor {found}" if found else None


def served_in_words(dialect: Format, config: Mapping[str, Any]) -> str:
    """The engines that serve a draft of another kind, in a sentence."""
    names = servers_of(dialect, config)
    return (
        f"{' and '.join(names)} {'serve' if len(names) > 1 else 'serves'} it" if names else "no known engine serves it"
    )


DRAFT_KEYS = ("dflash_config", "block_size", "speculators_model_type", "transformer_layer_config")
"""Keys that drafts have and targets lack."""


@FORMATS.register("domino")
class Domino(Relative):
    """Domino, also under the architecture name DFlashDraftModel."""

    title = "Domino"
    projectors = frozenset({"domino", "causal_v5"})
    architectures = r"Domino"
    markers = frozenset({"gru_hidden_dim", "pure_draft_prefix_len", "shift_label"})
    tensors = r"prefix_gru\.|embed_proj\.|logit_head\."
    difference = "a recurrent head rewrites the logits of each position from the tokens before it"


@FORMATS.register("xpress")
class XPress(Relative):
    """XPress."""

    title = "XPress"
    types = frozenset({"xpress"})
    architectures = r".*XPress"
    markers = frozenset({"xpress_topc"})
    difference = "its layers and its way of drafting are different"


@FORMATS.register("lilicorr")
class LiLiCorr(Relative):
    """LiLiCorr."""

    title = "LiLiCorr"
    architectures = r"LiLiCorr"
    difference = "a correction step changes the tokens that the block proposes"


@FORMATS.register("laguna")
class Laguna(Relative):
    """Laguna's DFlash."""

    title = "Laguna DFlash"
    architectures = rf"DFlashLaguna|Laguna(?!{TARGET_CLASS})"
    tensors = r"aux_hidden_norms\.|layers\.\d+\.self_attn\.g_proj\."
    difference = "its attention is gated, and each tapped layer's output has its own norm"


@FORMATS.register("muse")
class Muse(Relative):
    """The assistant model of Muse Glimmer."""

    title = "Muse Glimmer assistant"
    model_types = frozenset({"muse_glimmer_assistant"})
    architectures = rf"MuseGlimmerAssistant|MuseSpark(?!{TARGET_CLASS})"
    difference = "its context encoder has other tensor names, and only transformers reads its settings"


@FORMATS.register("eagle3")
class Eagle3(Relative):
    """EAGLE-3. Some of its tensors have DFlash's names, so it is recognised by the others."""

    title = "EAGLE-3"
    types = frozenset({"eagle3"})
    architectures = r".*Eagle3"
    tensors = r"midlayer\.|layers\.0\.hidden_norm\."
    difference = "it drafts one token at a time, each from the previous token's hidden state"


@FORMATS.register("eagle")
class Eagle(Relative):
    """EAGLE and EAGLE-2. The head has a target's architecture name. Its fc.weight stands without a norm."""

    title = "EAGLE"
    priority = 12
    types = frozenset({"eagle"})
    architectures = r".*Eagle"
    difference = "it drafts one token at a time, each from the previous token's hidden state and embedding"

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


@FORMATS.register("peagle")
class PEagle(Relative):
    """P-EAGLE."""

    title = "P-EAGLE"
    priority = 8
    types = frozenset({"peagle"})
    architectures = r".*(PEagle|ParallelEagle)"
    markers = frozenset({"mask_hidden"})
    tensors = r"mask_hidden"
    difference = "it is an EAGLE head run in parallel over learned mask states"


@FORMATS.register("mtp")
class Mtp(Relative):
    """Multi-token prediction layers."""

    title = "MTP"
    types = frozenset({"mtp"})
    architectures = r".*MTP"
    difference = "it is a chain of prediction layers that belong to the target"


@FORMATS.register("hunyuan")
class HunYuan(Relative):
    """DFlash of HunYuan targets. Its projections have the same shapes as DFlash's, so it is recognised by names."""

    title = "HunYuan DFlash"
    architectures = r".*(HunYuan|Hunyuan)"
    model_types = frozenset({"hunyuan", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl", "hunyuan_vl_text"})
    tensors = r"layers\.\d+\.self_attn\.(query|key)_layernorm\."
    difference = "it applies rope to queries and keys before their norms, DFlash after them"

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """A HunYuan target has the same names, so only a config with a draft's keys counts."""
        is_draft = any(key in config for key in DRAFT_KEYS) or "DFlash" in "".join(named_architectures(config))
        return super().evidence(config, tensor_names) if is_draft else None
