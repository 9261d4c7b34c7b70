"""A tokenizer that is read here equals the one that transformers loads, or transformers loads it."""

import inspect
import json
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from transformers import TokenizersBackend
from transformers.models.auto import tokenization_auto
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.tokenizer import StreamDecoder
from dflash_runtime.checkpoint.text.chat_template import ARGUMENTS
from dflash_runtime.checkpoint.text.plain_tokenizer import (
    NAMED_BY_REBUILT,
    OVERRULED,
    REBUILT,
    TAKES_THE_FILE,
    pipeline_digest,
    read_plain_tokenizer,
)
from dflash_runtime.checkpoint.text.tokenizer import Tokenizer
from dflash_runtime.errors import RequestError

TEXTS = (
    "", " ", "Hello, world!", "  two  spaces \n\n\t", "naïve → 中文 🙂 e\u0301", "<s>text</s><|im_end|>x",
    "I'LL 123 4567",
    " <|im_start|> user", "don't\r\nstop", "a\u0300b<tool>c </tool>",
)  # fmt: skip
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hi <b>&</b> 'you'"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "中文"},
        {"role": "assistant", "content": ""},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "parts"}]}],
    [{"role": "user", "content": "x", "tool_calls": [{"name": "f", "arguments": {"a": [1, 2.5, None, True]}}]}],
)
TEMPLATE = """{%- set ns = namespace(last=0) -%}
{{ bos_token }}{% for message in messages %}
    {%- set ns.last = loop.index0 %}
{{ '<|im_start|>' ~ message.role }}
{% set text = message['content'] %}
{% if text is string %}{{ text | trim }}{% else %}{{ text | tojson(indent=2) }}{% endif %}
{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
{% if not loop.first %}{% continue %}{% endif %}<|im_end|>
{% endfor %}
{{ ns.last }}{{ dict(a=1) }}{{ dict.fromkeys([1]) }}{{ tools is none }}{{ documents }}{{ enable_thinking }}
{% if add_generation_prompt %}<|im_start|>assistant{{ eos_token }}{% endif %}
"""
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def byte_level() -> Library:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*alphabet, "he", "ll", "hell", "Ġt", "Ġth", "in", "user"])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t"), ("Ġt", "h"), ("i", "n")]
    library = Library(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return library


def with_beginning() -> Library:
    """As Llama 3: the post-processor adds the first token."""
    library = byte_level()
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 263)]),
    ])  # fmt: skip
    return library


def with_limits() -> Library:
    """A file that asks for padding and for truncation, which transformers switches off."""
    library = byte_level()
    library.add_special_tokens(["<pad>"])
    library.enable_padding(length=12, pad_id=263, pad_token="<pad>")
    library.enable_truncation(4)
    return library


def with_metaspace() -> Library:
    characters = {chr(code): code - 29 for code in range(32, 127)}
    library = Library(
        models.BPE(vocab={"<unk>": 0, "▁": 1, "▁t": 2, **characters}, merges=[("▁", "t")], unk_token="<unk>")
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1)
    ])  # fmt: skip
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    library.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True, special=False)])
    return library


def of_qwen() -> Library:
    library = byte_level()
    library.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    library.post_processor = processors.ByteLevel(trim_offsets=False)
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.add_tokens(["<tool>", "</tool>"])
    return library


PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None}
MADE: dict[str, tuple[Callable[[], Library], dict[str, Any]]] = {
    "byte level": (byte_level, PLAIN),
    "byte level, saved by release 5": (byte_level, {**PLAIN, "tokenizer_class": "TokenizersBackend"}),
    "first token": (with_beginning, {**PLAIN, "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}),
    "padding and truncation": (with_limits, {**PLAIN, "pad_token": "<pad>"}),
    "metaspace": (with_metaspace, {**PLAIN, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    "Qwen": (of_qwen, {
        "tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": None, "bos_token": None, "add_bos_token": False, "split_special_tokens": False,
        "additional_special_tokens": ["<|im_start|>"], "errors": "replace", "model_max_length": 131072,
    }),
    "names of its own": (of_qwen, {**PLAIN, "image_token": "<|im_start|>",
                                   "extra_special_tokens": {"audio_token": "<|im_end|>"}}),
}  # fmt: skip


def write(
    path: Path, library: Library, settings: Mapping[str, Any], template: str | None = TEMPLATE, kind: str = "qwen3"
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_text(library.to_str())
    (path / "tokenizer_config.json").write_text(json.dumps(dict(settings)))
    (path / "config.json").write_text(json.dumps({"model_type": kind}))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def hosted(path: Path) -> Tokenizer:
    """The tokenizer as transformers reads it."""
    tokenizer = Tokenizer(path)
    tokenizer.__dict__["_plain"] = None
    return tokenizer


def rendered(tokenizer: Tokenizer, chat: list[dict[str, Any]], options: Mapping[str, Any]) -> list[int] | str:
    """The ids of a conversation, or the id of the error with which it is refused."""
    try:
        return tokenizer.render(chat, where="0", options=options)
    except RequestError as error:
        return error.id


def assert_alike(path: Path) -> None:
    found, wanted = Tokenizer(path), hosted(path)
    assert found.eos_token_id == wanted.eos_token_id
    assert (found.has_template, found.template_digest) == (wanted.has_template, wanted.template_digest)
    for text in TEXTS:
        ids = wanted.encode(text)
        assert found.encode(text) == ids, text
        assert found.decode(ids) == wanted.decode(ids)
        pieces = [[decoder.push([token]) for token in ids] for decoder in (StreamDecoder(found), StreamDecoder(wanted))]
        assert pieces[0] == pieces[1]
    everything = list(range(300))
    assert found.decode(everything) == wanted.decode(everything)
    if found.has_template:
        for chat in CHATS:
            for options in ({}, {"enable_thinking": False, "bos_token": "!"}, {"tools": [{"name": "f"}]}):
                assert rendered(found, chat, options) == rendered(wanted, chat, options)


@pytest.mark.parametrize("name", MADE)
def test_made_tokenizers_are_read_here(tmp_path: Path, name: str) -> None:
    make, settings = MADE[name]
    path = write(tmp_path / "target", make(), settings)
    assert read_plain_tokenizer(path) is not None
    assert_alike(path)


def test_the_bundled_tokenizer_is_read_here() -> None:
    path = tiny_directory() / "target"
    assert read_plain_tokenizer(path) is not None
    assert_alike(path)


def test_added_tokens_may_be_listed_again(tmp_path: Path) -> None:
    library = of_qwen()
    listed = {
        str(key): {
            name: getattr(item, name)
            for name in ("content", "lstrip", "rstrip", "normalized", "single_word", "special")
        }
        for key, item in library.get_added_tokens_decoder().items()
    }
    make, settings = MADE["Qwen"]
    path = write(tmp_path / "same", make(), {**settings, "added_tokens_decoder": listed})
    (path / "special_tokens_map.json").write_text("{}")
    assert read_plain_tokenizer(path) is not None
    assert_alike(path)
    listed["300"] = {**listed["263"], "content": "<new>"}
    path = write(tmp_path / "more", make(), {**settings, "added_tokens_decoder": listed})
    assert read_plain_tokenizer(path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": None}, {"tokenizer_class": "LlamaTokenizer"}, {"eos_token": "<new>"},
        {"eos_token": "in"}, {"eos_token": {"content": "</s>"}}, {"add_bos_token": True},
        {"split_special_tokens": True}, {"add_prefix_space": True}, {"fix_mistral_regex": True},
        {"auto_map": {"AutoTokenizer": [None, "a.B"]}},
        {"extra_special_tokens": ["<new>"]}, {"extra_special_tokens": ["</s>"], "additional_special_tokens": ["<s>"]},
        {"backend": "sentencepiece"}, {"a_new_key": 1},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_change_the_tokenizer_are_left_to_transformers(tmp_path: Path, change: dict[str, Any]) -> None:
    make, settings = MADE["first token"]
    path = write(tmp_path / "target", make(), {**settings, **change})
    assert read_plain_tokenizer(path) is None


def test_files_that_change_the_tokenizer_are_left_to_transformers(tmp_path: Path) -> None:
    make, settings = MADE["first token"]
    path = write(tmp_path / "target", make(), settings)
    assert read_plain_tokenizer(path) is not None
    for name in ("special_tokens_map.json", "added_tokens.json", "tekken.json"):
        (path / name).write_text("{}")
        assert read_plain_tokenizer(path) is None, name
        (path / name).unlink()
    (path / "additional_chat_templates").mkdir()
    assert read_plain_tokenizer(path) is None
    (path / "additional_chat_templates").rmdir()
    (path / "tokenizer.json").write_text("{")
    assert read_plain_tokenizer(path) is None


def test_a_class_that_builds_another_tokenizer_is_left_to_transformers(tmp_path: Path) -> None:
    _, settings = MADE["Qwen"]
    changes: list[Callable[[Library], object]] = [
        lambda item: setattr(item, "normalizer", normalizers.NFKC()),
        lambda item: setattr(item, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        lambda item: setattr(item, "decoder", decoders.Fuse()),
        lambda item: setattr(item, "model", models.BPE(vocab={"a": 0}, merges=[], byte_fallback=True)),
    ]
    for number, change in enumerate(changes):
        library = of_qwen()
        change(library)
        assert read_plain_tokenizer(write(tmp_path / str(number), library, settings)) is None, number
    document = json.loads(of_qwen().to_str())
    document["added_tokens"][-1]["id"] += 7
    path = write(tmp_path / "gap", of_qwen(), settings)
    assert read_plain_tokenizer(path) is not None
    (path / "tokenizer.json").write_text(json.dumps(document))
    assert read_plain_tokenizer(path) is None
    for key in NAMED_BY_REBUILT:
        stated = {name: value for name, value in settings.items() if name != key}
        assert read_plain_tokenizer(write(tmp_path / key, of_qwen(), stated)) is None, key
    for kind in OVERRULED.keys() - {"qwen2"}:
        assert read_plain_tokenizer(write(tmp_path / kind, of_qwen(), settings, kind=kind)) is None, kind


def test_classes_build_what_is_remembered_of_them() -> None:
    """A failure means that a release of transformers changed a class: look what it builds, then change the digest."""
    for name, digest in REBUILT.items():
        kind: Any = tokenization_auto.tokenizer_class_from_name(name)
        library = kind(vocab={"a": 0, "<|endoftext|>": 1}, merges=[]).backend_tokenizer
        assert pipeline_digest(json.loads(library.to_str())) == digest, name


def test_model_types_that_overrule_the_settings_are_known() -> None:
    """A failure means that a release of transformers added a type to its list of wrong settings."""
    names = {*TAKES_THE_FILE, "PythonBackend", "MistralCommonBackend"}
    found = {
        kind: name.removesuffix("Fast")
        for kind in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        if (name := tokenization_auto.TOKENIZER_MAPPING_NAMES.get(kind)) and name not in names
    }
    assert found.items() <= OVERRULED.items()


def test_arguments_of_transformers_are_not_given_to_the_template() -> None:
    names = inspect.signature(TokenizersBackend.apply_chat_template).parameters.keys() - {"self", "kwargs"}
    assert names <= ARGUMENTS


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}", "{{ messages.append(1) }}", "{{ messages[0].update({}) }}", "{{ lipsum }}",
        "{{ cycler.__init__.__globals__ }}", "{{ self._TemplateReference__context }}", "{{ dict.__base__ }}",
        "{% set x = namespace.check %}{{ x }}", "{% include 'x' %}", "{% break %}", "{% if %}",
        "{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ missing.x }}",
        "{{ strftime_now('%Y') }}{{ strftime_now(format='%%') }}", "{{ messages | tojson(sort_keys=true) }}",
        "{{ '%s' | format(1) }}{{ '{0.__class__}'.format(1) }}", "{% generation %}a{% endgeneration %}b",
        "{{ {'é': '<'} | tojson }}{{ [1] | tojson(separators=(',', ':')) }}",
        "{% for k, v in message.items() %}{% endfor %}",
    ],
)  # fmt: skip
def test_hostile_and_wrong_templates_end_alike(tmp_path: Path, template: str) -> None:
    path = write(tmp_path / "target", byte_level(), PLAIN, template)
    assert read_plain_tokenizer(path) is not None
    assert end(Tokenizer(path)) == end(hosted(path))


def end(tokenizer: Tokenizer) -> Any:
    """The ids of a conversation, or the kind of error that ends it."""
    try:
        return tokenizer.render([{"role": "user", "content": "x"}], where="0")
    except RequestError as error:
        return getattr(error.__cause__, "kind", None) or type(error.__cause__).__name__
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% set ns = namespace() %}{% set ns.__x = 1 %}", "SecurityError"),
        ("{{ namespace(_a=1) }}", "SecurityError"),
        ("{{ namespace({'__a': 1}) }}", "SecurityError"),
        ("{{ dict.mro() }}", "UndefinedError"),
        ("{{ dict.popitem }}", []),
    ],
)
def test_templates_never_reach_attributes_of_python(tmp_path: Path, template: str, expected: Any) -> None:
    """Some releases of transformers allow these."""
    assert end(Tokenizer(write(tmp_path / "target", byte_level(), PLAIN, template))) == expected


@pytest.mark.parametrize(
    ("chat", "options"),
    [
        ([], {}),
        ([{"role": "user", "content": None}], {}),
        ([{"role": "user", "content": "x", "thinking": "y"}], {}),
        ([{"role": "user", "content": ("a", "b")}], {}),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}),
        ([{"role": "user", "content": "x"}], {"tokenize": True}),
        ([{"role": "user", "content": "x"}], {"messages": []}),
        ([{"role": "user", "content": "x"}], {"chat_template": "{{ 1 }}"}),
    ],
    ids=str,
)
def test_other_conversations_are_left_to_transformers(
    tmp_path: Path, chat: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    path = write(tmp_path / "target", byte_level(), PLAIN, "{{ messages }}{{ messages[0].thinking }}")
    plain = read_plain_tokenizer(path)
    assert plain is not None
    assert not plain.renders(chat, options)
    assert rendered(Tokenizer(path), chat, options) == rendered(hosted(path), chat, options)


def test_several_templates_are_read(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "{{ messages[0].content }}"}, {"name": "tool_use", "template": "t"}]
    path = write(tmp_path / "list", byte_level(), {**PLAIN, "chat_template": templates}, None)
    assert_alike(path)
    path = write(tmp_path / "no default", byte_level(), {**PLAIN, "chat_template": templates[1:]}, None)
    assert_alike(path)
    path = write(tmp_path / "both", byte_level(), {**PLAIN, "chat_template": templates}, "file\r\n{{ messages }}\n")
    assert_alike(path)


