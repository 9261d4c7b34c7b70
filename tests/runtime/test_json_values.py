"""A bool is not a JSON number."""

from dflash_runtime.json_values import as_index, is_int, is_number


def test_integers() -> None:
    assert [value for value in (0, -3, True, 1.0, "1", None) if is_int(value)] == [0, -3]


def test_numbers() -> None:
    found = [value for value in (0, 1.5, False, "1", None, float("inf"), float("nan")) if is_number(value)]
    assert found == [0, 1.5]
    assert not any(isinstance(value, bool) for value in found)


def test_numbers_in_names_are_short_and_in_plain_digits() -> None:
    """`int` refuses 5,000 digits and superscripts, although both are digits."""
    texts = ("0", "007", "9" * 9, "9" * 10, "1" * 5000, "²", "٣", "-1", "", "1_0", " 1")
    assert [as_index(text) for text in texts] == [0, 7, 999999999, *[None] * 8]
