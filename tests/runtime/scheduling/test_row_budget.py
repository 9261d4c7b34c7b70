"""Rows by survival: no other distribution of as many rows is worth more, and no other number of rows is faster."""

import random
from itertools import product

import pytest

from dflash_runtime.scheduling.row_budget import expected_tokens, fastest, give_rows, survivals_of


def cases(count: int) -> list[list[list[float]]]:
    """Batches of 1 to 4 requests with 0 to 4 drafts each. Every third batch has few different numbers, and so ties."""
    generator = random.Random(0)
    found = []
    for number in range(count):
        values = [0.0, 0.5, 1.0] if number % 3 == 0 else [generator.random() for _ in range(50)]
        blocks = [generator.choices(values, k=generator.randint(0, 4)) for _ in range(generator.randint(1, 4))]
        found.append([survivals_of(block) for block in blocks])
    return found


def worth(survivals: list[list[float]], widths: list[int]) -> float:
    return sum(sum(own[: width - 1]) for own, width in zip(survivals, widths, strict=True))


def test_the_given_rows_are_worth_the_most_of_all_distributions() -> None:
    """300 batches, every number of rows, every distribution of it."""
    for survivals in cases(300):
        options = [list(widths) for widths in product(*(range(1, len(own) + 2) for own in survivals))]
        for num_rows in range(len(survivals), sum(map(len, survivals)) + len(survivals) + 1):
            given = give_rows(survivals, num_rows)
            assert sum(given) == num_rows
            best = max(worth(survivals, widths) for widths in options if sum(widths) == num_rows)
            assert worth(survivals, given) == pytest.approx(best)


def test_the_chosen_number_of_rows_gives_the_most_tokens_per_millisecond() -> None:
    generator = random.Random(1)
    narrow = wide = 0
    for survivals in cases(300):
        most = sum(map(len, survivals)) + len(survivals)
        times = {rows: 3 + generator.random() * rows for rows in range(1, most + 3)}
        options = [list(widths) for widths in product(*(range(1, len(own) + 2) for own in survivals))]
        rates = {
            rows: (len(survivals) + max(worth(survivals, item) for item in options if sum(item) <= rows)) / ms
            for rows, ms in times.items() if rows >= len(survivals)
        }  # fmt: skip
        chosen = fastest(expected_tokens(survivals, times), times)
        assert rates[chosen] == pytest.approx(max(rates.values()))
        narrow += chosen == len(survivals)
        wide += chosen >= most
    assert narrow > 10
    assert wide > 10


def test_equal_survivals_go_to_earlier_positions_then_to_earlier_requests() -> None:
    assert give_rows([[1.0, 1.0], [1.0, 1.0], [1.0]], 5) == [2, 2, 1]
    assert give_rows([[0.0, 0.0], [0.5, 0.0]], 3) == [1, 2]


def test_more_rows_than_drafts_are_left_out() -> None:
    assert give_rows([[0.5], []], 9) == [2, 1]
    assert expected_tokens([[0.5], []], (1, 2, 4)) == {2: 2.0, 4: 2.5}
