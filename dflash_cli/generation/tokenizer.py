"""The target's tokenizer, its chat template, and decoding of tokens as they arrive."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.digests import digest_text
from dflash_runtime.errors import CheckpointError, RequestError, UsageError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
REPLACEMENT = "\ufffd"


class Tokenizer:
    """A target's tokenizer, loaded by transformers. Code from the checkpoint is never run."""

    def __init__(self, path: Path, template_options: dict[str, Any] | None = None) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"tokenizer cannot be loaded: {reason}", id="tokenizer", path=path) from error
        self._template_options = template_options or {}

    @property
    def eos_token_id(self) -> int | None:
        value = self._tokenizer.eos_token_id
        return int(value) if value is not None else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that the tokenizer adds."""
        return list(self._tokenizer(text, verbose=False)["input_ids"])

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def template_digest(self) -> str | None:
        """Hash of the chat template, None without a template."""
        template = self._tokenizer.chat_template
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return digest_text(text) if template else None

    def render(
        self, messages: Sequence[dict[str, Any]], *, where: str, options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids of a conversation, ready for the assistant's answer. `options` override the tokenizer's own.

        Raises:
            RequestError: the template fails, for example because it does not know a role.
        """
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=True,
                **{**self._template_options, **(options or {})},
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            text = f"{where}: the chat template failed: {reason}"
            raise RequestError(text, id="template-failed", field=where, found=reason) from error
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class StreamDecoder:
    """Turns ids into text as they arrive, and holds back text that may still change.

    A character that is split over tokens decodes to U+FFFD until its last byte arrives. So text is released when the
    decoded text ends with a complete character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._released = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add ids and return the new text that later ids cannot change."""
        self._ids += token_ids
        # Decoding starts near the end, so a long text costs no more than a short one. One released piece stays in
        # front, because a tokenizer may decode a token differently at the start of a text.
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
    """Return the tokenizer in a target's directory, or None if the directory lacks one.

    `template_options` is a JSON object for the chat template, such as `{"enable_thinking": false}`.
    """
    options = template_arguments(template_options)
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    return Tokenizer(path, options)


def template_arguments(text: str | None) -> dict[str, Any]:
    """Return the arguments of a chat template from a JSON object.

    Raises:
        UsageError: the text is not a JSON object.
    """
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        field = "--chat-template-kwargs"
        raise UsageError(f"{field}: not valid JSON: {error}", id="invalid-json", field=field, found=text) from error
    if not isinstance(options, dict):
        raise UsageError(field="--chat-template-kwargs", found=options, expected="a JSON object")
    return options
