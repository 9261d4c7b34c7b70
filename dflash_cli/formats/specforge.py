"""SpecForge's form of the native dialect. Source: sgl-project/SpecForge modeling/draft/dflash.py at a6b6b023.

Its training attends in both directions in every layer, sliding ones included, and its export never writes `is_causal`,
while readers take an unstated sliding layer for a causal one. Only `dflash_config.attention_mode` and
`attention_modes` (sgl-project/SpecForge#767) tell an export apart; one without them has no key that z-lab's own files
lack, so it is read as native, with a note.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import Native
from dflash_cli.formats.unserved import MODE_KEYS


@FORMATS.register("specforge")
class SpecForge(Native):
    """Exports of SpecForge that say so."""

    name: ClassVar[str] = "specforge"
    title: ClassVar[str] = "DFlash, native dialect as SpecForge exports it"
    priority: ClassVar[int] = 60
    writable: ClassVar[bool] = False
    trains_causal: ClassVar[bool] = False

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        nested = config.get("dflash_config")
        if not isinstance(nested, dict):
            return None
        key = next((key for key in MODE_KEYS if key in nested), None)
        return f"dflash_config.{key} is {nested[key]!r}" if key is not None else None
