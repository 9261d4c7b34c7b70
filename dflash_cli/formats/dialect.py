"""Checkpoint dialects and their registry.

A dialect is one file in this package with one class decorated `@FORMATS.register(name)`. The class reads its own config
into the canonical `DraftConfig`, writes that config back, and locates each field. How a dialect numbers layers, states
causality or spells rope is known in that file and nowhere else: every other module asks the class.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.fields import (
    AS_IT_IS,
    SCALES,
    Keys,
    Spelling,
    look_up,
    scales_in_use,
    unknown_rope_keys,
)
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import MISSING, LossyConversion, UsageError
from dflash_runtime.json_values import as_object
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import guess
from dflash_runtime.registry import Registry

Json = dict[str, Any]

COMMON = "native"
"""The dialect that every engine reads. Corrected copies are written in it unless an engine needs another."""

STYLE_FLAGS: Mapping[str, bool] = {"use_gemma_norm": True, "is_neox_style": False, "rope_is_neox_style": False}
"""Key -> the value that changes what the weights mean: norms of one plus the weight, rope of neighbouring pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedConfig:
    """A config in canonical form.

    carried               keys without a canonical field. A conversion reports them, and copies them if the other
                          dialect takes them. A key of the decoder is plain, any other key has the prefix of its
                          container (`own_prefix`).
    notes                 sentences for the user.
    has_unknown_layout    the rows of a block that predict a token are not stated, and readers differ.
                          `sample_from_anchor` is then a guess, which no command may convert or run.
    unserved              key -> the computation it asks for that DFlash does not have. `dflash inspect` describes such
                          a draft. No command converts or runs it.
    """

    config: DraftConfig
    carried: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Notice, ...] = ()
    has_doubtful_causality: bool = False
    has_unknown_layout: bool = False
    unserved: Mapping[str, str] = field(default_factory=dict)


