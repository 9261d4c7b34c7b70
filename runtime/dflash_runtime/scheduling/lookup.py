"""Drafting without a model: the tokens after an earlier place of the request's own text that reads like its end.

A lookup runs on the host and needs every committed token, so steps are synchronous: the host reads the results of a
step before it looks up the drafts of the next one. Host only.
"""

from collections.abc import Callable

from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.text_index import TextIndex


def look_up(request: Request, make_index: Callable[[], TextIndex], most: int) -> tuple[int, ...]:
    """Return the draft tokens of a request, after bringing its index up to its committed tokens."""
    assert not request.num_in_flight, "a lookup needs every committed token"
    index = request.text_index = request.text_index or make_index()
    for token_id in request.token_slice(len(index), request.total_len):
        index.add(token_id)
    return tuple(index.propose(most))
