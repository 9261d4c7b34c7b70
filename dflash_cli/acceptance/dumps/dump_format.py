"""The content of a dump of any program, and the registry of dump formats.

A format is one file in this package with a class decorated `@DUMP_FORMATS.register(name)`. Tapped layers are counted
from 0 here, also if the writing program counts in another way: tap i is the output of decoder layer i. The last layer's
tap is taken before the final norm.

Axis letters: T rows, L tapped layers, H hidden size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from dflash_cli.checkpoints.checkpoint_identity import Identity
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.run_facts import DumpSource
from dflash_runtime.documents import Limits
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, UnknownFormat
from dflash_runtime.registry import Registry
from dflash_runtime.scheduling.request import FinishReason

if TYPE_CHECKING:
    import torch

HIDDEN, TOKENS = "hidden_states", "token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFacts:
    """One answer of a target. `num_overhang` further tokens of the target continue it."""

    row: PromptRow
    turn: int = 0
    finish_reason: FinishReason = FinishReason.LENGTH
    prompt_len: Annotated[int, Limits(least=1)]
    answer_len: Annotated[int, Limits(least=0)]
    num_overhang: Annotated[int, Limits(least=0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedText(TextFacts):
    """One answer of a target in a dump. `token_ids` are the prompt, the answer, and the tokens that continue it.

    `read` loads the hidden states of the first `num_rows` tokens, [T, L, H].
    """

    file: Path
    token_ids: tuple[int, ...]
    num_rows: int
    read: Callable[[], "torch.Tensor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """Texts of one target with the outputs of its layers `taps`. Facts that the files do not state are None."""

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
        """Name, commit and digest of the target, for messages."""
        if self.target is None:
            return "an unnamed target"
        commit = f"@{self.target.commit[:12]}" if self.target.commit else ""
        return f"{self.target.name}{commit} ({self.target.digest})"

    @property
    def facts(self) -> DumpSource:
        """Facts about the dump for the result of a replay."""
        return DumpSource(
            name=self.path.name,
            format=self.format,
            taps=self.taps,
            target=self.target,
            is_complete=self.is_complete,
            num_texts=len(self.texts),
        )


class DumpFormat(Protocol):
    """The form in which one program writes a target's text and hidden states."""

    def matches(self, path: Path) -> bool:
        """Return whether a folder or file has this format."""
        ...

    def open(self, path: Path, layer_ids: Sequence[int] | None) -> Dump:
        """Read everything except the hidden states. `layer_ids` are the tapped layers in that program's numbering.

        Raises:
            CheckpointError: a file is cut off or malformed.
            UsageError: the files do not state their layers, and `layer_ids` is None.
        """
        ...


DUMP_FORMATS: Registry[Callable[[], DumpFormat]] = Registry("dump format")


def open_dump(path: Path, layer_ids: Sequence[int] | None = None) -> Dump:
    """Open the dump at a path, in any registered format.

    Raises:
        CheckpointNotFound: the path does not exist.
        UnknownFormat: no format matches.
        CheckpointError, UsageError: see `DumpFormat.open`; the dump is empty.
    """
    if not path.exists():
        raise CheckpointNotFound(
            "no such dump", id="dump-not-found", path=path, hint="write one with dflash dump TARGET --output DIR"
        )
    DUMP_FORMATS.discover("dflash_cli.acceptance.dumps")
    for name in DUMP_FORMATS:
        format = DUMP_FORMATS[name]()
        if format.matches(path):
            dump = format.open(path, layer_ids)
            if not dump.texts:
                raise CheckpointError("the dump is empty, expected at least one text", id="empty-dump", path=path)
            return dump
    raise UnknownFormat(
        f"not a dump in a known format ({', '.join(DUMP_FORMATS)})", id="unknown-dump-format", path=path
    )


def check_ids_within(text: Sequence[int], vocab_size: int, file: Path) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        CheckpointError: naming the first token id outside the vocabulary.
    """
    wrong = next((token for token in text if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise CheckpointError(
            id="token-outside-vocabulary", path=file, field=TOKENS, found=wrong, expected=f"ids in [0, {vocab_size})"
        )
