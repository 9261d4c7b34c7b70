"""Ids that may be the mask of a draft, from the tokens that the target's files name."""

from dflash_cli.rules.themes.target_identity import TOKENIZER_FILE, read_json, special_tokens
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.json_values import as_index, as_object, is_int

MAX_SPECIALS = 16


def find_specials(target: TargetSource) -> dict[int, str]:
    """Id -> name of the target's tokens that a trainer may have used as the mask, mask-like names first."""
    contents = _added_tokens(target.checkpoint)
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


def _added_tokens(checkpoint: Checkpoint) -> dict[int, str]:
    """Id -> text of special tokens, from tokenizer_config.json or else from tokenizer.json."""
    stated = {token: text for key, text in special_tokens(checkpoint).items() if (token := as_index(key)) is not None}
    listed = read_json(checkpoint, TOKENIZER_FILE).get("added_tokens") if not stated else None
    entries = [as_object(entry) for entry in listed] if isinstance(listed, list) else []
    found = stated or {entry["id"]: entry.get("content") for entry in entries if is_int(entry.get("id"))}
    return {token: text for token, text in found.items() if isinstance(text, str)}
