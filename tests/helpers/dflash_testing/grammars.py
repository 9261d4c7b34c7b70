"""Tokenizers for random models, and LLMs that know a tokenizer, to run requests with grammars."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from dflash_runtime.checkpoint.text.tokenizer import Tokenizer
from dflash_runtime.drafts.token_masks import Matcher, ParserTokenizer
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.grammar import Grammar

STOP = "<stop>"

SCHEMA = {
    "type": "object",
    "x-guidance": {"whitespace_flexible": False},
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["function", "class", "module"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
"""A schema for which the bundled target finishes its answers within 40 tokens."""

JSON = Grammar("json_schema", json.dumps(SCHEMA))


@dataclass(frozen=True)
class LetterTokenizer:
    """One token per letter, then STOP, then unused tokens."""

    letters: str
    vocab_size: int

    @property
    def stop_id(self) -> int:
        return len(self.letters)

    @property
    def library_json(self) -> str:
        names = [*self.letters, STOP, *(f"<unused{index}>" for index in range(self.vocab_size - self.stop_id - 1))]
        special = [
            {"id": place, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for place, name in enumerate(names) if len(name) > 1
        ]  # fmt: skip
        model = {"type": "BPE", "vocab": {name: place for place, name in enumerate(names)}, "merges": []}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
        })  # fmt: skip

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self.letters[token] for token in token_ids if token < self.stop_id)


def with_tokenizer(llm: LLM, tokenizer: Any) -> LLM:
    """The same models and settings with a tokenizer."""
    return LLM(replace(llm.pair, tokenizer=cast(Tokenizer, tokenizer)))


def matcher(tokenizer: Any, grammar: Grammar, stop_ids: Sequence[int], vocab_size: int) -> Matcher:
    """A matcher at the beginning of an answer."""
    read = ParserTokenizer.read(tokenizer.library_json, vocab_size)
    return Matcher(read, read.parse(grammar), stop_ids)


def allowed_ids(at: Matcher) -> set[int]:
    """The ids that may come next."""
    bits = at.mask()
    assert bits is not None
    return {8 * place + bit for place, byte in enumerate(bits.tolist()) for bit in range(8) if byte >> bit & 1}
