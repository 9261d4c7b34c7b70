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

from dflash_runtime.checkpoint import Checkpoint
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import UnknownFormat
from dflash_runtime.registry import Registry

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A config read into canonical form.

    `carried` holds keys with no home in the canonical form; they are reported by a conversion and kept where the
    other dialect has room for them. `notes` are sentences a user should see (what was inferred, what was ignored).
    """

    config: DraftConfig
    carried: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Format(Protocol):
    """One dialect.

    `writable` says whether `write_config` exists for it. `evidence` returns the sentence that says by what the
    checkpoint was recognised, or None where it is another dialect.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    priority: ClassVar[int]
    writable: ClassVar[bool]

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None: ...

    def read_config(self, config: Mapping[str, Any], path: Path) -> Reading: ...

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json: ...


FORMATS: Registry[Format] = Registry("format")


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
    names = _tensor_names(checkpoint)
    for candidate in sorted(all_formats(), key=lambda item: item.priority):
        evidence = candidate.evidence(checkpoint.config, names)
        if evidence is not None:
            return Detection(candidate, evidence)
    architectures = checkpoint.config.get("architectures")
    raise UnknownFormat(
        f"{checkpoint.config_path}: not a DFlash draft (architectures {architectures!r}, no dflash_config, no "
        f"speculators_model_type)",
        hint="a draft's config.json has dflash_config or speculators_model_type; did you pass the target?",
    )


@cache
def all_formats() -> tuple[Format, ...]:
    """Every registered dialect; importing this package's modules registers them."""
    import dflash_cli.formats as package

    FORMATS.discover(package)
    return tuple(FORMATS.values())


def _tensor_names(checkpoint: Checkpoint) -> frozenset[str]:
    return frozenset(checkpoint.tensors)
