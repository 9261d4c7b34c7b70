"""One reader for the tables of all kinds: the values of a config, and the faults of config and tensors."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from dflash_cli.formats.dialect import USUAL_KEYS, named_architectures
from dflash_cli.formats.draft_kinds.kind import Kind, variant_of
from dflash_cli.formats.draft_kinds.table import BODY, Key, Renaming, Tensors, Variant, counted, evaluate
from dflash_cli.formats.fields import look_up, unknown_rope_keys
from dflash_runtime.checkpoint.layout import PREFIXES
from dflash_runtime.errors import MISSING
from dflash_runtime.json_values import as_object, is_int

CONTAINER = "transformer_layer_config"
AUX = "aux_hidden_state_layer_ids"
"""The end of keys that count tapped layers from 1."""
OBJECTS = ("dflash_config", "eagle_config", CONTAINER)
"""Objects of a config that hold settings. Their keys are checked one by one."""
ROPE_PLACES = tuple(f"{body}{key}" for body in ("", f"{CONTAINER}.") for key in ("rope_scaling", "rope_parameters"))
"""The objects that state rope."""

KNOWN = USUAL_KEYS | frozenset(
    {
        "_name_or_path", "architectures", "attention_bias", "auto_map", "block_size", "bias", "dflash_config",
        "draft_vocab_size", "eagle_config", "has_no_defaults_at_init", "head_dim", "hidden_act", "is_causal",
        "layer_types", "max_window_layers", "mlp_bias", "model_type", "name_or_path", "num_target_layers",
        "partial_rotary_factor", "pretraining_tp", "rope_interleaved", "rope_parameters", "rope_scaling", "rope_theta",
        "sample_from_anchor", "sliding_window", "sliding_window_non_causal", "speculators_config",
        "speculators_model_type", "speculators_version", "target_hidden_size", "target_layer_ids",
        "tie_word_embeddings", "transformer_layer_config", "use_sliding_window", "causal", "target_model_type",
        "embed_requires_grad", "_attn_implementation", "_attn_implementation_autoset",
    }
)  # fmt: skip
"""Keys without a row in any table: they belong to every decoder, or to the layout of a config."""


@dataclass(frozen=True, slots=True)
class KeyFault:
    """A key that is missing, wrong or unknown. `taken` is the value that readers take instead, if they take one."""

    key: str
    text: str
    taken: Any = MISSING


@dataclass(frozen=True)
class KindReading:
    """A draft of another kind as its table reads it. Nothing is raised: faults are lists."""

    kind: Kind
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def variant(self) -> Variant:
        return variant_of(self.config)

    @cached_property
    def stated(self) -> dict[str, tuple[Key, str, Any]]:
        """Size -> its key, the dotted name that states it, and the value, for the keys that are stated and not null."""
        found: dict[str, tuple[Key, str, Any]] = {}
        for key in self._keys():
            for name in self.names_of(key):
                value = look_up(self.config, name)
                if value is not MISSING and value is not None and key.size not in found:
                    found[key.size] = (key, name, value)
        return found

    @cached_property
    def values(self) -> dict[str, Any]:
        """Size -> its value: stated, taken by readers if it is absent, or derived."""
        values = {
            size: _counted(name, value) for size, (key, name, value) in self.stated.items() if not key.fault(value)
        }
        for key in self._keys():
            if key.size not in values and key.size not in self.stated and key.default is not MISSING:
                values[key.size] = self._default(key, values)
        for size, formula in self.kind.derived.items():
            values[size] = evaluate(formula, values)
        return values

    @property
    def settings(self) -> dict[str, Any]:
        """Dotted key -> the value that it states, or that readers take if it is absent."""
        stated = {name: value for _, name, value in self.stated.values()}
        taken = {fault.key: fault.taken for fault in self.absent if fault.taken not in (MISSING, None)}
        return stated | taken

    @property
    def absent(self) -> Iterator[KeyFault]:
        """The needed keys that are absent."""
        for key in self._keys():
            is_needed = key.is_needed or bool(key.needed_by and self.values.get(key.needed_by))
            if is_needed and key.size not in self.stated:
                yield KeyFault(self.names_of(key)[0], "missing", self._default(key, self.values))

    @property
    def wrong(self) -> Iterator[KeyFault]:
        """The keys with a value of another form than readers take, and settings that are stated in two ways."""
        for key, name, value in self.stated.values():
            is_wrong = bool(key.fault(value))
            for other in dict.fromkeys(self.names_of(key)):
                second = look_up(self.config, other)
                if second is MISSING or second is None:
                    continue
                if key.fault(second):
                    yield KeyFault(other, key.fault(second))
                elif not is_wrong and _counted(other, second) != _counted(name, value):
                    yield KeyFault(other, f"found {second!r}, but {name} is {value!r}")

    @property
    def unknown(self) -> Iterator[KeyFault]:
        """The keys that the table does not name, and that are not usual keys of configs."""
        named = {name for key in self._keys() for name in self.names_of(key)}
        for name in _names(self.config):
            if name not in named and name.rpartition(".")[2] not in KNOWN:
                yield KeyFault(name, "not known")
        for name in unknown_rope_keys(self.config, ROPE_PLACES):
            yield KeyFault(name, "not known")

    @cached_property
    def expected(self) -> dict[str, tuple[int | None, ...]]:
        """Every tensor that the table needs, with its shape; None for a size that the config does not state."""
        return self._shapes(is_needed=True)

    @cached_property
    def _optional(self) -> dict[str, tuple[int | None, ...]]:
        return self._shapes(is_needed=False)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the file's tensors, by the names of the table."""
        return {self._named(name): shape for name, shape in self.shapes.items()}

    @property
    def prefix(self) -> str:
        """The common prefix of all tensor names, or an empty text."""
        return next(
            (item for item in PREFIXES if self.shapes and all(name.startswith(item) for name in self.shapes)), ""
        )

    @property
    def is_listed(self) -> bool:
        """Whether the table lists the tensors of this architecture."""
        named = "".join(named_architectures(self.config)[:1])
        return self.variant == "speculators" or re.match(self.kind.listed, named) is not None

    @property
    def missing(self) -> list[str]:
        return [name for name in self.expected if name not in self.tensors]

    @property
    def unexpected(self) -> list[str]:
        known = {**self.expected, **self._optional}
        return [name for name in self.tensors if name not in known and not re.match(self._free, name)]

    @property
    def misshapen(self) -> dict[str, tuple[tuple[int, ...], tuple[int | None, ...]]]:
        """Name -> the shape in the file and the shape of the table."""
        known = {**self._optional, **self.expected}
        pairs = {name: (shape, known[name]) for name, shape in self.tensors.items() if name in known}
        return {name: pair for name, pair in pairs.items() if not _fits(*pair)}

    @property
    def head(self) -> str:
        """The part that DFlash lacks, in words with its sizes."""
        return re.sub(r"\{(\w+)\}", lambda found: _shown(self.values.get(found[1])), self.kind.head)

    @property
    def draft_tokens(self) -> int | None:
        """The number of draft tokens that a speculators config asks for, None if it asks for none."""
        methods = look_up(self.config, "speculators_config.proposal_methods")
        stated = as_object(methods[0]).get("speculative_tokens") if isinstance(methods, list) and methods else None
        return stated if is_int(stated) and stated > 0 else None

    def renaming(self, to: str) -> Renaming | None:
        """The renaming with that word after `--to`, None if this draft has no such names."""
        for item in self.kind.renamings:
            is_new = item.variant != self.variant or [self.architecture(item)] != named_architectures(self.config)
            if item.to == to and item.since in (None, self.variant) and is_new:
                return None if any(self.kind.outside(item.demands, self.values)) else item
        return None

    def architecture(self, renaming: Renaming) -> str | None:
        """The entry of `architectures` after a renaming, None if no name is known for the model family."""
        family = renaming.families.get(str(self.values.get("model_type")))
        is_named = "{family}" not in renaming.architecture or family is not None
        return renaming.architecture.replace("{family}", family or "") if is_named else None

    def names_of(self, key: Key) -> tuple[str, ...]:
        """The dotted keys that state a setting in this layout."""
        body = f"{CONTAINER}." if CONTAINER in self.config else ""
        return tuple(name.replace(BODY, body) for name in key.names)

    @property
    def _free(self) -> str:
        return rf"{self.kind.free}|.*rotary_emb\.inv_freq$"

    def _named(self, stored: str) -> str:
        name = stored.removeprefix(self.prefix)
        alias = next((alias for alias in self.kind.aliases if name.startswith(alias)), None)
        return name if alias is None else self.kind.aliases[alias] + name.removeprefix(alias)

    def _keys(self) -> list[Key]:
        return [key for key in self.kind.stated if key.only in (None, self.variant)]

    def _default(self, key: Key, values: Mapping[str, Any]) -> Any:
        if isinstance(key.default, str):
            return evaluate(key.default, {**values, "hidden_per_head": _ratio(values)})
        return key.default

    def _shapes(self, *, is_needed: bool) -> dict[str, tuple[int | None, ...]]:
        found: dict[str, tuple[int | None, ...]] = {}
        sizes_of = cache(lambda shape: tuple(evaluate(size, self.values) for size in shape.split(", ")))
        for part in self.kind.parts:
            if part.is_needed is is_needed and part.only in (None, self.variant) and self._holds(part):
                for name, shape in counted(part.shapes, self.values).items():
                    found[name] = sizes_of(shape)  # thousands of layers have the same shapes
        return found

    def _holds(self, part: Tensors) -> bool:
        if not part.when:
            return True
        size, _, choices = part.when.removeprefix("!").partition("=")
        value = self.values.get(size)
        holds = str(value) in choices.split("|") if choices else bool(value)
        return holds is not part.when.startswith("!")


def _counted(name: str, value: Any) -> Any:
    """The value of a key; tapped layers that count from 1 are counted from 0."""
    return [layer - 1 for layer in value] if name.endswith(AUX) else value


def _ratio(values: Mapping[str, Any]) -> int | None:
    hidden, heads = values.get("hidden"), values.get("heads")
    return hidden // heads if hidden and heads else None


def _names(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        yield key
        if key in OBJECTS:
            yield from (f"{key}.{inner}" for inner in as_object(value))


def _fits(found: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    """Whether a shape is the wanted one. A size that the config does not state fits every size."""
    return len(found) == len(wanted) and all(
        size is None or size == item for item, size in zip(found, wanted, strict=True)
    )


def _shown(value: Any) -> str:
    return "an unstated number" if value is None else str(value)
