"""What a checkpoint dialect is, and the registry that finds them.

A dialect is one file in this package with one class decorated `@FORMATS.register(name)`. It reads its own config into
the canonical `DraftConfig` and writes that back; the convention by which a dialect numbers layers, places causality or
spells rope is known in that file and nowhere else.

Detection asks every dialect in ascending `priority` and takes the first that recognises the checkpoint; relatives of
DFlash come before DFlash itself, since several of them carry its architecture string.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.layout import canonical_name
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import UnknownFormat
from dflash_runtime.registry import Registry

Json = dict[str, Any]
Homes = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A config read into canonical form.

    `carried` holds keys with no home in the canonical form; they are reported by a conversion and kept where the
    other dialect has room for them. Keys of the decoder body are plain, others are prefixed with the container they
    were found in (`dflash_config.`, `speculators.`). `notes` are sentences a user should see.
    """

    config: DraftConfig
    carried: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    has_doubtful_causality: bool = False


class Format(Protocol):
    """One dialect.

    `writable` says whether `write_config` exists for it. `homes` maps a canonical field to the dotted keys that state
    it here, and `unstated` lists the fields that have none. `keeps_head` says whether its readers use a head, an
    embedding and an id map from the file; `sorts_taps` whether they put taps in ascending order, once each, whatever
    the file says. `evidence` returns the sentence that says by what the checkpoint was recognised, or None where it is
    another dialect.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    priority: ClassVar[int]
    writable: ClassVar[bool]
    homes: ClassVar[Homes]
    unstated: ClassVar[frozenset[str]]
    keeps_head: ClassVar[bool]
    sorts_taps: ClassVar[bool]

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None: ...

    def read_config(self, config: Mapping[str, Any], path: Path) -> Reading: ...

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json: ...


FORMATS: Registry[type[Format]] = Registry("format")
PACKAGES = ("dflash_cli.formats", "dflash_cli.engines")
"""Whose modules register dialects: an engine's file brings the dialect that is written for it."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Which dialect a checkpoint is written in, and what said so."""

    format: Format
    evidence: str


def detect(checkpoint: Checkpoint) -> Detection:
    """Name the dialect of a checkpoint.

    Raises:
        UnknownFormat: no dialect recognises it.
    """
    return detect_from(checkpoint.config, frozenset(checkpoint.tensors), checkpoint.config_path)


def detect_from(config: Mapping[str, Any], tensor_names: frozenset[str], path: Path) -> Detection:
    """`detect`, from what it looks at; `tensor_names` may be empty where headers cannot be read."""
    names = frozenset(map(canonical_name, tensor_names))
    for candidate in all_formats():
        evidence = candidate.evidence(config, names)
        if evidence is not None:
            return Detection(candidate, evidence)
    raise UnknownFormat(
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


def named_architectures(config: Mapping[str, Any]) -> list[str]:
    """The strings of `architectures`, whatever else the key holds."""
    value = config.get("architectures")
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
