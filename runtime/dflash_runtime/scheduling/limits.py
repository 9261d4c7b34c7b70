"""Fixed limits of the engine, and how far a step may write past a request's KV. Host only."""

from dataclasses import dataclass

from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.scheduling.text_index import LOOKED_UP_TOKENS, MOST_LOOKED_UP_TOKENS

PROMPT_SHARE = 4
"""Prompts get at least 1/PROMPT_SHARE of the rows of a step, however many requests decode."""

RIDGE_ROWS = 256
"""The ridge: with more rows than about this, a forward spends more time multiplying than reading weights.

An H200 multiplies about 180 rows of bfloat16 by a weight in the time it takes to read the weight. Source of the term:
Williams, Waterman and Patterson 2009, "Roofline: An Insightful Visual Performance Model for Multicore Architectures".
"""

RIDGE_GRAIN = 64
"""The prompt rows of a step below the ridge are a multiple of this. Each multiple has a CUDA graph of its own."""


def rows_beside(num_decoded: int, max_rows: int) -> int:
    """How many prompt rows fit into a step of `max_rows` that has `num_decoded` decode rows.

    Decode rows always run. The step exceeds `max_rows` only if decode rows leave prompts less than their share.
    """
    return max(max_rows - num_decoded, -(-max_rows // PROMPT_SHARE))


def rows_to_ridge(num_decoded: int) -> int:
    """How many prompt rows fit below the ridge in a step with `num_decoded` decode rows."""
    return max(0, RIDGE_ROWS - -(-num_decoded // RIDGE_GRAIN) * RIDGE_GRAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits fixed before the engine starts. `max_batched_tokens` limits the rows of a step; see `rows_beside`.

    With `num_tree_nodes` above 0, a step verifies a tree of this many drafted nodes instead of a block.
    """

    num_draft_tokens: int
    max_model_len: int
    max_num_requests: int
    vocab_size: int
    max_batched_tokens: int = 2048
    num_tree_nodes: int = 0

    @property
    def num_block_rows(self) -> int:
        """Rows of a drafted block: the anchor and K masks. No step accepts more tokens, even from a tree."""
        return self.num_draft_tokens + 1

    def tree_rows(self, verify_width: int) -> int:
        """The rows of each tree in a step of this verify width, the anchor included; 0 if the step verifies no tree."""
        return self.num_tree_nodes + 1 if self.num_tree_nodes and verify_width > 1 else 0

    @property
    def num_lookahead_tokens(self) -> int:
        """Slots a step may write past a request's true KV: the anchor and each draft token, of all paths of a tree."""
        return max(self.num_draft_tokens, self.num_tree_nodes) + 1

    @property
    def last_draft_len(self) -> int:
        """The longest true KV after which a whole block still fits the model. Blocks are never shortened."""
        return self.max_model_len - self.num_lookahead_tokens

    @property
    def max_rows(self) -> int:
        """Rows of the largest forward: the blocks of all requests, and prompt rows."""
        num_decoded = self.max_num_requests * self.num_lookahead_tokens
        return num_decoded + rows_beside(num_decoded, self.max_batched_tokens)

    def reserved_len(self, known_len: int, num_in_flight: int = 0) -> int:
        """The number of tokens that need pages before the next step of one request is queued.

        `known_len` rows are certain, including the prompt rows of this call. Each step in flight, and the step to be
        queued, may write `num_lookahead_tokens` more.
        """
        return min(known_len + (num_in_flight + 1) * self.num_lookahead_tokens, self.max_model_len)

    def loading_len(self, num_rows: int) -> int:
        """The number of tokens that need pages while one request loads a hand-off of `num_rows` rows.

        No step writes meanwhile, so no lookahead is reserved. The first step after loading reserves it, and admission
        keeps pages free for it. Source: vLLM's scheduler since vllm-project/vllm#46694.
        """
        return min(num_rows, self.max_model_len)


def resolve_num_drafts(config: EngineConfig, draft: DraftConfig | None) -> int:
    """K, by default the number of draft tokens that the draft was trained for, or LOOKED_UP_TOKENS for a lookup.

    Raises:
        UsageError: the config asks for more.
    """
    if config.is_lookup:
        return _resolve_looked_up(config)
    trained = draft.num_draft_tokens if draft is not None else 0
    num_draft_tokens = trained if config.num_draft_tokens is None else config.num_draft_tokens
    if num_draft_tokens > trained:
        why = "without a draft" if draft is None else f"the draft was trained for blocks of {draft.block_size}"
        raise UsageError(
            id="too-many-draft-tokens", field="num_draft_tokens", found=num_draft_tokens,
            expected=f"at most {trained}: {why}",
        )  # fmt: skip
    return num_draft_tokens


def _resolve_looked_up(config: EngineConfig) -> int:
    number = LOOKED_UP_TOKENS if config.num_draft_tokens is None else config.num_draft_tokens
    if number > MOST_LOOKED_UP_TOKENS:
        raise UsageError(
            id="too-many-draft-tokens", field="num_draft_tokens", found=number,
            expected=f"at most {MOST_LOOKED_UP_TOKENS} with drafting {config.drafting}",
        )  # fmt: skip
    return number


def resolve_model_len(config: EngineConfig, num_positions: int, draft: DraftConfig | None) -> int:
    """The longest text, by default all positions of the target, or of the draft if it has fewer.

    Raises:
        UsageError: the config asks for more.
    """
    if draft is not None and resolve_num_drafts(config, draft):
        num_positions = min(num_positions, draft.max_position_embeddings)
    max_model_len = config.max_model_len or num_positions
    if max_model_len > num_positions:
        raise UsageError(
            field="max_model_len", found=max_model_len, expected=f"at most {num_positions}, the positions of the pair"
        )
    return max_model_len
