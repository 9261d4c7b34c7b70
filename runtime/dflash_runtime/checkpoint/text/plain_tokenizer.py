"""Read a plain `tokenizer.json` without transformers: importing transformers takes a second or more.

transformers chooses a class by `tokenizer_config.json` and `config.json`. Most classes take `tokenizer.json` as it is;
some build parts of the tokenizer anew. A tokenizer is read here only if both ways give the same tokenizer in every
release. transformers reads all others.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.stored.digests import digest_value
from dflash_runtime.read_files import read_all

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"

FILES_WITH_AN_EFFECT = ("additional_chat_templates", "tekken.json")
FILES_OF_OLD_RELEASES = ("added_tokens.json", "special_tokens_map.json")
"""Files that count only if the settings do not list the added tokens."""

WITHOUT_EFFECT = frozenset({
    "clean_up_tokenization_spaces", "errors", "is_local", "legacy", "local_files_only", "max_length",
    "model_input_names", "model_max_length", "name_or_path", "pad_to_multiple_of", "pad_token_type_id",
    "processor_class", "stride", "truncation_strategy", "use_default_system_prompt",
})  # fmt: skip
"""Settings that change neither ids nor texts."""

WITHOUT_EFFECT_IF_UNSET = frozenset({"add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"})
WITHOUT_EFFECT_IF_USUAL = {
    "backend": ("tokenizers", None), "padding_side": ("left", "right"), "truncation_side": ("left", "right")
}  # fmt: skip
READ_HERE = frozenset({
    "added_tokens_decoder", "additional_special_tokens", "chat_template", "extra_special_tokens", "tokenizer_class"
})  # fmt: skip

TAKES_THE_FILE = ("PreTrainedTokenizerFast", "TokenizersBackend")
OVERRULED = {
    "hyperclovax_vision_v2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen4_exp": "Qwen3_5Tokenizer",
    "siglip2": "Siglip2Tokenizer",
}
"""Model types for which transformers chooses a class whatever the settings name."""

REBUILT = {"Qwen2Tokenizer": "cc6784937b270bb4", "Qwen3_5Tokenizer": "7319ee515db28d54"}
"""Classes that build normalizer, pre-tokenizer, model and decoder anew -> `pipeline_digest` of these parts."""

NAMED_BY_REBUILT = ("unk_token", "eos_token", "pad_token")
"""Special tokens that these classes name if the settings do not state them."""


class NotPlain(Exception):
    """Only transformers can read this tokenizer."""


@dataclass(frozen=True, slots=True)
class PlainTokenizer:
    """A tokenizer of the tokenizers library. `special_tokens` maps names such as `eos_token` to texts."""

    _library: Any
    special_tokens: Mapping[str, str]
    chat_template: Any

    @property
    def library_json(self) -> str:
        """The tokenizer as the tokenizers library writes it."""
        return str(self._library.to_str())

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a text, if the settings name one."""
        text = self.special_tokens.get("eos_token")
        return None if text is None else self._library.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, with the tokens around it that the post-processor adds, or without them."""
        return list(self._library.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, without special tokens."""
        return str(self._library.decode(token_ids, skip_special_tokens=True))

    def renders(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> bool:
        """Whether a conversation can be rendered without transformers."""
        from dflash_runtime.checkpoint.text.chat_template import is_rendered_here

        return is_rendered_here(self._template, messages, options)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The text of a conversation that ends where the assistant answers."""
        from dflash_runtime.checkpoint.text.chat_template import render_template

        return render_template(self._template, messages, {**self.special_tokens, **options})

    @property
    def _template(self) -> Any:
        """The template of conversations without tools."""
        return self.chat_template.get("default") if isinstance(self.chat_template, dict) else self.chat_template


def read_plain_tokenizer(path: Path) -> PlainTokenizer | None:
    """The tokenizer in a folder, or None if only transformers can read it, or say what is wrong with it."""
    try:
        return _read(path)
    except ImportError:
        raise
    except Exception:  # the tokenizers library raises Exception itself for a malformed file
        return None


def _read(path: Path) -> PlainTokenizer:
    from tokenizers import Tokenizer

    settings, config = (json.loads(read_all(path / name)) for name in (SETTINGS, "config.json"))
    data = read_all(path / TOKENIZER)
    _check_settings(settings)
    _check_files(path, "added_tokens_decoder" in settings)
    library = Tokenizer.from_buffer(data)
    library.no_truncation()
    library.no_padding()
    _check_class(settings, config, data)
    named = _named_tokens(settings)
    _check_tokens(library, settings.get("added_tokens_decoder"), [*named.values(), *_extra_tokens(settings)])
    return PlainTokenizer(library, named, _read_template(path, settings.get("chat_template")))


def _require(condition: bool) -> None:
    if not condition:
        raise NotPlain


def _check_settings(settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        _require(
            key in WITHOUT_EFFECT | READ_HERE
            or (key in WITHOUT_EFFECT_IF_UNSET and not value)
            or value in WITHOUT_EFFECT_IF_USUAL.get(key, ())
            or (key.endswith("_token") and key not in WITHOUT_EFFECT_IF_UNSET)
        )


def _check_files(path: Path, lists_added_tokens: bool) -> None:
    names = FILES_WITH_AN_EFFECT if lists_added_tokens else FILES_WITH_AN_EFFECT + FILES_OF_OLD_RELEASES
    _require(not any((path / name).exists() for name in names))


def _check_class(settings: Mapping[str, Any], config: Mapping[str, Any], data: bytes) -> None:
    """Check that the class takes the file as it is, or builds the same tokenizer."""
    _require("model_name" not in config)
    name = settings["tokenizer_class"]
    names = {name, OVERRULED.get(config.get("model_type", ""), name)}
    rebuilt = {item.removesuffix("Fast") for item in names.difference(TAKES_THE_FILE)}
    if rebuilt:
        document = json.loads(data)
        _require({REBUILT.get(item) for item in rebuilt} == {pipeline_digest(document)})
        _require(_are_appended(document))
        _require(settings.keys() >= {*NAMED_BY_REBUILT})


def pipeline_digest(document: Mapping[str, Any]) -> str:
    """A hash of the parts of a `tokenizer.json` that decide ids and texts, without vocabulary and added tokens."""

    def without_offsets(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_offsets(item) for key, item in value.items() if key != "trim_offsets"}
        return list(map(without_offsets, value)) if isinstance(value, list) else value

    model = {key: item for key, item in document["model"].items() if item and key not in ("vocab", "merges")}
    parts = [document["normalizer"], document["pre_tokenizer"], document["decoder"]["type"], model]
    return digest_value(without_offsets(parts), 8)


def _are_appended(document: Mapping[str, Any]) -> bool:
    """Whether added tokens get their ids by being added to the vocabulary one after another."""
    vocabulary = document["model"]["vocab"]
    added = {item["content"]: item["id"] for item in document["added_tokens"]}
    new = sorted(number for text, number in added.items() if text not in vocabulary)
    own = all(vocabulary[text] == number for text, number in added.items() if text in vocabulary)
    return own and new == list(range(len(vocabulary), len(vocabulary) + len(new)))


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Names of special tokens, such as `eos_token` -> their texts."""
    extra = settings.get("extra_special_tokens")
    stated = {key: value for key, value in settings.items() if key.endswith("_token")}
    named = {**stated, **(extra if isinstance(extra, dict) else {})}
    return {
        key: _text(value) for key, value in named.items() if value is not None and key not in WITHOUT_EFFECT_IF_UNSET
    }


def _extra_tokens(settings: Mapping[str, Any]) -> Iterator[str]:
    extra, old = settings.get("extra_special_tokens"), settings.get("additional_special_tokens")
    _require(not (extra and old))
    yield from map(_text, [] if isinstance(extra, dict) else extra or old or [])


def _text(token: Any) -> str:
    """The text of a token that the settings state as a text or as a token with its options."""
    if isinstance(token, dict):
        _require(token.get("__type") == "AddedToken")
        token = token["content"]
    _require(isinstance(token, str))
    return str(token)


def _check_tokens(library: Any, listed: Mapping[str, Any] | None, special: Sequence[str]) -> None:
    """Check that the settings list the added tokens of the file, and that special tokens are among them."""
    from tokenizers import AddedToken

    own = library.get_added_tokens_decoder()
    if listed is not None:
        _require({int(key): repr(AddedToken(**item)) for key, item in listed.items()} == {
            key: repr(item) for key, item in own.items()
        })  # fmt: skip
    _require({*special} <= {item.content for item in own.values() if item.special})


def _read_template(path: Path, stated: Any) -> Any:
    file = path / "chat_template.jinja"
    if file.exists():
        return io.StringIO(read_all(file).decode(), newline=None).read()  # with the ends of lines as LF
    return {item["name"]: item["template"] for item in stated} if isinstance(stated, list) else stated
