"""The vocabulary has 60 to 80 words in groups, each defined once, in one line, and used in other pages."""

import re

import pytest

from dflash_cli.terminal import documentation

PAGE = documentation.text("vocabulary")
MAX_WORDS = 25


def defined() -> list[tuple[str, str]]:
    """(word, meaning) of every row of the page's tables."""
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]
    pairs = [(row[0].strip(), "|".join(row[1:]).strip()) for row in rows]
    return [(word, meaning) for word, meaning in pairs if word != "word"]


def test_each_word_is_defined_once() -> None:
    words = [word for word, _ in defined()]
    assert len(words) == len(set(words))
    assert 60 <= len(words) <= 80


def test_every_group_has_words() -> None:
    groups = PAGE.split("\n## ")[1:]
    assert len(groups) >= 5
    assert all(group.count("\n| ") > 3 for group in groups)


@pytest.mark.parametrize(("word", "meaning"), defined(), ids=[word for word, _ in defined()])
def test_a_meaning_is_one_short_line(word: str, meaning: str) -> None:
    assert 0 < len(meaning.split()) <= MAX_WORDS
    assert meaning.rstrip(".").lower() != word.lower()


def test_every_word_is_used_in_another_page() -> None:
    """In any number and case: `KV page` and `pages` use the word page."""
    pages = " ".join(documentation.text(name) for name in documentation.topics() if name != "vocabulary").lower()
    plain = " ".join(re.sub(r"[`*\[\]()]", " ", pages).split())
    unused = [word for word, _ in defined() if not re.search(rf"\b{re.escape(word.lower())}(s|es)?\b", plain)]
    assert not unused


def test_the_axis_letters_of_docstrings_are_explained() -> None:
    for letter in "RTNKHDLVPFC":
        assert re.search(rf"\b{letter} [a-z]", PAGE.rpartition("Axis letters")[2]), letter
