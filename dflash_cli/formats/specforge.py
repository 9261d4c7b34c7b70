"""SpecForge's native dialect. Source: sgl-project/SpecForge modeling/draft/dflash.py at a6b6b023.

Every layer, sliding layers included, is trained to attend in both directions. An export never writes `is_causal`, and
readers then serve sliding layers as causal. Only `dflash_config.attention_mode` and `attention_modes`
(sgl-project/SpecForge#767) mark an export. An export without them looks like z-lab's files and is read as native, with
a note.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS
from dflash_cli.formats.native import Native
from dflash_cli.formats.unserved import MODE_KEYS


@FORMATS.register("specforge")
class SpecForge(Native):
    """Exports of SpecForge with an attention mode."""

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
