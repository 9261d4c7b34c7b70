"""How much runs in a step: as much as the limits allow, or less for a while after failed steps. Host only."""

from dflash_runtime.scheduling.limits import Limits, rows_beside, rows_to_ridge

REQUESTS_PER_PROMPT = 12
"""Prompts count as few if at least this many requests decode per prompt. Few prompts may wait for rows."""


class StepLoad:
    """The most requests that run at a time, and the most rows of a step.

    `keeps_to_ridge` is set if captured steps have room for prompts. Then a few prompts run few rows per step, so that
    decoding requests get their tokens sooner. This also takes slightly less time in total
    (docs/measurements/mixed-load.md). Many prompts run as many rows as the step allows, because each waiting prompt is
    a request that does not decode.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.keeps_to_ridge = False
        self.max_running = limits.max_num_requests
        self.max_batched_tokens = limits.max_batched_tokens

    def prompt_rows(self, num_decoding: int, verify_width: int, num_prompts: int) -> int:
        """How many rows `num_prompts` prompts get in a step in which `num_decoding` requests decode."""
        most = rows_beside(num_decoding * verify_width, self.max_batched_tokens)
        spare = rows_to_ridge(num_decoding) if self.keeps_to_ridge and verify_width == 1 else 0
        is_few = num_prompts * REQUESTS_PER_PROMPT <= num_decoding
        return min(spare, most) if spare and is_few else most

    def shed(self, num_running: int, *, with_rows: bool) -> None:
        """Halve the number of running requests. `with_rows` also halves the rows of a step."""
        self.max_running = max(1, min(self.max_running, num_running) // 2)
        if with_rows:
            self.max_batched_tokens = max(1, self.max_batched_tokens // 2)

    def add(self) -> None:
        """Double the running requests and the rows of a step, up to the limits."""
        self.max_running = min(2 * self.max_running, self._limits.max_num_requests)
        self.max_batched_tokens = min(2 * self.max_batched_tokens, self._limits.max_batched_tokens)

    def restore(self) -> None:
        """Return to the limits."""
        self.max_running = self._limits.max_num_requests
        self.max_batched_tokens = self._limits.max_batched_tokens
