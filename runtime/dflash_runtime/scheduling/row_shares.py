"""Share the prompt rows of a step among prompts, so that a long prompt does not block short ones. Host only."""

from collections.abc import Sequence

from dflash_runtime.scheduling.request import Request


class RowShares:
    """How many rows each prompt runs in one step, at most `num_rows` together.

    While several prompts want rows, each gets at most half of the step's rows. The order is:

    1. the oldest prompt, so that it always makes progress;
    2. prompts that can finish in this step, and prompts that were waiting;
    3. long prompts other than the oldest.

    Rows left over go to the oldest prompt that can use them.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_left = num_rows
        self._most = -(-num_rows // 2)
        self._rows: dict[Request, int] = {}

    def order(self, begun: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Split prompts begun in earlier steps, oldest first: served before new prompts, and served after them."""
        others = sorted(begun[1:], key=_rows_wanted)
        quick = [request for request in others if _rows_wanted(request) <= self._most]
        return [*begun[:1], *quick], [request for request in begun[1:] if request not in quick]

    def give(self, request: Request) -> None:
        """Give a prompt its share. A prompt that needs no rows is entered with 0."""
        self._rows[request] = min(_rows_wanted(request), self._most, self.num_left)
        self.num_left -= self._rows[request]

    def settle(self) -> dict[Request, int]:
        """Hand out the rows left over, and return the rows of each prompt.

        A prompt that wanted rows and got none is left out.
        """
        for request, num_rows in self._rows.items():
            more = min(_rows_wanted(request) - num_rows, self.num_left)
            self._rows[request] += more
            self.num_left -= more
        return {request: rows for request, rows in self._rows.items() if rows or not _rows_wanted(request)}


def _rows_wanted(request: Request) -> int:
    return request.prefill_len - request.prefilled_len
