"""Options of trees of draft tokens, as bases of request classes. Does not import torch."""

from dataclasses import dataclass
from typing import Annotated

from dflash_cli.terminal.parameters import DRAFTING, Option
from dflash_cli.terminal.requests import Request
from dflash_runtime.engine_config import MAX_TREE_NODES
from dflash_runtime.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CandidateOptions(Request):
    """How wide a tree may be."""

    tree_candidates: Annotated[
        int | None,
        Option(
            metavar="N", min=1, group=DRAFTING,
            help="With --tree: use at most the N most likely tokens of each position. Default: N of --tree, for "
            "the most likely tree.",
        ),
    ] = None  # fmt: skip

    @property
    def trees(self) -> tuple[int, ...]:
        """The numbers of nodes that the user asked for."""
        raise NotImplementedError

    def check(self) -> None:
        super().check()
        if self.tree_candidates is not None and not self.trees:
            raise UsageError(
                "--tree-candidates needs --tree", id="option-needs-another", field="--tree-candidates",
                found=self.tree_candidates, hint="add --tree N",
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TreeOptions(CandidateOptions):
    """A tree of draft tokens per step."""

    tree: Annotated[
        int | None,
        Option(
            metavar="N", min=1, max=MAX_TREE_NODES, group=DRAFTING,
            help="Verify a tree of the N most likely draft tokens per step instead of one block. The text is the same.",
        ),
    ] = None  # fmt: skip

    @property
    def trees(self) -> tuple[int, ...]:
        return () if self.tree is None else (self.tree,)


@dataclass(frozen=True, kw_only=True)
class TreesOptions(CandidateOptions):
    """Trees of draft tokens. A replay compares several sizes."""

    tree: Annotated[
        tuple[int, ...],
        Option(
            metavar="N,...", min=1, max=MAX_TREE_NODES, group=DRAFTING,
            help="Verify a tree of the N most likely draft tokens per step instead of one block. With --mode replay: "
            "compare trees of these numbers of nodes with one block.",
        ),
    ] = ()  # fmt: skip

    @property
    def trees(self) -> tuple[int, ...]:
        return self.tree
