"""Short texts for messages."""

from dflash_runtime.phrases import plural, shorten


def test_a_noun_is_singular_for_one_alone() -> None:
    assert [plural(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_a_text_keeps_its_length_up_to_the_limit() -> None:
    assert [shorten(text, 4) for text in ("", "four", "fives")] == ["", "four", "fiv…"]