class Format(ABC):
    """One dialect: facts as class attributes, and methods where data is not enough.

    The dialect itself:
    name                its name, which `FORMATS.register` sets
    word                the word after `--to`, if several draft families have a dialect of that word; else the name
    title               its name in messages
    priority            its turn in detection, ascending; among equals the order of registration
    writable            whether `write_config` exists for it
    engine              the serving engine it is written for, None if it is written for all
    family              the draft family of its drafts, which `read_config` states. A conversion refuses other families
    difference          the part of the model that a DFlash reader would leave out; empty for DFlash itself
    serve_method        the name that engines give this way of drafting in their commands
    samples_from_anchor whether it may predict at the anchor too, so that a block of B proposes B tokens
    written_as          the entry of `architectures` that `write_config` writes
    family_fields       the settings that only its family has; `read_family` and `write_family` handle them
    projectors          the values of projector_type that name its own head
    is_trained_non_causal   whether published drafts of its family are trained without causality in windows too

    Its fields, by their names in `DraftConfig`. `verifier_name` and `verifier_architectures` are parts of the verifier:
    keys                field -> the dotted keys that state it; readers prefer the first
    added               field -> the dotted key to add if none states it, unless it is the first of `keys`
    spellings           field -> how its value is spelled, unless the config holds the canonical value (`spelling_of`)
    body                prefix of the decoder keys with Hugging Face's names: `decoder.`, or empty
    decoder_names       Hugging Face's name of a decoder key -> the dotted key that this dialect has instead
    settings            prefixes of keys without a field; readers prefer the first
    unstated            fields that no key states, such as the mask token of a draft family without one
    containers          keys of the objects that hold this dialect's own keys
    own_prefix          prefix of carried keys that only this dialect has, or empty
    window_keys         dotted keys that give every layer a window, whatever `layer_types` says
    signs               top-level keys that only drafts of this dialect have; messages name the first
    kind                the key that names the kind of draft, with its value for DFlash

    Its readers:
    architecture        the entry of `architectures` by which engines find its model; None if they do not look there
    guesses_taps        whether they guess the tapped layers of a config that lists none
    needed              fields that some of them need, although `read_config` does not
    keeps_head          whether they use a head, an embedding and an id map from the file
    takes_target_scale  whether they apply the target's embedding scale if the config states none
    sorts_taps          whether they sort the tapped layers and drop repeats
    keeps_mask          whether some of them read a learned mask embedding from mask_embedding.pt, and none stops at it
    derives_inverse     whether they ask for t2d, the inverse of the id map d2t
    style_flags         keys on norms and rope that all of them follow (see STYLE_FLAGS)
    allows_packed       whether packed weights of another dialect can be written in it
    packs_fc            whether they read `fc` in FP8
    one_file            the name of the file that holds both the config and the weights; empty if each has files
    vector_type_key     the key for the type that vectors had before; its readers need vectors in F32
    ignored_settings    last parts of keys that `unread` lists and that no engine reads, so that a conversion drops them
    """

    name: ClassVar[str]
    word: ClassVar[str] = ""
    title: ClassVar[str]
    priority: ClassVar[int]
    writable: ClassVar[bool] = False
    engine: ClassVar[str | None] = None
    family: ClassVar[str] = "dflash"
    difference: ClassVar[str] = ""
    serve_method: ClassVar[str] = "dflash"
    samples_from_anchor: ClassVar[bool] = False
    written_as: ClassVar[str] = "DFlashDraftModel"
    family_fields: ClassVar[tuple[str, ...]] = ()
    projectors: ClassVar[frozenset[str]] = frozenset()
    is_trained_non_causal: ClassVar[bool] = False

    keys: ClassVar[Keys] = {}
    added: ClassVar[Mapping[str, str]] = {}
    spellings: ClassVar[Mapping[str, Spelling]] = {}
    body: ClassVar[str] = ""
    decoder_names: ClassVar[Mapping[str, str]] = {}
    settings: ClassVar[tuple[str, ...]] = ("",)
    unstated: ClassVar[frozenset[str]] = frozenset()
    containers: ClassVar[tuple[str, ...]] = ()
    own_prefix: ClassVar[str] = ""
    window_keys: ClassVar[tuple[str, ...]] = ()
    signs: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[tuple[str, str] | None] = None

    architecture: ClassVar[str | None] = None
    guesses_taps: ClassVar[bool] = False
    needed: ClassVar[frozenset[str]] = frozenset()
    keeps_head: ClassVar[bool] = False
    takes_target_scale: ClassVar[bool] = False
    sorts_taps: ClassVar[bool] = False
    keeps_mask: ClassVar[bool] = False
    derives_inverse: ClassVar[bool] = False
    style_flags: ClassVar[frozenset[str]] = frozenset()
    ignored_settings: ClassVar[frozenset[str]] = frozenset()
    allows_packed: ClassVar[bool] = True
    packs_fc: ClassVar[bool] = True
    one_file: ClassVar[str] = ""
    vector_type_key: ClassVar[str] = ""

    @abstractmethod
    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """A sentence that names what a checkpoint was recognised by, None if it is in another dialect."""

    @abstractmethod
    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        """The canonical form of a config.

        Raises:
            CheckpointError, UnsupportedError: it cannot be read.
        """

    @abstractmethod
    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """The config that states a draft in this dialect.

        Raises:
            LossyConversion, UsageError, UnsupportedError: the dialect cannot state the draft.
        """

    def read_family(self, stated: Callable[[str], Any]) -> Json:
        """The fields of `DraftConfig` that only this family has. `stated` returns the value of a field, or MISSING.

        Raises:
            InvalidConfig: a setting is missing or wrong.
        """
        return {}

    def write_family(self, config: DraftConfig) -> Json:
        """The keys, without their container, that state what only this family has."""
        return {}

    def has_unknown_layout(self, stated: Callable[[str], Any]) -> bool:
        """Whether no key states which rows of a block predict a token, although drafts of this family differ in it."""
        return False

    def keys_of(self, field: str) -> tuple[str, ...]:
        """The dotted keys that may state a field, or a setting without a field."""
        return self.keys.get(field) or tuple(prefix + field for prefix in self.settings)

    def new_key(self, field: str) -> str:
        """The dotted key to add for a field that no key states."""
        return self.added.get(field) or (self.keys.get(field) or (self.decoder_key(field),))[0]

    def decoder_key(self, key: str) -> str:
        """The dotted key for Hugging Face's name of a decoder key, or of a key inside it: `rope_scaling.factor`."""
        name, dot, inner = key.partition(".")
        return self.decoder_names.get(name, self.body + name) + dot + inner

    def decoder(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The decoder keys of a config under Hugging Face's names; empty if their container is absent."""
        body = as_object(look_up(config, self.body.removesuffix("."))) if self.body else config
        named = {name: look_up(config, key) for name, key in self.decoder_names.items()}
        return {**body, **{name: value for name, value in named.items() if value is not MISSING}} if named else body

    def spelling_of(self, field: str, config: Mapping[str, Any]) -> Spelling:
        """How a config spells the value of a field. A dialect overrides this if that depends on other keys."""
        return self.spellings.get(field, AS_IT_IS)

    def causality(self, config: Mapping[str, Any], layer_types: Sequence[str]) -> dict[str, tuple[bool, ...] | None]:
        """Dotted key -> the causality it states for each layer, None if its value means neither true nor false.

        The key that engines prefer comes first.
        """
        spelling = self.spelling_of("causal", config)
        found = {key: look_up(config, key) for key in self.keys_of("causal")}
        stated = {
            key: spelling.read(value) for key, value in found.items() if value is not MISSING and value is not None
        }
        return {key: (value,) * len(layer_types) if isinstance(value, bool) else None for key, value in stated.items()}

    def states_causality(self, config: Mapping[str, Any]) -> bool:
        """Whether the config states how sliding layers attend in a block."""
        return any(look_up(config, key) not in (MISSING, None) for key in self.keys_of("causal"))

    def unserved(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Key -> what it asks for that DFlash does not compute."""
        return {}

    def stored_key(self, carried: str) -> str:
        """The dotted key of the config under which a carried key is stored."""
        return carried

    def name_in_file(self, tensor: str) -> str:
        """The name that a written file has for a tensor of that canonical name."""
        return tensor

    def unread(self, config: Mapping[str, Any]) -> Json:
        """Dotted key -> value of the keys that neither `read_config` reads nor a conversion carries."""
        return {}

    def with_unread(self, written: Json, source: Mapping[str, Any]) -> Json:
        """A config written in this dialect with the keys of its source that `unread` lists."""
        return written

    def unknown_keys(self, config: Mapping[str, Any], carried: Mapping[str, Any]) -> list[str]:
        """The keys that are neither fields of a draft nor usual keys of Hugging Face's configs."""
        fields = {key.removeprefix(self.body) for keys in self.keys.values() for key in keys}
        found = {**carried, **self.unread(config)}.keys() - USUAL_KEYS - fields
        ropes = unknown_rope_keys(config, self.keys.get("rope", ()))
        return sorted((*found, *(key.removeprefix(self.body) for key in ropes)))

    def adapt(self, config: DraftConfig, carried: Mapping[str, Any]) -> tuple[DraftConfig, Json]:
        """The draft and its carried keys, without settings that readers of this dialect would apply wrongly."""
        return config, dict(carried)

    def refuse_misread(self, config: DraftConfig) -> None:
        """Refuse a draft that every reader of this dialect would misread.

        Raises:
            LossyConversion: its readers sort the tapped layers.
        """
        if self.sorts_taps and not taps_ascend(config):
            raise LossyConversion(
                f"target_layer_ids {list(config.target_layer_ids)}: readers of {self.title} sort the tapped layers and "
                f"drop repeats, which mixes up the columns of fc.weight",
                id="unsorted-taps",
                field="target_layer_ids",
                found=list(config.target_layer_ids),
                hint="--normalise-taps sorts the layers, and the draft computes the same",
            )

    def refuse_style(self, carried: Mapping[str, Any]) -> None:
        """Refuse a style flag that some reader of this dialect ignores.

        Raises:
            LossyConversion: the flag asks for norms or rope of a style that these readers do not apply.
        """
        for key, value in carried.items():
            flag = key.rpartition(".")[2]
            if flag in STYLE_FLAGS and value is STYLE_FLAGS[flag] and flag not in self.style_flags:
                readers = [word_of(item) for item in writable_formats(self.family) if flag in item.style_flags]
                raise LossyConversion(
                    f"{key} {json.dumps(value)}: readers of {self.title} ignore it and would compute another style "
                    f"than the weights were trained with",
                    id="style-flag",
                    field=key,
                    found=value,
                    hint=f"--to {' or '.join(readers)} keeps it, or export the draft in the usual style",
                )

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[Notice]:
        """Warnings for a user who will serve a draft written in this dialect."""
        if config.num_target_layers is not None and config.num_target_layers - 1 in config.target_layer_ids:
            yield Notice(
                f"the draft taps layer {config.num_target_layers - 1}, the target's last, and engines differ: "
                f"transformers captures its output after the final norm, vLLM before it, and SGLang 0.5.23 never "
                f"captures it for Qwen2, Qwen3 and Llama targets",
                id="last-layer-tapped",
            )
        if not self.sorts_taps and not taps_ascend(config):
            yield Notice(
                f"target_layer_ids {list(config.target_layer_ids)} are not in ascending order without repeats: engines "
                f"mix up the columns of fc.weight unless --normalise-taps sorts the list",
                id="unsorted-taps",
            )


USUAL_KEYS = frozenset(
    {
        "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id", "id2label",
        "initializer_range", "is_encoder_decoder", "label2id", "max_window_layers", "output_attentions",
        "output_hidden_states", "pad_token_id", "problem_type", "quantization", "quantization_config", "return_dict",
        "torch_dtype", "transformers_version", "use_cache",
    }
)  # fmt: skip
"""Keys of every config that transformers writes, which change nothing about a draft."""


FORMATS: Registry[type[Format]] = Registry("format", sets_name=True)
PACKAGES = ("dflash_cli.formats", "dflash_cli.formats.draft_kinds", "dflash_cli.engines")
"""Packages with modules that register dialects. An engine's file registers the dialect that is written for it."""


SERVERS: Registry[Callable[[Format, Mapping[str, Any]], tuple[str, ...]]] = Registry("servers")
"""The function that names the engines with a model for a draft of another kind. The package of engines registers it."""


def servers_of(dialect: Format, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The engines that serve a draft of another kind, whether or not dflash runs it."""
    all_formats()
    return tuple(name for serves in SERVERS.values() for name in serves(dialect, config))


@cache
def all_formats() -> tuple[Format, ...]:
    """Every registered dialect in order of priority: of exporters, and of serving engines."""
    for package in PACKAGES:
        FORMATS.discover(package)
    return tuple(sorted((item() for item in FORMATS.values()), key=lambda item: item.priority))


def word_of(dialect: Format) -> str:
    """The word after `--to` for a dialect."""
    return dialect.word or dialect.name


def writable_formats(family: str | None = None) -> tuple[Format, ...]:
    """The dialects that a conversion can write, by name: of one draft family, or of all."""
    found = (item for item in all_formats() if item.writable and family in (None, item.family))
    return tuple(sorted(found, key=lambda item: item.name))


def writable_words(family: str | None = None) -> list[str]:
    """The words after `--to` for drafts of one family, or of any family, in order."""
    return sorted({word_of(item) for item in writable_formats(family)})


def get_writable(name: str, family: str = Format.family) -> Format:
    """The dialect of that word for a draft family, or else for another family.

    Raises:
        UsageError: no dialect has the word, or a conversion cannot write it.
    """
    found = {item.family: item for item in writable_formats() if word_of(item) == name}
    if found:
        return found.get(family) or next(iter(found.values()))
    known = ", ".join(writable_words())
    if name in FORMATS and not FORMATS[name].writable:
        text = f"dialect {name!r} can be read but not written (writable: {known})"
        raise UsageError(text, id="read-only-dialect", field="--to", found=name)
    raise UsageError(
        f"unknown dialect {name!r}{guess(name, writable_words())} (known: {known})",
        id="unknown-dialect",
        field="--to",
        found=name,
    )


def cannot_state(field: str, value: Any, title: str) -> LossyConversion:
    """The error for a value that the dialect of that title cannot state."""
    text = f"{field} {json.dumps(value)}: {title} cannot state it"
    return LossyConversion(text, id="cannot-state", field=field, found=value)


def refuse_scales(config: DraftConfig, reader: str, scales: Iterable[str] = tuple(SCALES)) -> None:
    """Refuse scales that a reader ignores.

    Raises:
        LossyConversion: the draft uses one of the scales.
    """
    lost = scales_in_use(config, scales)
    if lost:
        text = f"{', '.join(lost)}: {reader} ignores it"
        raise LossyConversion(text, id="scale-ignored", field=next(iter(lost)), found=next(iter(lost.values())))


def taps_ascend(config: DraftConfig) -> bool:
    """Whether the tapped layers are in ascending order without repeats."""
    return all(one < other for one, other in zip(config.target_layer_ids, config.target_layer_ids[1:], strict=False))


def named_architectures(config: Mapping[str, Any]) -> list[str]:
    """The strings that `architectures` lists."""
    value = config.get("architectures")
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
