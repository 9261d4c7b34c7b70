"""Text of files, messages and models without characters that forge lines or control a terminal."""

import re

CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""Control characters, and characters that change the direction of a line."""
CONTROLS_OF_TEXT = re.compile(f"(?!\x1b\\[[02]m)(?![\t\n]){CONTROLS.pattern}")
"""The same without tabs, ends of lines, and the codes of `dim`."""


def safe_line(text: str) -> str:
    """The text on one line, with control characters escaped: `\\x1b`, `\\n`.

    Names in files of others could otherwise forge lines of this tool, or change what a terminal shows.
    """
    return CONTROLS.sub(_escape, text)


def safe_text(text: str) -> str:
    """The text with its own lines and tabs, and other control characters escaped. The codes of `console.dim` stay."""
    return CONTROLS_OF_TEXT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
