"""YAML texts of others: metadata at the head of a model card."""

import pytest

from dflash_cli.documents.yaml_text import read_yaml
from dflash_runtime.errors import UsageError
from dflash_testing.deadline import deadline
from dflash_testing.refusals import refuses

PAIRS = list(zip("abcdefghi", "bcdefghij", strict=True))
MERGES = "".join(f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n" for before, name in PAIRS)
ALIASES = "".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in PAIRS)


@pytest.mark.parametrize("text", ["a: " + "[" * 3000, "a: " + "{a: " * 3000, "- " * 3000, "a: " + "x" * 1_000_001])
def test_metadata_that_takes_long_to_parse_is_refused(text: str) -> None:
    with deadline(10), pytest.raises(UsageError) as caught:
        read_yaml(text, "card", None)
    assert caught.value.id in ("yaml-too-large", "invalid-yaml")


def test_brackets_in_a_card_are_read() -> None:
    assert read_yaml("a: [[1], {b: '[x]'}]\n", "card", None) == {"a": [[1], {"b": "[x]"}]}


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {x: 1}\n" + MERGES,
        "a: " + ":".join(["1"] * 200_000),
        "a: 0x" + "f" * 200_000,
        'a: !!int ""',
        'a: !!float ""',
        "a: !!float " + ":".join(["1"] * 2000),
        "a: !!timestamp x",
        "a: !!bool x",
        "a: !!python/object:os.system {}",
        "a: !!pairs x",
        "? {a: b}\n: c",
        "a: \x00",
    ],
)
def test_values_that_the_parser_does_not_bear_are_refused(text: str) -> None:
    """Merges of merges grow ninefold with each line, and long numbers take the square of their length."""
    with deadline(10), refuses(UsageError, "invalid-yaml"):
        read_yaml(text, "card", None)


def test_aliases_of_lists_are_shared() -> None:
    with deadline(10):
        found = read_yaml("a: &a [x]\n" + ALIASES, "card", None)
    assert found["j"][0] is found["i"]
