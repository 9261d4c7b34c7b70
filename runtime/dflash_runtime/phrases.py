"""Short texts that messages are built from: counted nouns and values cut to a length."""


def plural(count: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def article(noun: str) -> str:
    """`a DSpark`, `an EAGLE-3`, `an MTP`: the noun with its indefinite article."""
    return f"{'an' if noun[0] in 'AEIOU' or noun.startswith(('MTP', 'XPress')) else 'a'} {noun}"


def shorten(text: str, limit: int) -> str:
    """The text, cut to at most `limit` characters. A cut text ends in `…`."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
