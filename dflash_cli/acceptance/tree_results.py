"""Acceptance of trees of draft tokens beside the acceptance of one block, along the same texts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from dflash_cli.acceptance.intervals.statistics import Summary, value_text
from dflash_cli.terminal.shown import Table

TITLE = "by tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeResult:
    """Acceptance of trees of one size."""

    num_nodes: Annotated[int, "drafted tokens that each step verifies"]
    summary: Summary
    gain: Annotated[float | None, "acceptance length divided by the length of one block, minus 1"]

    @classmethod
    def of(cls, num_nodes: int, summary: Summary, block: Summary) -> "TreeResult":
        """The result of trees of `num_nodes` nodes, compared with the result of one block."""
        length, base = summary.counts.acceptance_len, block.counts.acceptance_len
        return cls(num_nodes=num_nodes, summary=summary, gain=length / base - 1 if length and base else None)


def tree_table(results: Sequence[TreeResult], block: Summary) -> Table:
    """Return the acceptance length of one block and of each tree, as columns and rows."""
    num_drafts = block.counts.num_speculative_tokens
    rows = [("block", str(num_drafts), str(block.counts.num_drafts), block.length_text, "")]
    rows += [
        (
            "tree", str(item.num_nodes), str(item.summary.counts.num_drafts), item.summary.length_text,
            value_text(None if item.gain is None else 100 * item.gain, form="+.1f") + "%",
        )
        for item in results
    ]  # fmt: skip
    return ("drafted", "tokens", "steps", "acceptance length", "against the block"), rows
