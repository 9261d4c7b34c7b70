"""The fields that a draft's config states, located and read by its dialect. The config as a whole may be unreadable."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_cli.formats.dialect import Format
from dflash_cli.formats.fields import look_up, with_keys
from dflash_runtime.checkpoint.targets.hf_config import SLIDING, usual_layer_types
from dflash_runtime.errors import MISSING
from dflash_runtime.json_values import is_int

MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Statement:
    """A key that states a field, with the value it holds and the canonical meaning of that value."""

    key: str
    raw: Any
    value: Any


@dataclass(frozen=True, slots=True)
class StatedConfig:
    """The fields of one config. A field is named as in `Format.keys`; any other name is a key of that name."""

    format: Format
    config: Mapping[str, Any]

    def statements(self, field: str) -> list[Statement]:
        """Every key that states the field, a null included; the key that readers prefer first."""
        spelling = self.format.spelling_of(field, self.config)
        found = ((key, look_up(self.config, key)) for key in self.format.keys_of(field))
        return [Statement(key, raw, spelling.read(raw)) for key, raw in found if raw is not MISSING]

    def values(self, field: str) -> list[Statement]:
        """The statements of a field that are not null."""
        return [item for item in self.statements(field) if item.raw is not None]

    def value(self, field: str) -> Any:
        """The canonical value that readers take, None if no key states the field."""
        return next((item.value for item in self.values(field)), None)

    def key(self, field: str) -> str:
        """The dotted key that states the field; if none does, the key to add."""
        return next((item.key for item in self.statements(field)), self.format.new_key(field))

    def spelled(self, field: str, value: Any) -> Any:
        """A canonical value as the config would state it."""
        return self.format.spelling_of(field, self.config).write(value)

    def change(self, field: str, value: Any) -> dict[str, Any]:
        """Dotted key -> value: the change by which the config states a canonical value."""
        return {self.format.new_key(field): self.spelled(field, value)}

    def with_value(self, field: str, value: Any) -> dict[str, Any]:
        """A copy of the config that states a canonical value."""
        return with_keys(self.config, self.change(field, value))

    @property
    def body(self) -> Mapping[str, Any]:
        """The decoder keys under Hugging Face's names; empty if their container is absent."""
        return self.format.decoder(self.config)

    @property
    def taps(self) -> list[int] | None:
        """Tapped layers as outputs numbered from 0; None unless they are a list of integers."""
        value = self.value("target_layer_ids")
        is_list = isinstance(value, list) and value and all(is_int(item) for item in value)
        return list(value) if is_list else None

    @property
    def block_size(self) -> int | None:
        """The block size, anchor included; None unless it is an integer."""
        value = self.value("block_size")
        return value if is_int(value) else None

    @property
    def vocabulary_sizes(self) -> tuple[int, int] | None:
        """The sizes of the draft's and the target's vocabulary, None unless both are stated."""
        vocab = self.body.get("vocab_size")
        reduced = self.value("draft_vocab_size")
        reduced = vocab if reduced is None else reduced
        return (reduced, vocab) if is_int(reduced) and is_int(vocab) else None

    @property
    def layer_types(self) -> list[str]:
        """The stated kind of each layer, or the kinds that transformers' config class gives the layers."""
        value = self.body.get("layer_types")
        if isinstance(value, list):
            return [item for item in value if isinstance(item, str)]
        count = self.body.get("num_hidden_layers")
        return list(usual_layer_types(self.body, count if is_int(count) and 0 < count < MAX_LAYERS else 1))

    @property
    def states_kinds(self) -> bool:
        """Whether readers agree on the kinds of layers: they are stated, or the draft is read as Qwen3 by all."""
        return self.body.get("layer_types") is not None or self.body.get("model_type", "qwen3") == "qwen3"

    @property
    def window_keys(self) -> list[str]:
        """The keys that give every layer a window although `layer_types` names only full layers."""
        if SLIDING in self.layer_types:
            return []
        stated = {key: look_up(self.config, key) for key in self.format.window_keys}
        return [key for key, value in stated.items() if value is not MISSING and value]

    @property
    def causality(self) -> dict[str, tuple[bool, ...] | None]:
        """Key -> the causality it states for each layer, None if its value is wrong. Engines prefer the first key."""
        return self.format.causality(self.config, self.layer_types)

    @property
    def states_causality(self) -> bool:
        """Whether the config says how its sliding layers attend in a block; full layers need no statement."""
        return SLIDING not in self.layer_types or self.format.states_causality(self.config)
