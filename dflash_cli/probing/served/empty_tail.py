"""The end of a text that says nothing: white space, or a few characters again and again."""

MAX_CYCLE, MIN_CYCLES, MIN_CHARS = 24, 4, 48
"""Characters of the longest cycle, and the fewest cycles and characters. Indented JSON has less white space at once."""


def empty_tail(text: str) -> str:
    """The longest end of white space or of one short cycle; empty if it is shorter than the limits."""
    tails = [text[len(text.rstrip()) :]]
    for size in range(1, MAX_CYCLE + 1):
        length = _length(text, size)
        tails += [text[-length:]] if length >= MIN_CYCLES * size else []
    longest = max(tails, key=len)
    return longest if len(longest) >= MIN_CHARS else ""


def _length(text: str, size: int) -> int:
    """How many characters at the end repeat in a cycle of `size` characters."""
    first = text[-size:]
    places = range(len(text))
    return next((place for place in places if text[-1 - place] != first[-1 - place % size]), len(text)) if first else 0
