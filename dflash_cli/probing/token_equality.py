"""Whether greedy answers to the same prompts are the same tokens, and if not, whether rounding explains it.

Batches of other shapes round otherwise, so two likely tokens that are nearly as likely may change places. The server is
asked for its own log-probabilities after what both answers have in common: a small gap between the two tokens that
follow is a near-tie, a large one is a difference that rounding does not make.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from dflash_cli.comparing.measured_result import ResultFile
from dflash_cli.generation.answers import Answer

NEAR_TIE_NATS = 0.25
"""Two steps of bfloat16 at logits between 16 and 32: what the rounding of two forwards can come to."""
MAX_ASKED = 64
"""Differences for which the server is asked for its log-probabilities."""

Turn = tuple[str, int]
NextLogprobs = Callable[[Sequence[int]], Mapping[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """The tokens of one answer, after which prompt, and whether a limit ended them."""

    name: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """The first place at which two answers differ: both tokens, None past an end, and the gap between them in nats.

    `gap_nats` is None where the server was not asked, or does not show it; where only one of the tokens is among the
    likeliest, it is the least that the gap can be.
    """

    name: str
    position: int
    tokens: tuple[int | None, int | None]
    gap_nats: float | None = None
    is_near_tie: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "position": self.position,
            "tokens": list(self.tokens),
            "gap_nats": self.gap_nats,
            "is_near_tie": self.is_near_tie,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEquality:
    """Two sets of answers held against each other, and where they differ. `num_unlike` had other prompts."""

    base: str
    other: str
    num_compared: int
    num_unlike: int
    differences: tuple[TokenDifference, ...]

    @property
    def num_near_ties(self) -> int:
        return sum(item.is_near_tie for item in self.differences)

    @property
    def num_unexplained(self) -> int:
        """Differences that are known to be no near-tie."""
        return sum(item.gap_nats is not None and not item.is_near_tie for item in self.differences)

    def to_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "other": self.other,
            "num_compared": self.num_compared,
            "num_same": self.num_compared - len(self.differences),
            "num_near_ties": self.num_near_ties,
            "num_unexplained": self.num_unexplained,
            "num_unlike": self.num_unlike,
            "differences": [item.to_json() for item in self.differences],
        }


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
    """The answers in a file of `--rows`; none where it is another file, which has no tokens."""
    rows = ResultFile(path).rows
    if not rows or not isinstance(rows[0].get("settings"), dict):
        return {}
    return {
        (row["digest"], row["turn"]): TokenText(
            name=str(row.get("id", f"prompt {row['index'] + 1}")),
            prompt_ids=tuple(row["prompt_token_ids"]),
            token_ids=tuple(row["token_ids"]),
            is_cut=row["finish_reason"] == "length",
        )
        for row in rows[1:]
        if "error" not in row
    }


def compare_texts(
    base: Mapping[Turn, TokenText],
    other: Mapping[Turn, TokenText],
    *,
    names: tuple[str, str],
    next_logprobs: NextLogprobs | None,
    near_tie_nats: float = NEAR_TIE_NATS,
) -> TokenEquality:
    """Hold answers to the same prompts against each other.

    A turn whose prompt has other tokens is not compared: its conversation went another way before, or was rendered
    otherwise.
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
    """None where they are the same as far as both go: past a limit nothing is known of an answer."""
    for place, (token, other) in enumerate(zip_longest(first.token_ids, second.token_ids)):
        if token == other:
            continue
        ended = first if token is None else second if other is None else None
        if ended is not None and (ended.is_cut or _is_stop_left_out(first, second)):
            return None
        return TokenDifference(name=first.name, position=place, tokens=(token, other))
    return None


def _is_stop_left_out(first: TokenText, second: TokenText) -> bool:
    """Whether one has the token that ended it and the other, which ended there too, leaves it out."""
    both_stopped = not first.is_cut and not second.is_cut
    return both_stopped and abs(len(first.token_ids) - len(second.token_ids)) == 1


def _judge(
    difference: TokenDifference, text: TokenText, next_logprobs: NextLogprobs, near_tie_nats: float
) -> TokenDifference:
    """The difference with the gap that the server itself sees between both tokens."""
    tokens = [token for token in difference.tokens if token is not None]
    if len(tokens) < 2:
        return difference
    likeliest = next_logprobs((*text.prompt_ids, *text.token_ids[: difference.position]))
    known = [likeliest[token] for token in tokens if token in likeliest]
    if not known or not likeliest:
        return difference
    least = min(likeliest.values())
    gap = abs(known[0] - known[1]) if len(known) == 2 else max(known[0], max(likeliest.values())) - least
    return TokenDifference(
        name=difference.name,
        position=difference.position,
        tokens=difference.tokens,
        gap_nats=gap,
        is_near_tie=len(known) == 2 and gap <= near_tie_nats,
    )
