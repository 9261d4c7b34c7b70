"""Context lengths that a draft names: its window, its positions, the lengths of its rope and of its training."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from dflash_runtime.documents import computed_key
from dflash_runtime.read_files import read_all

if TYPE_CHECKING:
    from dflash_cli.checkpoints.opening import DraftCheckpoint

ROPE_LENGTH = "original_max_position_embeddings"
CARD = "README.md"
MAX_CARD_BYTES = 2**20
OF_TRAINING = re.compile(r"\btrain", re.IGNORECASE)
LENGTH = re.compile(
    r"""(?:max(?:imum)?[-_ ]?(?:seq(?:uence)?[-_ ]?)?len(?:gth)?   # max-length, max_seq_len
        |(?:seq(?:uence)?|context)[-_ ]?len(?:gth)?               # sequence length
        |sequences\ (?:of|up\ to))                                # trained on sequences of up to 320 tokens
        (?:[\s:=|*`]|of\b|is\b|up\ to\b)*
        (\d[\d,]*)\ ?(k\b)?""",
    re.IGNORECASE | re.VERBOSE,
)

MarkKind = Literal["window", "rope", "positions", "training"]
NAMES: Mapping[MarkKind, str] = {
    "window": "the draft's window",
    "rope": "the rope's original length",
    "positions": "the draft's positions",
    "training": "the length it was trained for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextMark:
    """A context length that a draft names."""

    kind: MarkKind
    num_tokens: int
    source: Annotated[str, "the key of the config, or the file"]

    @property
    @computed_key
    def name(self) -> str:
        """The meaning of the length: `the draft's window`."""
        return NAMES[self.kind]


def context_marks(draft: "DraftCheckpoint") -> tuple[ContextMark, ...]:
    """Return the lengths that a draft names, ascending: only stated ones."""
    config = draft.config
    found = [
        ContextMark(kind="window", num_tokens=size, source=_window_source(config.windows, size))
        for size in sorted({size for size in config.windows if size is not None})
    ]
    rope_len = config.rope.params.get(ROPE_LENGTH)
    if isinstance(rope_len, int):
        found.append(ContextMark(kind="rope", num_tokens=rope_len, source=ROPE_LENGTH))
    found.append(
        ContextMark(kind="positions", num_tokens=config.max_position_embeddings, source="max_position_embeddings")
    )
    card = draft.checkpoint.path / CARD
    trained = trained_length(read_all(card)[:MAX_CARD_BYTES].decode(errors="replace")) if card.is_file() else None
    if trained is not None:
        found.append(ContextMark(kind="training", num_tokens=trained, source=CARD))
    return tuple(sorted(found, key=lambda mark: mark.num_tokens))


def _window_source(windows: tuple[int | None, ...], size: int) -> str:
    return f"sliding_window of {windows.count(size)} of {len(windows)} layers"


def trained_length(card: str) -> int | None:
    """Return the length of the training sequences that a card states, in tokens; None if it states none, or several.

    Only lines about training count: a line that says so, or a line below a heading that says so.
    """
    heading, found = "", set()
    for line in card.splitlines():
        if line.startswith("#"):
            heading = line
        if OF_TRAINING.search(line) or OF_TRAINING.search(heading):
            found |= {int(number.replace(",", "")) * (1024 if kilo else 1) for number, kilo in LENGTH.findall(line)}
    return found.pop() if len(found) == 1 else None
