"""The byte-level tokenizer: train it, pack token streams, and save it for `AutoTokenizer`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .data import Module
from .settings import Settings

END = "<|endoftext|>"
MASK = "<|mask|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = [END, TURN_START, TURN_END, MASK, PAD]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(modules: Sequence[Module], settings: Settings) -> Tokenizer:
    """Train a byte-level BPE. All 256 bytes are in the vocabulary, so every string can be encoded and decoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_bytes(modules, settings.tokenizer_bytes), trainer)
    return tokenizer


def _first_bytes(modules: Sequence[Module], limit: int) -> Iterator[str]:
    total = 0
    for module in modules:
        if total >= limit:
            return
        total += len(module.text)
        yield module.text


def token_stream(tokenizer: Tokenizer, modules: Sequence[Module]) -> tuple[Tensor, dict[str, int]]:
    """All modules in a row, each followed by the end token -> ids [T] and token counts by source."""
    end = token_id(tokenizer, END)
    pieces: list[np.ndarray] = []
    counts: dict[str, int] = {}
    for start in range(0, len(modules), 512):
        group = modules[start : start + 512]
        encodings = tokenizer.encode_batch_fast([module.text for module in group])
        for module, encoding in zip(group, encodings, strict=True):
            pieces.append(np.array([*encoding.ids, end], dtype=np.int32))
            counts[module.source] = counts.get(module.source, 0) + len(encoding.ids)
    return torch.from_numpy(np.concatenate(pieces)), counts


def turning_points(tokenizer: Tokenizer) -> Tensor:
    """Mask [V] of tokens that neither continue a word nor end a line, so that another token could replace them."""
    space, line_end, tab = "\u0120", "\u010a", "\u0109"  # the byte-level alphabet encodes white space as letters

    def turns(token: str) -> bool:
        if token[0] == space:
            return token.strip(space) != ""
        return not token[0].isalnum() and token[0] not in (line_end, tab)

    names = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return torch.tensor([turns(token) for token, _ in names])


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return int(found)


def save_tokenizer(tokenizer: Tokenizer, folder: Path, settings: Settings) -> None:
    """Write the files that `AutoTokenizer.from_pretrained` reads, with the chat template."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        mask_token=MASK,
        additional_special_tokens=[TURN_START, TURN_END],
        model_max_length=settings.shape.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)
    # Recent releases save the name of a backend here. Old and new readers know this class.
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
