"""Drafts of other families in GGUF. llama.cpp serves them. dflash converts them from safetensors only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.dialect import FORMATS, Json, ParsedConfig
from dflash_cli.formats.fields import look_up
from dflash_cli.formats.gguf import Gguf
from dflash_cli.formats.gguf_fields import ARCHITECTURE_KEY
from dflash_cli.formats.relatives import served_in_words
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING, UnknownFormat, UnsupportedError

DFLASH2_KEYS = ("dflash.selector_rank", "dflash.conv_kernel_size")
MARKOV = "markov_w1.weight"


class GgufRelative(Gguf):
    """A draft of another family in GGUF."""

    priority: ClassVar[int] = 4
    writable: ClassVar[bool] = False

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        raise UnknownFormat(
            f"{self.title}: dflash reads only plain DFlash drafts from GGUF",
            id="relative-of-dflash",
            path=path,
            found=self.name,
            hint=f"{served_in_words(self, config)}; pass the safetensors checkpoint that it was made from",
        )

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        raise UnsupportedError(f"dflash does not write {self.title}", id="dialect-not-written", found=self.name)


@FORMATS.register("gguf-dflash2")
class GgufDFlash2(GgufRelative):
    """DFlash 2 in GGUF."""

    title: ClassVar[str] = "DFlash 2, GGUF of llama.cpp"
    difference: ClassVar[str] = "convolutions and a candidate selector"

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        found = next((key for key in DFLASH2_KEYS if look_up(config, key) not in (MISSING, 0)), None)
        return None if super().evidence(config, tensor_names) is None or found is None else f"the metadata has {found}"


@FORMATS.register("gguf-dspark")
class GgufDSpark(GgufRelative):
    """DSpark in GGUF."""

    title: ClassVar[str] = "DSpark, GGUF of llama.cpp"
    difference: ClassVar[str] = "a Markov head"

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        if super().evidence(config, tensor_names) is None:
            return None
        if look_up(config, ARCHITECTURE_KEY) == "dspark":
            return f"{ARCHITECTURE_KEY} is 'dspark'"
        return f"it has the tensor {MARKOV}" if MARKOV in tensor_names else None
