"""How much runs in a step: what the limits allow, or less for a while after steps that failed. Host only."""

from dflash_runtime.scheduling.limits import Limits, rows_beside, rows_to_ridge

REQUESTS_A_PROMPT = 12
"""While so many requests decode for each prompt, prompts may wait for rows."""


class StepLoad:
    """The most requests that run at a time, and the most rows of a step.

    Where captured steps have room for prompts, `keeps_to_ridge`: prompts that are few beside the requests that decode
    run few rows a step, so that nobody waits long for a token. That takes a little less time in all, too
    (docs/measurements/mixed-load.md). When prompts are many they run as many rows as may be: each of them is a request
    that does not decode.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.keeps_to_ridge = False
        self.max_running = limits.max_num_requests
        self.max_batched_tokens = limits.max_batched_tokens

    def prompt_rows(self, num_decoding: int, verify_width: int, num_prompts: int) -> int:
        """How many rows of so many prompts a step takes beside requests that decode; see `rows_beside`."""
        most = rows_beside(num_decoding * verify_width, self.max_batched_tokens)
        spare = rows_to_ridge(num_decoding) if self.keeps_to_ridge and verify_width == 1 else 0
        is_few = num_prompts * REQUESTS_A_PROMPT <= num_decoding
        return min(spare, most) if spare and is_few else most

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
