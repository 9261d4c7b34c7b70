"""How much runs in a step: what the limits allow, or less for a while after steps that failed. Host only."""

from dflash_runtime.scheduling.limits import Limits


class StepLoad:
    """The most requests that run at a time, and the most prompt rows of a step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.max_running = limits.max_num_requests
        self.max_batched_tokens = limits.max_batched_tokens

    def shed(self, num_running: int, *, with_rows: bool) -> None:
        """Run half as many requests as ran; and half as many prompt rows a step, if that is asked for."""
        self.max_running = max(1, min(self.max_running, num_running) // 2)
        if with_rows:
            self.max_batched_tokens = max(1, self.max_batched_tokens // 2)

    def add(self) -> None:
        """Run twice as many requests and prompt rows, as far as the limits allow."""
        self.max_running = min(2 * self.max_running, self._limits.max_num_requests)
        self.max_batched_tokens = min(2 * self.max_batched_tokens, self._limits.max_batched_tokens)

    def restore(self) -> None:
        """Run as many requests and prompt rows as the limits allow again."""
        self.max_running = self._limits.max_num_requests
        self.max_batched_tokens = self._limits.max_batched_tokens
