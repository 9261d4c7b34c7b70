"""SpecForge's native dialect. Source: sgl-project/SpecForge modeling/draft/dflash.py at a6b6b023.

Every layer, sliding layers included, is trained to attend in both directions. An export never writes `is_causal`, and
readers then serve sliding layers as causal. Only `dflash_config.attention_mode` and `attention_modes`
(sgl-project/SpecForge#767) mark an export. An export without them looks like z-lab's files and is read as native, with
a note.
"""

from typing import ClassVar

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
    marks: ClassVar[tuple[str, ...]] = MODE_KEYS
