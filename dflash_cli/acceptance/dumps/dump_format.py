"""What a dump holds, whoever wrote it, and the registry of its formats.

A format is one file in this package with a class decorated `@DUMP_FORMATS.register(name)`. Whatever its writer calls
the tapped layers, here they are counted from 0: tap i is the output of decoder layer i, the residual stream after it,
and after the last layer before the final norm.

Axis letters: T rows, L tapped layers, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dflash_cli.checkpoints.checkpoint_identity import Identity
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.run_facts import DumpSource
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, UnknownFormat
from dflash_runtime.registry import Registry
from dflash_runtime.scheduling.request import FinishReason

if TYPE_CHECKING:
    import torch

HIDDEN, TOKENS = "hidden_states", "token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedText:
    """One answer of a target: `token_ids` are the prompt, the answer, and what the target would have said next.

    `read` gives the hidden states of the first `num_rows` tokens, [T, L, H].
    """

    row: PromptRow
    turn: int = 0
    file: Path
    token_ids: tuple[int, ...]
    prompt_len: int
    answer_len: int
    num_rows: int
    read: Callable[[], "torch.Tensor"]
    finish_reason: FinishReason = FinishReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Texts of one target with the outputs of its layers `taps`. What the files do not say is None."""

    path: Path
    format: str
    taps: tuple[int, ...]
    hidden_size: int
    texts: tuple[DumpedText, ...]
    vocab_size: int | None = None
    target: Identity | None = None
    ends_digest: str | None = None
    is_complete: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)
    prompts: PromptSource | None = None
    note: str | None = None

    @property
    def target_name(self) -> str:
        """What messages call the target that it was made with."""
        if self.target is None:
            return "a target it does not name"
        commit = f"@{self.target.commit[:12]}" if self.target.commit else ""
        return f"{self.target.name}{commit} ({self.target.digest})"

    @property
    def facts(self) -> DumpSource:
        """What a result states of the dump that it was measured on."""
        return DumpSource(
            name=self.path.name,
            format=self.format,
            taps=self.taps,
            target=self.target,
            is_complete=self.is_complete,
            num_texts=len(self.texts),
        )


class DumpFormat(Protocol):
    """A way in which a program writes a target's text and hidden states."""

    def matches(self, path: Path) -> bool:
        """Whether a folder or file looks like one of this format."""
        ...

    def open(self, path: Path, layer_ids: Sequence[int] | None) -> Dump:
        """Read all but the hidden states; `layer_ids` are the tapped layers as that program was given them.

        Raises:
            CheckpointError: a file that is cut off, or holds something else than it must.
            UsageError: the files do not say which layers they hold, and `layer_ids` is not given.
        """
        ...


DUMP_FORMATS: Registry[Callable[[], DumpFormat]] = Registry("dump format")


@cache
def dump_formats() -> Registry[Callable[[], DumpFormat]]:
    """The registry with every format of this package in it."""
    DUMP_FORMATS.discover("dflash_cli.acceptance.dumps")
    return DUMP_FORMATS


def open_dump(path: Path, layer_ids: Sequence[int] | None = None) -> Dump:
    """The dump at a path, in whichever format it is.

    Raises:
        CheckpointNotFound: nothing is there.
        UnknownFormat: nothing there looks like a dump.
        CheckpointError, UsageError: see `DumpFormat.open`; a dump without a text.
    """
    if not path.exists():
        raise CheckpointNotFound(f"{path}: no such dump", hint="dflash dump TARGET --output DIR writes one")
    formats = dump_formats()
    for name in formats:
        format = formats[name]()
        if format.matches(path):
            dump = format.open(path, layer_ids)
            if not dump.texts:
                raise CheckpointError("holds no text, expected one at least", path=path)
            return dump
    raise UnknownFormat(f"{path}: no dump of a known format ({', '.join(formats)})")


def check_ids_within(text: Sequence[int], vocab_size: int, file: Path) -> None:
    """Refuse token ids that the vocabulary does not have.

    Raises:
        CheckpointError: naming the first.
    """
    wrong = next((token for token in text if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise CheckpointError(f"{TOKENS}: found {wrong}, expected ids in [0, {vocab_size})", path=file)
