"""The drafted tokens that a target refuses most often, and what it says instead.

A step tells of its drafted tokens up to the first that was refused: that one and those accepted before it are judged,
what was drafted behind it is not. So the share of a token is of the times it was judged.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from dflash_cli.generation.outputs import visible
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_runtime.documents import Limits, computed_key
from dflash_runtime.scheduling.request import RequestOutput

MOST = 20
"""Tokens that a result keeps."""
REPLACEMENTS = 3
"""Tokens of the target that are kept for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A token that the target chose in place of a drafted one, and how often; `text` has its white space visible."""

    token_id: int
    text: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedToken:
    """A drafted token: how often it was judged, how often refused, and what the target chose most often instead."""

    token_id: int
    text: Annotated[str, "on one line, with white space and control characters escaped"]
    num_rejected: Annotated[int, "steps in which the target replaced the token by its own"]
    num_judged: Annotated[int, Limits(least=1), "steps that accepted or replaced the token"]
    replacements: Annotated[tuple[Replacement, ...], "tokens that the target chose most often instead"]

    @property
    @computed_key
    def rate(self) -> float:
        """Rejected divided by judged."""
        return self.num_rejected / self.num_judged


@dataclass(slots=True)
class _Counts:
    """Judgements over all steps."""

    judged: Counter[int] = field(default_factory=Counter)
    rejected: Counter[int] = field(default_factory=Counter)
    chosen: dict[int, Counter[int]] = field(default_factory=dict)

    def add(self, output: RequestOutput) -> None:
        """Count the steps of a request; of one kept by a release that did not say what was refused, nothing."""
        start = 1  # the prompt's own token
        steps = zip(output.acceptance_lengths, output.committed_lengths, output.rejected_ids, strict=False)
        for length, num_committed, rejected in steps:
            kept = output.token_ids[start : start + num_committed]
            self.judged.update(kept[: length - 1])
            if rejected is not None:
                self.judged[rejected] += 1
                self.rejected[rejected] += 1
                self.chosen.setdefault(rejected, Counter())[kept[-1]] += 1
            start += num_committed


def find_rejected(outputs: Iterable[RequestOutput], tokenizer: Tokenizer | None) -> tuple[RejectedToken, ...]:
    """The tokens refused most often, the most frequent first; equal ones by id."""
    counts = _Counts()
    for output in outputs:
        counts.add(output)
    return tuple(
        RejectedToken(
            token_id=token_id,
            text=visible((token_id,), tokenizer),
            num_rejected=number,
            num_judged=counts.judged[token_id],
            replacements=tuple(
                Replacement(token_id=chosen, text=visible((chosen,), tokenizer), count=count)
                for chosen, count in _most(counts.chosen[token_id], REPLACEMENTS)
            ),
        )
        for token_id, number in _most(counts.rejected, MOST)
    )


def _most(counts: Counter[int], number: int) -> Sequence[tuple[int, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:number]
