"""Detect the dialect of a checkpoint.

Detection asks the dialects in ascending `priority` and takes the first that recognises the checkpoint. Relatives of
DFlash come before DFlash itself, because several of them carry its architecture name.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from dflash_cli.formats.dialect import Format, Json, ParsedConfig, all_formats
from dflash_runtime.checkpoint.layout import canonical_name
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import UnknownFormat, UnsupportedError

logger = logging.getLogger(__name__)

NUMBER = re.compile(r"\d+")
"""Of tensor names that differ by numbers alone, detection looks at one: a checkpoint can have very many tensors."""


@dataclass(frozen=True, slots=True)
class Detection:
    """The dialect of a checkpoint, and a sentence that names the evidence."""

    format: Format
    evidence: str


def detect(checkpoint: Checkpoint) -> Detection:
    """The dialect of a checkpoint.

    Raises:
        UnknownFormat: no dialect recognises the checkpoint.
    """
    return detect_from(checkpoint.config, frozenset(checkpoint.tensors), checkpoint.config_path)


def detect_from(config: Mapping[str, Any], tensor_names: frozenset[str], path: Path) -> Detection:
    """`detect`, from a config and tensor names. `tensor_names` is empty if headers cannot be read."""
    found = find_dialect(config, tensor_names)
    if found is None:
        raise unknown_format(config, path)
    logger.info("%s: %s, because %s", path, found.format.title, found.evidence)
    return found


def find_dialect(config: Mapping[str, Any], tensor_names: frozenset[str]) -> Detection | None:
    """The first dialect that recognises a config with its tensors, None if no dialect does."""
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
    """The error for a config that no dialect recognises."""
    signs = dict.fromkeys(sign for item in all_formats() for sign in item.signs)
    return UnknownFormat(
        f"not a DFlash draft (architectures {config.get('architectures')!r}, "
        f"{', '.join(f'no {sign}' for sign in signs)})",
        id="not-a-draft",
        path=path,
        hint=f"a draft's config.json has {' or '.join(signs)}; did you pass the target?",
    )


def is_draft(config: Mapping[str, Any]) -> bool:
    """Whether a config has a key that only drafts have."""
    return any(sign in config for item in all_formats() for sign in item.signs)


class Unrecognised(Format):
    """Stands in for the dialect of a config that no dialect recognises: plain keys at the top level."""

    name: ClassVar[str] = "unrecognised"
    title: ClassVar[str] = "a draft of no known dialect"
    priority: ClassVar[int] = 1 << 30

    def evidence(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> str | None:
        return None

    def read_config(self, config: Mapping[str, Any], path: Path) -> ParsedConfig:
        raise unknown_format(config, path)

    def write_config(self, config: DraftConfig, carried: Mapping[str, Any]) -> Json:
        raise UnsupportedError(f"{self.title} cannot be written", id="dialect-not-written", found=self.name)
