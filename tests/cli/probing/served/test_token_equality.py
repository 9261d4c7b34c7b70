"""Comparison of greedy answers: equal answers, near-ties, unexplained differences and differences without judgement."""

from collections.abc import Mapping, Sequence

import pytest

from dflash_cli.probing.served.token_equality import TokenEquality, TokenText, compare_texts

PROMPT = (1, 2, 3)


def text(*token_ids: int, is_cut: bool = True, prompt: tuple[int, ...] = PROMPT) -> TokenText:
    return TokenText(name="p", prompt_ids=prompt, token_ids=token_ids, is_cut=is_cut)


def compare(first: TokenText, second: TokenText, likeliest: Mapping[int, float] | None = None) -> TokenEquality:
    asked: list[tuple[int, ...]] = []

    def ask(ids: Sequence[int]) -> Mapping[int, float]:
        asked.append(tuple(ids))
        return likeliest or {}

    found = compare_texts({("d", 0): first}, {("d", 0): second}, names=("a", "b"), next_logprobs=ask)
    for item, ids in zip(found.differences, asked, strict=False):
        assert ids == PROMPT + first.token_ids[: item.position]
    return found


def test_the_same_tokens_are_the_same() -> None:
    found = compare(text(4, 5), text(4, 5))
    assert (found.num_compared, found.differences) == (1, ())


@pytest.mark.parametrize(
    ("gap", "is_near_tie"),
    [(0.0, True), (0.25, True), (0.26, False), (3.0, False)],
)
def test_a_small_gap_between_both_tokens_is_a_near_tie(gap: float, is_near_tie: bool) -> None:
    (difference,) = compare(text(4, 5, 6), text(4, 9, 6), {5: -1.0, 9: -1.0 - gap, 7: -8.0}).differences
    assert (difference.position, difference.tokens, difference.is_near_tie) == (1, (5, 9), is_near_tie)
    assert difference.gap_nats == pytest.approx(gap)


def test_a_token_outside_the_most_likely_is_unexplained() -> None:
    found = compare(text(4, 5), text(4, 9), {5: -0.1, 7: -4.1})
    assert found.num_unexplained == 1
    assert found.differences[0].gap_nats == pytest.approx(4.0)


def test_without_log_probabilities_a_difference_is_not_judged() -> None:
    found = compare(text(4, 5), text(4, 9))
    assert (len(found.differences), found.num_near_ties, found.num_unexplained) == (1, 0, 0)


def test_positions_after_a_length_limit_are_not_compared() -> None:
    assert not compare(text(4, 5), text(4, 5, 6)).differences
    assert not compare(text(4, 5, 6, is_cut=False), text(4, 5)).differences


def test_an_answer_that_stops_earlier_differs() -> None:
    (difference,) = compare(text(4, 5, is_cut=False), text(4, 5, 6, 7)).differences
    assert (difference.position, difference.tokens, difference.gap_nats) == (2, (None, 6), None)


def test_the_token_that_ends_an_answer_may_be_left_out_of_it() -> None:
    assert not compare(text(4, 5, 0, is_cut=False), text(4, 5, is_cut=False)).differences


def test_a_turn_whose_prompt_has_other_tokens_is_not_compared() -> None:
    found = compare(text(4), text(9, prompt=(1, 2)))
    assert (found.num_compared, found.num_unlike, found.differences) == (0, 1, ())
