"""The draft tokens that a target rejects most often, and the tokens it chooses instead.

A verify step judges its draft tokens up to and including the first rejected one. Later draft tokens of the step are
not judged. A token's rate is rejections divided by judgements.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from dflash_cli.generation.outputs import visible
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_runtime.documents import Limits, computed_key
from dflash_runtime.scheduling.request_output import RequestOutput

MOST = 20
"""Number of rejected tokens kept in a result."""
REPLACEMENTS = 3
"""Number of replacements kept for each rejected token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """A token that the target chose in place of a draft token, and how often. `text` shows white space as escapes."""

    token_id: int
    text: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedToken:
    """A draft token: how often it was judged and rejected, and the target's most frequent replacements."""

    token_id: int
    text: Annotated[str, "on one line, with white space and control characters escaped"]
    num_rejected: Annotated[int, "steps in which the target replaced the token"]
    num_judged: Annotated[int, Limits(least=1), "steps that accepted or replaced the token"]
    replacements: Annotated[tuple[Replacement, ...], "tokens that the target chose most often instead"]

    @property
    @computed_key
    def rate(self) -> float:
        """Rejected divided by judged."""
        return self.num_rejected / self.num_judged


@dataclass(slots=True)
class _Counts:
    """Judgements and rejections over all steps."""

    judged: Counter[int] = field(default_factory=Counter)
    rejected: Counter[int] = field(default_factory=Counter)
    chosen: dict[int, Counter[int]] = field(default_factory=dict)

    def add(self, output: RequestOutput) -> None:
        """Count the steps of a request. Stored requests of releases that did not record `rejected_ids` add nothing."""
        start = 1  # prefill gives the first token, not a verify step
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
    """Return the tokens rejected most often, the most frequent first. Ties are ordered by token id."""
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
