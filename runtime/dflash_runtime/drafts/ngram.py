"""Prompt lookup: draft the tokens that followed the first occurrence of the text's last few tokens.

The longest run of tokens decides, from `LONGEST` down to `SHORTEST`. Among its occurrences the first one counts, as in
vLLM's method "ngram". A draft ends where the text ends.
Source: Saxena 2023, "Prompt Lookup Decoding"; vLLM 0.33, `NgramProposer`.
"""

from dflash_runtime.drafts.lookups import LOOKUPS

LONGEST, SHORTEST = 5, 2
"""Tokens of the longest and of the shortest run. A single token occurs again by chance too often."""


@LOOKUPS.register("ngram")
class NgramIndex:
    """The place after the first occurrence of every run of tokens."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._text)

    def add(self, token_id: int) -> None:
        """See `TextIndex`. Runs are entered when a token follows them, so the text's own end is never found."""
        place = len(self._text)
        for size in range(SHORTEST, min(LONGEST, place) + 1):
            self._places.setdefault(tuple(self._text[place - size :]), place)
        self._text.append(token_id)

    def propose(self, most: int) -> list[int]:
        """See `TextIndex`."""
        for size in range(min(LONGEST, len(self._text)), SHORTEST - 1, -1):
            place = self._places.get(tuple(self._text[-size:]))
            if place is not None:
                return self._text[place : place + most]
        return []
