"""A bool is not a JSON number."""

from dflash_runtime.json_values import is_int, is_number


def test_integers() -> None:
    assert [value for value in (0, -3, True, 1.0, "1", None) if is_int(value)] == [0, -3]


def test_numbers() -> None:
    found = [value for value in (0, 1.5, False, "1", None, float("inf"), float("nan")) if is_number(value)]
    assert found == [0, 1.5]
    assert not any(isinstance(value, bool) for value in found)
