"""Find earlier requests with the same beginning, so that the digests of common pages are computed once. Host only."""

from dflash_runtime.scheduling.request import Request

TOKEN_BYTES = 8
"""Bytes of a token in `Request.prompt_bytes`."""

MAX_ALIKE = 4
"""The most requests with the same first page that a new request is compared with."""


class RelatedTexts:
    """Live requests by the first page of their prompt, at most `MAX_ALIKE` per page."""

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._requests: dict[bytes, list[Request]] = {}

    def add(self, request: Request) -> None:
        """Note for a new request the live request that has the most full pages of its prompt in common with it.

        The new request joins the others if it has many pages that none of them has.
        """
        size, data = self._page_bytes, request.prompt_bytes
        if len(data) < size:
            return
        alike = self._requests.setdefault(data[:size], [])
        common = [(_num_common(data, other.prompt_bytes, size), other) for other in alike]
        if common:
            request.num_common, request.relative = max(common, key=lambda pair: pair[0])
        if len(alike) < MAX_ALIKE and 2 * request.num_common < len(data) // size:
            alike.append(request)

    def remove(self, request: Request) -> None:
        """Forget a request that has ended."""
        first = request.prompt_bytes[: self._page_bytes]
        alike = self._requests.get(first, [])
        if request in alike:
            alike.remove(request)
            if not alike:
                del self._requests[first]


def _num_common(one: bytes, other: bytes, page_bytes: int) -> int:
    """The number of full pages with which both texts begin."""
    most = min(len(one), len(other)) // page_bytes
    same, width = 0, 1
    while same < most and width:  # longer pieces while they are equal, then shorter ones
        end = min(most, same + width)
        if one[same * page_bytes : end * page_bytes] == other[same * page_bytes : end * page_bytes]:
            same, width = end, 2 * width
        else:
            most, width = end - 1, (end - same) // 2
    return same
