"""Suffix decoding: draft the tokens that most often followed the longest useful end of the text.

A trie counts every run of up to `DEPTH` tokens of the text. Each end of the text that occurred before is a node of it.
From a node, the child with the highest count is followed while the path keeps a probability of `LEAST_PROBABILITY`, for
at most as many tokens as the end has. The drafted path is the one with the largest sum of probabilities, which is its
expected number of accepted tokens. Only the request's own text counts, so drafts do not depend on other requests.
Source: Oliaro et al. 2024, arXiv 2411.04975 (SuffixDecoding); ArcticInference's `suffix_decoding`.
"""

from dataclasses import dataclass, field

from dflash_runtime.drafts.lookups import LOOKUPS

DEPTH = 24
"""Tokens of the longest run that is counted: an end of the text and the draft after it."""

LEAST_PROBABILITY = 0.1
"""A path ends before the share of its occurrences falls below this."""


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens: how often it occurred, how often a token followed, and the runs longer by one token."""

    count: int = 0
    num_followed: int = 0
    children: "dict[int, Node]" = field(default_factory=dict)

    def follow(self, token_id: int) -> "Node":
        """Count a token after this run, and return the longer run."""
        self.num_followed += 1
        child = self.children.get(token_id)
        if child is None:
            child = self.children[token_id] = Node()
        child.count += 1
        return child

    def likely_path(self, most: int) -> tuple[list[int], float]:
        """Return the most frequent tokens after this run, and the sum of their probabilities. First seen wins a tie."""
        node, path, score, probability = self, list[int](), 0.0, 1.0
        while len(path) < most and node.children:
            token_id, child = max(node.children.items(), key=lambda item: item[1].count)
            probability *= child.count / node.num_followed
            if probability < LEAST_PROBABILITY:
                break
            path.append(token_id)
            score += probability
            node = child
        return path, score


@LOOKUPS.register("suffix")
class SuffixIndex:
    """The trie of a text, and the node of each of its ends, the shortest first."""

    def __init__(self) -> None:
        self._root = Node()
        self._ends: list[Node] = []
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def add(self, token_id: int) -> None:
        """See `TextIndex`."""
        self._ends = [node.follow(token_id) for node in (self._root, *self._ends[: DEPTH - 1])]
        self._len += 1

    def propose(self, most: int) -> list[int]:
        """See `TextIndex`. Among equal sums the path after the longest end is drafted."""
        paths = [node.likely_path(min(most, size)) for size, node in enumerate(self._ends, 1) if node.children]
        return max(reversed(paths), key=lambda item: item[1], default=([], 0.0))[0]