def test_transformers_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, settings = MADE["Qwen"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = Tokenizer(write(tmp_path / "target", make(), settings))
    assert tokenizer.decode(tokenizer.render(CHATS[0], where="0"))
    with pytest.raises(ImportError):
        tokenizer.render([], where="0")


def changed(generator: random.Random) -> tuple[Library, dict[str, Any], str]:
    """A tokenizer and settings with a few random changes."""
    make, settings = MADE[generator.choice([*MADE])]
    library, settings = make(), dict(settings)
    texts = ["<s>", "</s>", "<|im_end|>", "<tool>", "in", "he", "<new>", None, ""]
    for _ in range(generator.randrange(4)):
        match generator.randrange(6):
            case 0:
                settings[generator.choice(["bos_token", "eos_token", "pad_token", "image_token"])] = generator.choice(
                    texts
                )
            case 1:
                chosen = {flag: generator.random() < 0.3 for flag in FLAGS}
                library.add_tokens([AddedToken(str(generator.choice(texts)), **chosen)])
            case 2:
                listed = {str(key): {"content": item.content, **{flag: getattr(item, flag) for flag in FLAGS}}
                          for key, item in library.get_added_tokens_decoder().items()}  # fmt: skip
                for item in listed.values():
                    if generator.random() < 0.1:
                        flag = generator.choice(FLAGS)
                        item[flag] = not item[flag]
                settings["added_tokens_decoder"] = listed
            case 3:
                key = generator.choice(["extra_special_tokens", "additional_special_tokens"])
                settings[key] = [item for item in generator.sample(texts, 2) if item]
            case 4:
                settings["tokenizer_class"] = generator.choice([*TAKES_THE_FILE, "Qwen2Tokenizer", "GPT2Tokenizer"])
            case 5:
                key = generator.choice(["add_bos_token", "add_eos_token", "add_prefix_space", "split_special_tokens"])
                settings[key] = generator.random() < 0.3
    return library, settings, generator.choice(["qwen3", "llama", "qwen2", "mistral", "gpt_oss", "gemma3_text"])


def assert_changed_alike(tmp_path: Path, seeds: range) -> int:
    num_read = 0
    for seed in seeds:
        library, settings, kind = changed(random.Random(seed))
        path = write(tmp_path / str(seed), library, settings, "{{ bos_token }}{{ eos_token }}{{ image_token }}", kind)
        if read_plain_tokenizer(path) is not None:
            num_read += 1
            assert_alike(path)
    return num_read


def test_changed_tokenizers_are_alike_or_left_to_transformers(tmp_path: Path) -> None:
    assert 3 <= assert_changed_alike(tmp_path, range(8)) < 8


@pytest.mark.slow
def test_many_changed_tokenizers_are_alike_or_left_to_transformers(tmp_path: Path) -> None:
    assert assert_changed_alike(tmp_path, range(1000)) > 200
