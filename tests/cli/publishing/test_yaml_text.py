"""YAML texts of others: metadata at the head of a model card."""

import pytest

from dflash_cli.publishing.yaml_text import read_yaml
from dflash_runtime.errors import UsageError
from dflash_testing.deadline import deadline


@pytest.mark.parametrize("text", ["a: " + "[" * 3000, "a: " + "{a: " * 3000, "- " * 3000, "a: " + "x" * 1_000_001])
def test_metadata_that_takes_long_to_parse_is_refused(text: str) -> None:
    with deadline(10), pytest.raises(UsageError) as caught:
        read_yaml(text, "card", None)
    assert caught.value.id in ("yaml-too-large", "invalid-yaml")


def test_brackets_in_a_card_are_read() -> None:
    assert read_yaml("a: [[1], {b: '[x]'}]\n", "card", None) == {"a": [[1], {"b": "[x]"}]}
