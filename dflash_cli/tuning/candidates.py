"""Candidates: a number of draft tokens and a way to draft them. Does not import torch.

There are two ways to draft fewer tokens than trained. Resized: the draft gets a shorter block, as in serving engines.
Narrowed: the draft gets its whole block, and only the first rows are verified. Attention in a block is not causal, so
the two ways give different draft tokens. A run with whole blocks cannot replace either: its later anchors differ. A
tree verifies more tokens than a block: the most likely paths of the whole block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from dflash_cli.terminal.sampling_options import LOOKUP_NAMES
from dflash_runtime.documents import NOT_REQUIRED
from dflash_runtime.errors import UsageError

Way = Literal["whole", "resized", "narrowed", "tree", "ngram", "suffix"]
WAYS: tuple[Way, ...] = ("resized", "narrowed")
"""Ways to draft fewer tokens than trained."""


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A number of draft tokens and a way to draft them."""

    num_speculative_tokens: int
    way: Annotated[
        Way,
        "the trained block; a block of K + 1 rows; the trained block, with its first K + 1 rows verified; a tree from "
        "the trained block; or a lookup in each request's own text, without a draft model",
    ]
    num_nodes: Annotated[int, NOT_REQUIRED, "drafted tokens of a tree, otherwise 0"] = 0

    @property
    def name(self) -> str:
        """`resized-3` or `tree-32`, the name in files and documents."""
        return f"{self.way}-{self.num_nodes or self.num_speculative_tokens}"

    @property
    def is_resized(self) -> bool:
        """Whether serving engines draft this way: they give the draft a block of K + 1 rows."""
        return self.way in ("whole", "resized")

    @property
    def is_lookup(self) -> bool:
        """Whether the tokens are looked up in each request's own text, without a draft model."""
        return self.way in LOOKUP_NAMES

    @property
    def verify_width(self) -> int | None:
        """Rows of the block to verify; None for all rows."""
        return self.num_speculative_tokens + 1 if self.way == "narrowed" else None


def default_numbers(trained: int) -> list[int]:
    """Return 1, 3, 7, ... (blocks of 2, 4, 8, ... rows) and the trained K."""
    powers = [(1 << power) - 1 for power in range(1, trained.bit_length() + 1)]
    return sorted({*(number for number in powers if number < trained), trained})


def candidates_for(numbers: Sequence[int], trained: int, trees: Sequence[int] = ()) -> list[Candidate]:
    """Return both ways of each K below the trained K, trees of these sizes, and the whole block with the trained K.

    Raises:
        UsageError: a K is outside 1 to the trained K.
    """
    wrong = [number for number in numbers if not 1 <= number <= trained]
    if wrong:
        raise UsageError(
            id="k-out-of-range",
            field="--num-speculative-tokens",
            found=wrong[0],
            expected=f"1 to {trained}, the K of the draft's training",
        )
    fewer = [Candidate(number, way) for number in sorted({*numbers} - {trained}) for way in WAYS]
    wider = [Candidate(trained, "tree", number) for number in sorted({*trees})]
    return [*fewer, *wider, Candidate(trained, "whole")]
