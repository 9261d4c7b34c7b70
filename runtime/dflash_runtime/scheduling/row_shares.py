"""Share the prompt rows of a step among prompts, so that a long one does not block short ones. Host only."""

from collections.abc import Sequence

from dflash_runtime.scheduling.request import Request


class RowShares:
    """How many rows each prompt runs in one step; together at most `num_rows`.

    While others want rows too, a prompt gets half of them at most. The oldest is served first, so that it always gets
    on; then those that end in this step, and prompts that have waited; last, long ones that are not the oldest. What
    nobody else wants goes to the oldest that can take it.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_left = num_rows
        self._most = -(-num_rows // 2)
        self._rows: dict[Request, int] = {}

    def order(self, begun: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Prompts begun in earlier steps, oldest first -> those that are served before new ones, and after them."""
        others = sorted(begun[1:], key=_rows_wanted)
        quick = [request for request in others if _rows_wanted(request) <= self._most]
        return [*begun[:1], *quick], [request for request in begun[1:] if request not in quick]

    def give(self, request: Request) -> None:
        """Serve a prompt; one that wants nothing takes part all the same."""
        self._rows[request] = min(_rows_wanted(request), self._most, self.num_left)
        self.num_left -= self._rows[request]

    def settle(self) -> dict[Request, int]:
        """Hand out what is left, and say what each prompt got; those that wanted rows and got none are not there."""
        for request, num_rows in self._rows.items():
            more = min(_rows_wanted(request) - num_rows, self.num_left)
            self._rows[request] += more
            self.num_left -= more
        return {request: rows for request, rows in self._rows.items() if rows or not _rows_wanted(request)}


def _rows_wanted(request: Request) -> int:
    return request.prefill_len - request.prefilled_len
