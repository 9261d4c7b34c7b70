"""A target's tokenizer: text to token ids and back, and conversations by its chat template. Loaded when first used."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.pair import COPY_TARGET, TargetSource
from dflash_runtime.checkpoint.stored.digests import digest_text
from dflash_runtime.checkpoint.stored.forked_calls import CallFailed, ForkedCalls
from dflash_runtime.checkpoint.stored.strict_json import regular_size, too_large_json
from dflash_runtime.checkpoint.targets.hf_config import read_token_ids
from dflash_runtime.checkpoint.text.plain_tokenizer import PlainTokenizer, read_plain_tokenizer
from dflash_runtime.errors import CheckpointError, RequestError, UnsupportedError
from dflash_runtime.read_files import read_all

RENDER_S, RENDER_BYTES = 10.0, 1 << 30
"""Limits of the time and the memory in which a chat template makes the text of a conversation."""

MAX_FILE_BYTES = 1_000_000_000
READ_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Tokenizer:
    """The tokenizer in a target's folder. No code from the checkpoint runs.

    A plain tokenizer is read here; transformers reads the others, and renders the conversations that its releases
    render differently. Every method and property raises CheckpointError if the tokenizer's files cannot be loaded.
    """

    def __init__(self, path: Path, template_options: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._template_options = dict(template_options or {})

    @cached_property
    def _plain(self) -> PlainTokenizer | None:
        for name in READ_FILES:
            file = self._path / name
            if file.exists() and regular_size(file) > MAX_FILE_BYTES:
                raise too_large_json(file.stat().st_size, file, MAX_FILE_BYTES)
        return read_plain_tokenizer(self._path)

    @cached_property
    def _hosted(self) -> Any:
        self._check_files()
        from transformers import AutoTokenizer

        with self._naming_failure("loaded"):
            return AutoTokenizer.from_pretrained(self._path, local_files_only=True, trust_remote_code=False)

    def _check_files(self) -> None:
        """Refuse a file that cannot be read or is not JSON, before transformers is imported, which takes seconds.

        Raises:
            CheckpointError, FileUnreadable: names the file.
        """
        for file in filter(Path.exists, (self._path / name for name in READ_FILES)):
            data = read_all(file)
            try:
                if file.suffix == ".json":
                    json.loads(data)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(
                    f"not valid JSON: {error}", id="tokenizer-not-loaded", path=file,
                    hint=COPY_TARGET,
                ) from error  # fmt: skip

    @contextmanager
    def _naming_failure(self, done: str) -> Iterator[None]:
        """Turn the errors of the libraries at malformed files into ours. They raise Exception itself, among others."""
        try:
            yield
        except ImportError:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                f"the tokenizer cannot be {done}: {reason}", id=f"tokenizer-not-{done}", path=self._path
            ) from error

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if the tokenizer names one."""
        tokenizer = self._plain or self._hosted
        with self._naming_failure("used"):
            value = tokenizer.eos_token_id
            return int(value) if value is not None else None

    @property
    def library_json(self) -> str:
        """The tokenizer as the tokenizers library writes it.

        Raises:
            UnsupportedError: transformers reads it without that library.
        """
        if self._plain is not None:
            return self._plain.library_json
        library = getattr(self._hosted, "backend_tokenizer", None)
        if library is None:
            raise UnsupportedError(
                "the target's tokenizer is not one of the tokenizers library", id="tokenizer-not-fast", path=self._path,
                hint="name a target directory with tokenizer.json",
            )  # fmt: skip
        return str(library.to_str())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer adds by default.

        Raises:
            RequestError: the text cannot be written as UTF-8.
        """
        return self._encode(text, add_special_tokens=True)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half a surrogate pair: an argument that is not UTF-8 has them
            found = f"U+{ord(text[error.start]):04X}"
            raise RequestError(id="text-not-utf8", field="prompt", found=found, expected="text in UTF-8") from error
        if self._plain is not None:
            return self._plain.encode(text, add_special_tokens)
        hosted = self._hosted
        with self._naming_failure("used"):
            return list(hosted(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer can render conversations."""
        return bool((self._plain or self._hosted).chat_template)

    @cached_property
    def _plain_texts(self) -> ForkedCalls:
        """The text of a conversation with options, by the plain tokenizer."""
        plain = self._plain
        assert plain is not None
        return ForkedCalls(lambda asked: plain.render(*asked), seconds=RENDER_S, max_bytes=RENDER_BYTES)

    @cached_property
    def _hosted_texts(self) -> ForkedCalls:
        """The text of a conversation with options, by transformers, which is loaded before the fork."""
        hosted = self._hosted

        def render(asked: Any) -> str:
            messages, options = asked
            return str(hosted.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options))

        return ForkedCalls(render, seconds=RENDER_S, max_bytes=RENDER_BYTES)

    @property
    def template_digest(self) -> str | None:
        """A hash of the chat template. Conversations with equal hashes are rendered alike."""
        template = (self._plain or self._hosted).chat_template
        text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        return digest_text(text) if template else None

    def render(
        self, messages: Sequence[dict[str, Any]], *, where: str, options: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Token ids of a conversation that ends where the assistant answers.

        `options` of the chat template overrule the options of this tokenizer. `where` names the conversation in errors.

        The template runs in a process of its own, with limits of time and memory.

        Raises:
            RequestError: the template refuses the conversation, for example because of an unknown role, or goes past a
                limit.
        """
        try:
            text = self._render(list(messages), {**self._template_options, **(options or {})})
        except CallFailed as error:
            raise RequestError(
                f"{where}: the chat template refuses the conversation: {error}", id="template-refuses", field=where
            ) from error
        return self._encode(text, add_special_tokens=False)

    def _render(self, messages: list[dict[str, Any]], options: Mapping[str, Any]) -> str:
        is_plain = self._plain is not None and self._plain.renders(messages, options)
        return (self._plain_texts if is_plain else self._hosted_texts)([messages, options])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        if self._plain is not None:
            return self._plain.decode(list(token_ids))
        hosted = self._hosted
        with self._naming_failure("used"):
            return str(hosted.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def find_tokenizer(path: Path, template_options: Mapping[str, Any] | None = None) -> Tokenizer | None:
    """The tokenizer in a target's folder, or None without tokenizer files.

    `template_options` are arguments of the chat template, such as `{"enable_thinking": False}`.
    """
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    return Tokenizer(path, template_options)


def find_stop_ids(target: TargetSource, tokenizer: Tokenizer | None = None) -> tuple[int, ...]:
    """The ids that end a text, by the target's config, its generation config and the tokenizer if one is given."""
    generation = target.checkpoint.read_optional_json("generation_config.json") or {}
    eos = tokenizer.eos_token_id if tokenizer is not None else None
    ids = {*target.facts.eos_token_ids, *read_token_ids(generation.get("eos_token_id")), *read_token_ids(eos)}
    return tuple(sorted(ids))
