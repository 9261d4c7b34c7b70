"""Relatives of DFlash. They are recognised and refused by name, because several carry DFlash's architecture name.

A DFlash reader would load most of their tensors and propose from a model that nobody trained. Each class has the
markers of one kind, and the parts that a DFlash reader would leave out. Kinds with a table are in `draft_kinds`.
Sources: z-lab/dflash model.py (DFlash 2), NVIDIA/Model-Optimizer hf_spec_export.py (DSpark under DFlash's name).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.dialect import Format, Json, ParsedConfig, named_architectures, servers_of
from dflash_runtime.draft_config import DraftConfig
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
