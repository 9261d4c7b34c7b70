"""What a checkpoint dialect is, and the registry that finds them.

A dialect is one file in this package with one class decorated `@FORMATS.register(name)`. It reads its own config into
the canonical `DraftConfig` and writes that back; the convention by which a dialect numbers layers, places causality or
spells rope is known in that file and nowhere else. Whatever a command wants to know of a dialect is an attribute or a
method of its class.

Detection asks every dialect in ascending `priority` and takes the first that recognises the checkpoint; relatives of
DFlash come before DFlash itself, since several of them carry its architecture string.
"""

import difflib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.layout import canonical_name
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion, UnknownFormat, UsageError
from dflash_runtime.registry import Registry

Json = dict[str, Any]
Homes = Mapping[str, tuple[str, ...]]

STYLE_FLAGS: Mapping[str, bool] = {"use_gemma_norm": True, "is_neox_style": False, "rope_is_neox_style": False}
"""Key -> the value that changes what the weights mean: norms of one plus their weight, rope of neighbouring pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedConfig:
    """A config read into canonical form.

    `carried` holds keys that no canonical field stands for; a conversion reports them, and copies them if the other
    dialect has a place for them. Keys of the decoder body are plain, others are prefixed with the container they
    were found in (`Format.own_prefix`). `notes` are sentences a user should see. `unserved` are keys by which the
    draft is another model than the canonical form says, with what they ask for: such a draft can only be described.
    """

    config: DraftConfig
    carried: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    has_doubtful_causality: bool = False
    unserved: Mapping[str, str] = field(default_factory=dict)


class Format(ABC):
    """One dialect: facts as class attributes, and methods where data is not enough.

    name                the word after `--to`
    title               its name in messages
    priority            its turn in detection, ascending
    writable            whether `write_config` exists for it
    homes               canonical field -> the dotted keys that state it here
    unstated            canonical fields that no key states
    containers          keys that hold an object of this dialect's own keys
    own_prefix          prefix of carried keys that only this dialect has, or nothing
    keeps_head          whether its readers use a head, an embedding and an id map from the file
    sorts_taps          whether its readers put taps in ascending order, once each, whatever the file says
    keeps_mask          whether some of its readers take a learned mask embedding from mask_embedding.pt, and the others
                        do not stop at the file
    derives_inverse     whether its readers ask for t2d, the inverse of the id map d2t
    style_flags         keys on norms and rope that all its readers take as they are meant (see STYLE_FLAGS)
    allows_packed       whether packed weights of another dialect can be written in it
    engine              the serving engine it is written for, None where it is written for all
    family              the draft family of the runtime that runs it
    """

    name: ClassVar[str]
    title: ClassVar[str]
    priority: ClassVar[int]
    writable: ClassVar[bool] = False
    homes: ClassVar[Homes] = {}
    unstated: ClassVar[frozenset[str]] = frozenset()
    containers: ClassVar[tuple[str, ...]] = ()
    own_prefix: ClassVar[str] = ""
    keeps_head: ClassVar[bool] = False
    sorts_taps: ClassVar[bool] = False
    keeps_mask: ClassVar[bool] = False
    derives_inverse: ClassVar[bool] = False
    style_flags: ClassVar[frozenset[str]] = frozenset()
    allows_packed: ClassVar[bool] = True
    engine: ClassVar[str | None] = None
    family: ClassVar[str] = "dflash"

    @abstractmethod
    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        """The sentence that says by what a checkpoint was recognised, None where it is another dialect."""

    @abstractmethod
    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        """The canonical form of a config of this dialect."""

    @abstractmethod
    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        """A config of this dialect; what it cannot state is refused."""

    def adapt(self, config: DraftConfig, carried: Mapping[str, Any]) -> tuple[DraftConfig, Json]:
        """The draft and its carried keys without the settings that only this dialect's readers would apply."""
        return config, dict(carried)

    def refuse_misread(self, config: DraftConfig) -> None:
        """Refuse what every reader of this dialect would misread.

        Raises:
            LossyConversion: taps that its readers sort.
        """
        if self.sorts_taps and not taps_ascend(config):
            raise LossyConversion(
                f"target_layer_ids {list(config.target_layer_ids)}: readers of {self.title} sort the tapped layers and "
                f"drop repetitions, which mixes up the columns of fc.weight",
                hint="--normalise-taps sorts them without changing what the draft computes",
            )

    def refuse_style(self, carried: Mapping[str, Any]) -> None:
        """Refuse to carry a flag that some reader of this dialect does not look at.

        Raises:
            LossyConversion: norms or rope of another style than these readers apply.
        """
        for key, value in carried.items():
            flag = key.rpartition(".")[2]
            if flag in STYLE_FLAGS and value is STYLE_FLAGS[flag] and flag not in self.style_flags:
                readers = [item.name for item in writable_formats() if flag in item.style_flags]
                raise LossyConversion(
                    f"{key} {json.dumps(value)}: readers of {self.title} do not look at it and would apply the weights "
                    f"otherwise than they were trained",
                    hint=f"--to {' or '.join(readers)} keeps it, or export the draft in the usual style",
                )

    def warnings(self, config: DraftConfig, carried: Mapping[str, Any]) -> Iterator[str]:
        """Warnings for a user who is about to serve a draft written in this dialect."""
        if config.num_target_layers is not None and config.num_target_layers - 1 in config.target_layer_ids:
            yield (
                f"the draft taps layer {config.num_target_layers - 1}, the target's last, whose output engines treat "
                f"differently: transformers passes it on after the final norm, vLLM before it, SGLang 0.5.23 not at "
                f"all for Qwen2, Qwen3 and Llama targets"
            )
        if not self.sorts_taps and not taps_ascend(config):
            yield (
                f"target_layer_ids {list(config.target_layer_ids)} are not in ascending order, once each: engines "
                f"mix up the columns of fc.weight unless --normalise-taps sorts the list"
            )


