"""The native dialect for one serving engine, without settings that the engine would apply wrongly.

Sources: vLLM 0.24.0 to 0.33.0 model_executor/models/qwen3_dflash.py and interfaces.py; SGLang 0.5.23
models/dflash.py, models/qwen3.py. Both read a learned mask embedding only from the pickle file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from dflash_cli.formats.dialect import STYLE_FLAGS, Json
from dflash_cli.formats.native import Native
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import LossyConversion
from dflash_runtime.notices import Notice

PARTIAL_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Keys that trainers copy from multimodal targets. SGLang and vLLM apply them; the drafts rotate every dimension."""


READ_NAME = {"rope_is_neox_style": "is_neox_style"}
"""Style flag -> the key that every engine with the style reads. SGLang also reads the other key."""


def style_where_engines_look(carried: Mapping[str, Any]) -> Json:
    """The carried keys, with style flags at the top level and under the key that all engines read."""
    read = {key: READ_NAME.get(key.rpartition(".")[2], key.rpartition(".")[2]) for key in carried}
    said = {read[key]: value for key, value in carried.items() if value is STYLE_FLAGS.get(read[key])}
    return {**{key: value for key, value in carried.items() if read[key] not in said}, **said}


class EngineNative(Native):
    """A native dialect that is written for an engine. Detection finds its files as native."""

    engine: ClassVar[str]
    sorts_taps: ClassVar[bool] = True

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        return None

    def adapt(self, config: DraftConfig, carried: Mapping[str, Any]) -> tuple[DraftConfig, Json]:
        params = {key: value for key, value in config.rope.params.items() if key not in PARTIAL_ROPE}
        kept = style_where_engines_look({key: value for key, value in carried.items() if key not in PARTIAL_ROPE})
        return replace(config, rope=replace(config.rope, params=params)), kept

    def refuse_misread(self, config: DraftConfig) -> None:
        super().refuse_misread(config)
        if config.hidden_act != "silu":
            text = f"hidden_act {config.hidden_act!r}: {self.engine} runs DFlash drafts with silu only"
            raise LossyConversion(text, id="activation", field="hidden_act", found=config.hidden_act)

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[Notice]:
        yield from super().warnings(config, carried)
        found = [key for key in PARTIAL_ROPE if key in carried or key in config.rope.params]
        if found:
            yield Notice(
                f"{', '.join(found)}: left out, because {self.engine} would apply it and the draft was trained without",
                id="partial-rope",
            )
