"""How many rows a decode step verifies in all, and which request gets how many. Host only.

A verified row is worth the probability that its token is accepted: the survival of its position, the product of the
conditional probabilities up to it. Survivals of a request never grow along a block, so the best rows of a batch are a
prefix of each block. The number of rows is the one with the most expected tokens per millisecond:

    (requests + sum of the n best survivals) / milliseconds of a step with n drafted rows

The text never depends on it: a narrower block commits fewer tokens of the same text.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

Survivals = Sequence[Sequence[float]]
"""Survival by position of each request's drafted tokens. A request that drafts nothing has none."""


def survivals_of(likely: Sequence[float]) -> list[float]:
    """Return the survival of each position, from conditional probabilities."""
    return list(accumulate(likely, lambda before, own: before * own))


def choose_rows(survivals: Survivals, times: Mapping[int, float]) -> int:
    """Return the number of rows of a step, anchors included: a key of `times`, which has milliseconds by rows.

    Among equal choices the fewest rows are taken. `times` has at least one number of rows that holds all anchors.
    """
    best = sorted((value for own in survivals for value in own), reverse=True)
    gains = list(accumulate(best, initial=float(len(survivals))))
    fitting = sorted(rows for rows in times if rows >= len(survivals))
    return max(fitting, key=lambda rows: gains[min(rows - len(survivals), len(best))] / times[rows])


def give_rows(survivals: Survivals, num_rows: int) -> list[int]:
    """Return the rows of each request, anchors included, that hold the best survivals: at most `num_rows` in all.

    Among equal survivals, earlier positions come first, then earlier requests.
    """
    places = [(-value, place, request) for request, own in enumerate(survivals) for place, value in enumerate(own)]
    widths = [1] * len(survivals)
    for _, _, request in sorted(places)[: max(0, num_rows - len(survivals))]:
        widths[request] += 1
    return widths
