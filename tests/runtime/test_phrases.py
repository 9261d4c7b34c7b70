"""Short texts for messages."""

from dflash_runtime.phrases import closest, plural, shorten


def test_a_noun_is_singular_for_one_alone() -> None:
    assert [plural(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_a_text_keeps_its_length_up_to_the_limit() -> None:
    assert [shorten(text, 4) for text in ("", "four", "fives")] == ["", "four", "fiv…"]


def test_a_guess_is_alike_or_begins_the_same() -> None:
    names = ["eval-acceptance", "validate", "compare", "lint"]
    found = {word: closest(word, names) for word in ("vaildate", "EVAL", "compare-two", "list", "li", "start")}
    assert [*found.values()] == ["validate", "eval-acceptance", "compare", None, None, None]
