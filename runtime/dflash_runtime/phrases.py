"""Short texts that messages are built from: counted nouns, values cut to a length, and guesses of mistyped names."""

import difflib
from collections.abc import Iterable


def plural(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def article(noun: str) -> str:
    """`a DSpark`, `an EAGLE-3`, `an MTP`: the noun with its indefinite article."""
    return f"{'an' if noun[0] in 'AEIOU' or noun.startswith(('MTP', 'XPress')) else 'a'} {noun}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known name that the word most probably means; None if none is similar. Upper case counts as lower case.

    A short word must be more similar, because its letters agree with many names by chance. Otherwise the first name
    that begins with the word is meant, or a name with which the word begins: `compare` by `compare-results`.
    """
    names, word = {name.lower(): name for name in known}, word.lower()
    found = difflib.get_close_matches(word, names, n=1, cutoff=0.8 if len(word) < 5 else 0.7)
    if len(word) > 2:
        found += [name for name in names if name.startswith(word) or word.startswith(f"{name}-")]
    return names[found[0]] if found else None


def guess(word: str, known: Iterable[str]) -> str:
    """`; did you mean NAME?`, or an empty text."""
    name = closest(word, known)
    return f"; did you mean {name}?" if name is not None else ""


def shorten(text: str, limit: int) -> str:
    """The text, cut to at most `limit` characters. A cut text ends in `…`."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
