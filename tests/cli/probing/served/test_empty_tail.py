"""Ends of texts that say nothing."""

import pytest

from dflash_cli.probing.served.empty_tail import empty_tail

BEGUN = '{"count": 1'


@pytest.mark.parametrize(
    ("tail", "length"),
    [
        (" \n  " * 40, 160),
        ("\n \t\t \n\n" * 9, 63),
        ("0" * 60, 60),
        (', "tree"' * 12, 96),
        ("ab" * 23, 0),
        ("\n" + " " * 40, 0),
        (", ".join(map(str, range(100, 130))), 0),
        ("", 0),
    ],
)
def test_the_longest_end_of_white_space_or_of_one_cycle_is_found(tail: str, length: int) -> None:
    assert len(empty_tail(BEGUN + tail)) == length


def test_an_empty_text_has_no_end() -> None:
    assert empty_tail("") == ""
