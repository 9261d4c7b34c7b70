"""The log-probabilities that a server tells of an answer, each matched with the token of the answer that it is of."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToldLogprobs:
    """The tokens of an answer, and the entries of its log-probabilities in the server's order.

    entries  token id and log-probability in nats. The id is None if the server does not tell it
    """

    token_ids: tuple[int, ...]
    entries: tuple[tuple[int | None, float], ...]

    @classmethod
    def of(
        cls, token_ids: Sequence[int], values: Sequence[float | None], ids: Sequence[int | None] | None = None
    ) -> "ToldLogprobs":
        """Entries of `values`, without empty ones. Without `ids` the entries are in the order of the tokens.

        Raises:
            TypeError, ValueError: a value is not a number, or ids and values differ in number.
        """
        known = token_ids if ids is None and len(values) == len(token_ids) else ids or [None] * len(values)
        pairs = zip(known, values, strict=True)
        return cls(tuple(token_ids), tuple((token, float(value)) for token, value in pairs if value is not None))

    @classmethod
    def joined(cls, parts: Sequence["ToldLogprobs"]) -> "ToldLogprobs":
        """One answer of several parts in order."""
        return cls(
            tuple(token for part in parts for token in part.token_ids),
            tuple(entry for part in parts for entry in part.entries),
        )

    @property
    def num_missing(self) -> int:
        """Tokens without an entry."""
        return max(0, len(self.token_ids) - len(self.entries))

    @property
    def num_of_others(self) -> int:
        """Entries that name another token than the answer has at the same position, if each token has an entry."""
        if len(self.entries) != len(self.token_ids):
            return 0
        each = zip(self.entries, self.token_ids, strict=True)
        return sum(token is not None and token != own for (token, _), own in each)

    @property
    def by_place(self) -> dict[int, float]:
        """Position in the answer -> log-probability, for entries that surely belong to the token there.

        If tokens lack entries, an entry counts only where its order among the others allows one position.
        """
        ids = [token for token, _ in self.entries]
        if not self.num_missing:
            return {
                place: value
                for place, ((token, value), own) in enumerate(zip(self.entries, self.token_ids, strict=False))
                if token == own
            }
        first, last = _places(ids, self.token_ids), _places(ids[::-1], self.token_ids[::-1])
        if first is None or last is None:
            return {}
        mirrored = [len(self.token_ids) - 1 - place for place in last[::-1]]
        pairs = zip(first, mirrored, self.entries, strict=True)
        return {place: value for place, other, (_, value) in pairs if place == other}


def _places(ids: Sequence[int | None], token_ids: Sequence[int]) -> list[int] | None:
    """The first position of each id after the position of the id before; None if the answer lacks an id."""
    places, start = [], 0
    for token in ids:
        place = next((place for place in range(start, len(token_ids)) if token_ids[place] == token), None)
        if place is None:
            return None
        places.append(place)
        start = place + 1
    return places
