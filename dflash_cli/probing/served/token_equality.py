"""Compare greedy answers to the same prompts token by token, and decide whether rounding explains a difference.

Batches of different shapes round differently, so two almost equally likely tokens may swap. The probe asks the server
for its log-probabilities after the common text. A small gap between the two tokens is a near-tie. Rounding does not
explain a large gap.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

from dflash_cli.acceptance.journal import JournalRow
from dflash_cli.comparing.measured_result import ResultFile
from dflash_cli.generation.answers import Answer
from dflash_runtime.documents import computed_key
from dflash_runtime.scheduling.request import FinishReason

NEAR_TIE_NATS = 0.25
"""Two steps of bfloat16 at logits between 16 and 32: the largest difference from rounding in two forward passes."""
FAULT_NATS = 1.0
"""One difference of this many nats is a fault. Of smaller differences above a near-tie, two are."""
MAX_ASKED = 64
"""The most differences for which the server is asked for log-probabilities."""

Turn = tuple[str, int]
NextLogprobs = Callable[[Sequence[int]], Mapping[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """The tokens of one answer, its prompt, and whether a length limit cut it."""

    name: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """The first position at which two answers differ."""

    name: str
    position: Annotated[int, "from 0"]
    tokens: Annotated[tuple[int | None, int | None], "null past the end of an answer"]
    gap_nats: Annotated[
        float | None, "difference of the server's log-probabilities, or a lower bound; null if unknown"
    ] = None
    is_near_tie: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEquality:
    """Two sets of answers compared token by token."""

    base: str
    other: str
    num_compared: int
    num_unlike: Annotated[int, "turns that are not compared, because their prompts have different tokens"]
    differences: tuple[TokenDifference, ...]

    @property
    @computed_key
    def num_same(self) -> int:
        """Number of answers with the same tokens."""
        return self.num_compared - len(self.differences)

    @property
    @computed_key
    def num_near_ties(self) -> int:
        """Number of differences between tokens that are nearly as likely."""
        return sum(item.is_near_tie for item in self.differences)

    @property
    @computed_key
    def num_unexplained(self) -> int:
        """Number of differences that are known not to be near-ties."""
        return len(self.unexplained)

    @property
    def unexplained(self) -> list[TokenDifference]:
        """Differences that are known not to be near-ties."""
        return [item for item in self.differences if item.gap_nats is not None and not item.is_near_tie]

    def shows_fault(self, *, is_quantised: bool = False) -> bool:
        """Whether rounding cannot explain the differences. Of values in few bits, only large differences count."""
        gaps = [item.gap_nats or 0 for item in self.unexplained]
        return max(gaps, default=0) >= FAULT_NATS or (len(gaps) > 1 and not is_quantised)


def texts_of_answers(answers: Sequence[Answer]) -> dict[Turn, TokenText]:
    """The answers of a run by prompt and turn."""
    return {
        (answer.row.digest, answer.turn): TokenText(
            name=str(answer.row.id) if answer.row.id is not None else f"prompt {answer.row.index + 1}",
            prompt_ids=answer.output.prompt_token_ids,
            token_ids=answer.output.token_ids,
            is_cut=answer.output.finish_reason == "length",
        )
        for answer in answers
    }


def texts_of_file(path: Path) -> dict[Turn, TokenText]:
    """The answers in a file written with `--output`; empty for any other file."""
    file = ResultFile(path)
    if not file.rows or not isinstance(file.rows[0].get("settings"), dict):
        return {}
    return {
        (row.digest, row.turn): TokenText(
            name=f"prompt {row.index + 1}" if row.id is None else str(row.id),
            prompt_ids=row.prompt_token_ids,
            token_ids=row.token_ids,
            is_cut=row.finish_reason is FinishReason.LENGTH,
        )
        for row in file.read_rows(JournalRow)
        if row.error is None
    }


def compare_texts(
    base: Mapping[Turn, TokenText],
    other: Mapping[Turn, TokenText],
    *,
    names: tuple[str, str],
    next_logprobs: NextLogprobs | None,
    near_tie_nats: float = NEAR_TIE_NATS,
) -> TokenEquality:
    """Compare answers to the same prompts.

    A turn is not compared if its prompts have different tokens: an earlier answer or the rendering differed.
    """
    shared = [(base[key], other[key]) for key in base if key in other]
    pairs = [pair for pair in shared if pair[0].prompt_ids == pair[1].prompt_ids]
    found: list[TokenDifference] = []
    for first, second in pairs:
        difference = _first_difference(first, second)
        if difference is not None and next_logprobs is not None and len(found) < MAX_ASKED:
            difference = _judge(difference, first, next_logprobs, near_tie_nats)
        found += [difference] if difference is not None else []
    return TokenEquality(
        base=names[0],
        other=names[1],
        num_compared=len(pairs),
        num_unlike=len(shared) - len(pairs),
        differences=tuple(found),
    )


def _first_difference(first: TokenText, second: TokenText) -> TokenDifference | None:
    """The first position with different tokens, or None. Positions after a length limit are not compared."""
    for position, (token, other) in enumerate(zip_longest(first.token_ids, second.token_ids)):
        if token == other:
            continue
        ended = first if token is None else second if other is None else None
        if ended is not None and (ended.is_cut or _is_stop_left_out(first, second)):
            return None
        return TokenDifference(name=first.name, position=position, tokens=(token, other))
    return None


def _is_stop_left_out(first: TokenText, second: TokenText) -> bool:
    """Whether both answers stopped at the same position, and only one of them includes the stop token."""
    both_stopped = not first.is_cut and not second.is_cut
    return both_stopped and abs(len(first.token_ids) - len(second.token_ids)) == 1


def _judge(
    difference: TokenDifference, text: TokenText, next_logprobs: NextLogprobs, near_tie_nats: float
) -> TokenDifference:
    """The difference with the server's gap between the two tokens."""
    tokens = [token for token in difference.tokens if token is not None]
    if len(tokens) < 2:
        return difference
    likeliest = next_logprobs((*text.prompt_ids, *text.token_ids[: difference.position]))
    known = [likeliest[token] for token in tokens if token in likeliest]
    if not known or not likeliest:
        return difference
    least = min(likeliest.values())
    gap = abs(known[0] - known[1]) if len(known) == 2 else max(known[0], max(likeliest.values())) - least
    return replace(difference, gap_nats=gap, is_near_tie=len(known) == 2 and gap <= near_tie_nats)


def find_worst(text: TokenText, scores: Sequence[Mapping[int, float]], near_tie_nats: float) -> TokenDifference | None:
    """The least likely token of an answer, against the target's first choice; None if each token is that choice."""
    places = []
    for position, (token, likely) in enumerate(zip(text.token_ids, scores, strict=False)):
        first = max(likely, key=lambda item: likely[item], default=token)
        if token in likely and likely[first] > likely[token]:
            places.append((likely[first] - likely[token], position, first))
    if not places:
        return None
    gap, position, first = max(places)
    return TokenDifference(
        name=text.name,
        position=position,
        tokens=(text.token_ids[position], first),
        gap_nats=gap,
        is_near_tie=gap <= near_tie_nats,
    )
