"""An index over the text of one request, from which a lookup drafts. Host only."""

from collections.abc import Sequence
from typing import Protocol

LOOKED_UP_TOKENS = 7
"""The default number of draft tokens of a lookup."""

MOST_LOOKED_UP_TOKENS = 31
"""The most draft tokens of a lookup: the widest of `WIDTHS` without the anchor."""


class TextIndex(Protocol):
    """An index over one growing text. `len` is the number of its tokens."""

    def __len__(self) -> int: ...

    def add(self, token_id: int) -> None:
        """Append a token to the text."""
        ...

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that may follow the text; empty if nothing in it reads like its end."""
        ...


def padded(draft_ids: Sequence[int], count: int) -> list[int]:
    """Return `count` draft tokens, with -1 where a lookup drafted nothing."""
    return [*draft_ids, *[-1] * (count - len(draft_ids))]