NUMBER = re.compile(r"\d+")
"""Names that differ by numbers alone are alike, and the first of them stands for all: there can be very many."""

FORMATS: Registry[type[Format]] = Registry("format")
PACKAGES = ("dflash_cli.formats", "dflash_cli.engines")
"""Whose modules register dialects: an engine's file brings the dialect that is written for it."""


@dataclass(frozen=True, slots=True)
class Detection:
    """The dialect that a checkpoint is written in, and the sentence that names the evidence."""

    format: Format
    evidence: str


def detect(checkpoint: Checkpoint) -> Detection:
    """Name the dialect of a checkpoint.

    Raises:
        UnknownFormat: no dialect recognises it.
    """
    return detect_from(checkpoint.config, frozenset(checkpoint.tensors), checkpoint.config_path)


def detect_from(config: Mapping[str, Any], tensor_names: frozenset[str], path: Path) -> Detection:
    """`detect`, from a config and tensor names; `tensor_names` may be empty if headers cannot be read."""
    found = find_dialect(config, tensor_names)
    if found is None:
        raise unknown_format(config, path)
    return found


def find_dialect(config: Mapping[str, Any], tensor_names: frozenset[str]) -> Detection | None:
    """The first dialect that recognises a config and its tensors, None where none does."""
    alike: dict[str, str] = {}
    for name in tensor_names:
        key = NUMBER.sub("0", name)
        alike[key] = min(name, alike.get(key, name))
    names = frozenset(map(canonical_name, alike.values()))
    for candidate in all_formats():
        evidence = candidate.evidence(config, names)
        if evidence is not None:
            return Detection(candidate, evidence)
    return None


def unknown_format(config: Mapping[str, Any], path: Path) -> UnknownFormat:
    """The error that says what a draft would have been recognised by."""
    return UnknownFormat(
        f"{path}: not a DFlash draft (architectures {config.get('architectures')!r}, no dflash_config, no "
        f"speculators_model_type)",
        hint="a draft's config.json has dflash_config or speculators_model_type; did you pass the target?",
    )


@cache
def all_formats() -> tuple[Format, ...]:
    """Every registered dialect in order of priority: those of exporters, and those that serving engines want."""
    for package in PACKAGES:
        FORMATS.discover(package)
    return tuple(sorted((item() for item in FORMATS.values()), key=lambda item: item.priority))


def get_format(name: str) -> Format:
    """The dialect of that name.

    Raises:
        UnsupportedError: there is none.
    """
    all_formats()
    return FORMATS[name]()


def writable_formats() -> tuple[Format, ...]:
    """The dialects that a conversion can write, in order of their names."""
    return tuple(sorted((item for item in all_formats() if item.writable), key=lambda item: item.name))


def get_writable(name: str) -> Format:
    """The dialect of that name, if a conversion can write it.

    Raises:
        UsageError: there is none, or it is only read.
    """
    found = {item.name: item for item in writable_formats()}
    if name in found:
        return found[name]
    known = ", ".join(found)
    if name in FORMATS:
        raise UsageError(f"dialect {name!r} can be read but not written (can be written: {known})")
    close = difflib.get_close_matches(name, found, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else ""
    raise UsageError(f"unknown dialect {name!r}{guess} (known: {known})")


def taps_ascend(config: DraftConfig) -> bool:
    """Whether the taps ascend, each named once."""
    return all(one < other for one, other in zip(config.target_layer_ids, config.target_layer_ids[1:], strict=False))


def named_architectures(config: Mapping[str, Any]) -> list[str]:
    """The strings of `architectures`, whatever else the key holds."""
    value = config.get("architectures")
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
