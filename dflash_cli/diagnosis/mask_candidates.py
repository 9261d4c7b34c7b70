"""Ids that may be the mask of a draft, from the tokens that the target's files name."""

from collections.abc import Iterator
from typing import Any

from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.json_values import is_int

MAX_SPECIALS = 16


def find_specials(target: TargetSource) -> dict[int, str]:
    """Id -> name of the target's tokens that a trainer may have used as the mask, mask-like names first."""
    tokenizer = target.checkpoint.read_optional_json("tokenizer_config.json") or {}
    contents = dict(_added_tokens(tokenizer.get("added_tokens_decoder"), target))
    found = {token: text for token, text in contents.items() if "mask" in text.lower()}
    config = target.checkpoint.config
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = config.get(key)
        for token in value if isinstance(value, list) else [value]:
            if is_int(token):
                found.setdefault(token, key.removesuffix("_token_id"))
    if contents:
        found.setdefault(max(contents) + 1, "after the last special token")
    return dict(list(found.items())[:MAX_SPECIALS])


def _added_tokens(entries: Any, target: TargetSource) -> Iterator[tuple[int, str]]:
    """(id, text) of special tokens, from tokenizer_config.json or else from tokenizer.json."""
    if isinstance(entries, dict):
        for key, entry in entries.items():
            if key.isdigit() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
                yield int(key), entry["content"]
        return
    listed = (target.checkpoint.read_optional_json("tokenizer.json") or {}).get("added_tokens")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str):
            yield entry["id"], entry["content"]
