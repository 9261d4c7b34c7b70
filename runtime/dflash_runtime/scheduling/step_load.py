"""How much runs in a step: what the limits allow, or less for a while after steps that failed. Host only."""

from dflash_runtime.scheduling.limits import Limits, rows_beside


class StepLoad:
    """The most requests that run at a time, and the most rows of a step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.max_running = limits.max_num_requests
        self.max_batched_tokens = limits.max_batched_tokens

    def prompt_rows(self, num_decoded: int) -> int:
        """How many prompt rows a step takes beside so many rows of requests that decode; see `rows_beside`."""
        return rows_beside(num_decoded, self.max_batched_tokens)

    def shed(self, num_running: int, *, with_rows: bool) -> None:
        """Run half as many requests as ran; and half as many rows a step, if that is asked for."""
        self.max_running = max(1, min(self.max_running, num_running) // 2)
        if with_rows:
            self.max_batched_tokens = max(1, self.max_batched_tokens // 2)

    def add(self) -> None:
        """Run twice as many requests and rows, as far as the limits allow."""
        self.max_running = min(2 * self.max_running, self._limits.max_num_requests)
        self.max_batched_tokens = min(2 * self.max_batched_tokens, self._limits.max_batched_tokens)

    def restore(self) -> None:
        """Run as many requests and rows as the limits allow again."""
        self.max_running = self._limits.max_num_requests
        self.max_batched_tokens = self._limits.max_batched_tokens
