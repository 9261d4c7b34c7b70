"""Text and token ids in the commands: options of the chat template, and decoding while tokens arrive."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.checkpoint.text import tokenizer
from dflash_runtime.checkpoint.text.tokenizer import Tokenizer
from dflash_runtime.errors import UsageError

__all__ = ["REPLACEMENT", "StreamDecoder", "Tokenizer", "find_tokenizer", "template_arguments"]

REPLACEMENT = "\ufffd"


class StreamDecoder:
    """Turns token ids into text as they arrive, and holds back text that later ids may change.

    A character that is split over tokens decodes to U+FFFD until its last byte arrives. So text is released up to the
    last token after which the decoded text ends with a whole character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._released = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the new text that later ids cannot change."""
        self._ids += token_ids
        # Decoding starts one piece before the ids not yet released, so a long text costs no more than a short one. That
        # piece is there because a tokenizer may write a token differently at the start of a text.
        before = self._tokenizer.decode(self._ids[self._start : self._released])
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT):
            return ""
        self._start, self._released = self._released, len(self._ids)
        return text[len(before) :]

    def finish(self) -> str:
        """Return the remaining text, even if its last character is incomplete."""
        before = self._tokenizer.decode(self._ids[self._start : self._released])
        return self._tokenizer.decode(self._ids[self._start :])[len(before) :]


def find_tokenizer(path: Path, template_options: str | None = None) -> Tokenizer | None:
    """The tokenizer in a target's folder, or None without tokenizer files.

    `template_options` is a JSON object for the chat template, such as `{"enable_thinking": false}`.
    """
    return tokenizer.find_tokenizer(path, template_arguments(template_options))


def template_arguments(text: str | None) -> dict[str, Any]:
    """The arguments of a chat template, from a JSON object.

    Raises:
        UsageError: `text` is not a JSON object.
    """
    if not text:
        return {}
    try:
        options = loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise UsageError(field="--chat-template-kwargs", found=text, expected="a JSON object")
    return options
