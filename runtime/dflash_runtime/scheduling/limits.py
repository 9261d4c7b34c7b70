"""Limits of the engine that do not change, and how far a step may write past a request's KV. Host only."""

from dataclasses import dataclass

PROMPT_SHARE = 4
"""Prompts have one of so many rows of a step at least, however many decode."""

RIDGE_ROWS = 256
"""Rows of a forward from which on, about, multiplying takes a GPU longer than reading the weights.

By its rates an H200 multiplies some 180 rows of bfloat16 with a weight while it reads it. Source of the word: Williams,
Waterman and Patterson 2009, "Roofline: An Insightful Visual Performance Model for Multicore Architectures".
"""

RIDGE_GRAIN = 64
"""What is left to prompts below the ridge is a multiple of so many rows: steps are captured for each number."""


def rows_beside(num_decoded: int, max_rows: int) -> int:
    """How many prompt rows a step of `max_rows` takes beside so many rows of requests that decode.

    These run in any case, so that a step has more rows only where they leave prompts less than their share.
    """
    return max(max_rows - num_decoded, -(-max_rows // PROMPT_SHARE))


def rows_to_ridge(num_decoded: int) -> int:
    """How many prompt rows a step may have beside so many rows of requests that decode, to stay below the ridge."""
    return max(0, RIDGE_ROWS - -(-num_decoded // RIDGE_GRAIN) * RIDGE_GRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Fixed before the engine starts. With prompts a step has `max_batched_tokens` rows at most; see `rows_beside`."""

    num_draft_tokens: int
    max_model_len: int
    max_num_requests: int
    vocab_size: int
    max_batched_tokens: int = 2048

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots a step may write past a request's true KV: the anchor and each drafted token."""
        return self.num_draft_tokens + 1

    @property
    def last_draft_len(self) -> int:
        """The longest true KV after which a whole block still fits the model; blocks are never shortened."""
        return self.max_model_len - self.num_lookahead_tokens

    @property
    def max_rows(self) -> int:
        """Rows of the largest forward: blocks of all requests, and the prompts beside them."""
        num_decoded = self.max_num_requests * self.num_lookahead_tokens
        return num_decoded + rows_beside(num_decoded, self.max_batched_tokens)

    def reserved_len(self, known_len: int, num_in_flight: int = 0) -> int:
        """How many tokens a request must have pages for before a step is queued.

        `known_len` rows are certain, this call's prompt rows included; each step in flight, and the one to be queued,
        may write a lookahead.
        """
        return min(known_len + (num_in_flight + 1) * self.num_lookahead_tokens, self.max_model_len)

    def loading_len(self, num_rows: int) -> int:
        """How many tokens a request must have pages for while rows of its KV are on their way: those, no lookahead.

        Nothing else writes meanwhile. The lookahead comes with its first step here, and is held back for it until then.
        Source: vLLM's scheduler since vllm-project/vllm#46694.
        """
        return min(num_rows, self.max_model_len)
