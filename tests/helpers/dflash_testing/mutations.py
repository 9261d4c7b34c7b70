"""Random faults for checkpoints: in bytes, JSON values, tensors, offsets, shard names, links and kinds of files."""

import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_testing import checkpoints as support

Files = dict[str, bytes]
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
KEYS = (
    "hidden_size",
    "block_size",
    "target_layer_ids",
    "layer_types",
    "rope_theta",
    "architectures",
    "dtype",
    "causal",
)
HUGE_HEADER = 100_000_000


@dataclass
class Spoiled:
    """A checkpoint in memory while faults are put in. `links` are made after the files are written."""

    files: Files
    links: dict[str, str] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    pipes: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.mkdir(parents=True)
        for name, data in self.files.items():
            if name not in (*self.links, *self.directories, *self.pipes):
                (path / name).write_bytes(data)
        for name, size in self.sizes.items():
            if (path / name).is_file():
                os.truncate(path / name, size)
        for name, target in self.links.items():
            (path / name).symlink_to(target)
        for name in self.directories:
            if not os.path.lexists(path / name):
                (path / name).mkdir()
        for name in set(self.pipes) - self.links.keys() - set(self.directories):
            if not os.path.lexists(path / name):
                os.mkfifo(path / name)


Mutation = Callable[[Spoiled, random.Random], None]


def bases(home: Path) -> list[Files]:
    """Sound checkpoints of every layout."""
    windowed = replace(support.SMALL, windows=(16, None))
    made = [
        support.make_native(home / "native"),
        support.make_native(home / "windowed", windowed),
        support.make_speculators(home / "speculators"),
        support.make_speculators(home / "reduced", support.REDUCED),
        support.write_sharded(home / "sharded", support.native_config(), support.body_arrays(), 3),
    ]
    return [{item.name: item.read_bytes() for item in path.iterdir()} for path in made]


def spoil(files: Files, generator: random.Random) -> Spoiled:
    """One to three faults."""
    spoiled = Spoiled(dict(files))
    for _ in range(generator.choice((1, 1, 1, 2, 3))):
        mutation = generator.choice(MUTATIONS)
        mutation(spoiled, generator)
        spoiled.kinds.append(mutation.__name__)
    return spoiled


def junk(generator: random.Random) -> Any:
    """A JSON value of a type, or a size, that nobody expects. Text in angle brackets is written without quotes."""
    return generator.choice(
        (
            None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 3.5, -0.0, 1e308, "", "x", "full_attention",
            "\ud800", "a\nerror: forged\x1b[2J\u202e",
            "../../etc", "\0", [], {}, [[]], [None], [1, 2, 3], ["0"], [1e9] * 5, {"a": {"b": {}}},
            list(range(2000)), "y" * 5000, "<NaN>", "<Infinity>", "<-Infinity>", "<1e999>", "<" + "9" * 5000 + ">",
            "<" + "[" * 100_000 + ">", "<" + "[" * 3000 + "]" * 3000 + ">",
            "<" + '{"a":' * 2000 + "1" + "}" * 2000 + ">",
        )
    )  # fmt: skip


def flip_bytes(spoiled: Spoiled, generator: random.Random) -> None:
    name = pick_file(spoiled, generator)
    data = bytearray(spoiled.files[name])
    for _ in range(generator.choice((1, 1, 4, 64))):
        if data:
            data[generator.randrange(min(len(data), generator.choice((64, 4096, len(data)))))] = generator.randrange(
                256
            )
    spoiled.files[name] = bytes(data)


def cut_bytes(spoiled: Spoiled, generator: random.Random) -> None:
    name = pick_file(spoiled, generator)
    spoiled.files[name] = spoiled.files[name][: generator.randrange(len(spoiled.files[name]) + 1)]


def insert_bytes(spoiled: Spoiled, generator: random.Random) -> None:
    name = pick_file(spoiled, generator)
    data, place = spoiled.files[name], generator.randrange(len(spoiled.files[name]) + 1)
    spoiled.files[name] = data[:place] + generator.randbytes(generator.choice((1, 8, 300))) + data[place:]


def replace_value(spoiled: Spoiled, generator: random.Random) -> None:
    name = pick_json(spoiled, generator)
    document = load(spoiled, name)
    if document is not None:
        container, key = pick_place(document, generator)
        container[key] = junk(generator)
        store(spoiled, name, document)


def remove_or_add_key(spoiled: Spoiled, generator: random.Random) -> None:
    name = pick_json(spoiled, generator)
    document = load(spoiled, name)
    if document is None:
        return
    container, key = pick_place(document, generator)
    if generator.random() < 0.6:
        del container[key]
    elif isinstance(container, dict):
        container[generator.choice((*KEYS, "quantization_config", "auto_map", "markov_rank", "use_swa"))] = junk(
            generator
        )
    store(spoiled, name, document)


def repeat_key(spoiled: Spoiled, generator: random.Random) -> None:
    name = pick_json(spoiled, generator)
    text = spoiled.files[name]
    key = generator.choice(KEYS).encode()
    spoiled.files[name] = text.replace(b"{", b'{"' + key + b'": 1, "' + key + b'": 2, ', 1)


def change_entry(spoiled: Spoiled, generator: random.Random) -> None:
    """A tensor's shape, type or offsets: overlapping, out of range, or of another type altogether."""

    def change(header: dict[str, Any]) -> None:
        name = generator.choice(list(header))
        entry = header[name] if isinstance(header[name], dict) else {}
        key = generator.choice(("dtype", "shape", "data_offsets"))
        stated = entry.get("data_offsets")
        is_pair = isinstance(stated, list) and len(stated) == 2 and all(isinstance(item, int) for item in stated)
        offsets: Any = stated if is_pair else [0, 4]
        entry[key] = generator.choice(
            (junk(generator), offsets[::-1], [offsets[0] + 1, offsets[1] + 1], [0, offsets[1]], [2**62, 2**62 + 4],
             [2**31, 2**31, 2**31], [0], [-1, 4], "F16", "F64", "Q9")
        )  # fmt: skip
        header[name] = entry

    edit_header(spoiled, generator, change)


def change_tensors(spoiled: Spoiled, generator: random.Random) -> None:
    """Remove, rename or add a tensor."""

    def change(header: dict[str, Any]) -> None:
        names = [name for name in header if name != "__metadata__"]
        name = generator.choice(names)
        entry = header[name]
        if generator.random() < 0.7:
            del header[name]
        if generator.random() < 0.7:
            header[
                generator.choice(("lm_head.weight", "model." + name, "d2t", "x" * 300, "layers.99999999999.a", ""))
            ] = entry

    edit_header(spoiled, generator, change)


def change_length(spoiled: Spoiled, generator: random.Random) -> None:
    name = pick_weights(spoiled, generator)
    length = generator.choice((0, 1, 2, 7, 2**31, 2**63, 2**64 - 1, HUGE_HEADER, HUGE_HEADER + 1))
    spoiled.files[name] = struct.pack("<Q", length) + spoiled.files[name][8:]
    if length in (2, 7) or generator.random() < 0.5:
        return
    if length == HUGE_HEADER:
        spoiled.sizes[name] = HUGE_HEADER + generator.choice((8, 9, 5000))


def spoil_index(spoiled: Spoiled, generator: random.Random) -> None:
    shard = generator.choice(
        ("../elsewhere/model.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "\0", "x" * 400)
    )
    names = [f"layers.{index}.w" for index in range(generator.choice((1, 20)))]
    weight_map = {name: generator.choice((shard, WEIGHTS)) for name in names}
    if generator.random() < 0.05:
        weight_map = {f"t{index}": f"model-{index:06d}.safetensors" for index in range(100_000)}
    document = generator.choice(
        (
            {"weight_map": weight_map},
            {"weight_map": weight_map, "metadata": junk(generator)},
            {"weight_map": junk(generator)},
        )
    )
    store(spoiled, INDEX, document)


def make_link(spoiled: Spoiled, generator: random.Random) -> None:
    name = generator.choice([*spoiled.files, "tokenizer_config.json", INDEX])
    outside = generator.choice(
        ("../elsewhere/" + (CONFIG if name.endswith(".json") else WEIGHTS), "/etc/passwd", "/dev/zero")
    )
    spoiled.links[name] = generator.choice((outside, outside, name, "nowhere", "."))


def make_pipe(spoiled: Spoiled, generator: random.Random) -> None:
    """A named pipe: whoever opens it to read waits for a writer that never comes."""
    name = generator.choice([*spoiled.files, INDEX])
    if name not in spoiled.links and name not in spoiled.directories:
        spoiled.pipes.append(name)


def make_directory(spoiled: Spoiled, generator: random.Random) -> None:
    name = generator.choice([*spoiled.files, INDEX])
    if name not in spoiled.links:
        spoiled.directories.append(name)


def remove_file(spoiled: Spoiled, generator: random.Random) -> None:
    del spoiled.files[pick_file(spoiled, generator)]
    spoiled.files.setdefault("README.md", b"")


def add_file(spoiled: Spoiled, generator: random.Random) -> None:
    name = generator.choice(("pytorch_model.bin", "other.safetensors", "mask_embedding.pt", "draft.gguf", INDEX))
    spoiled.files[name] = generator.choice((b"", b"{}", b"GGUF" + b"\0" * 20, generator.randbytes(40)))


def repeat_tensor(spoiled: Spoiled, generator: random.Random) -> None:
    """A tensor of one shard in another, or a shard under another's name."""
    shards = [name for name in spoiled.files if name.endswith(".safetensors")]
    if len(shards) > 1:
        one, other = generator.sample(shards, 2)
        spoiled.files[one] = spoiled.files[other]


def spell_rope(spoiled: Spoiled, generator: random.Random) -> None:
    """Rope in two spellings, which agree or do not, or by layer type."""
    document = load(spoiled, CONFIG)
    if document is None:
        return
    body = document.get("transformer_layer_config")
    body = body if isinstance(body, dict) else document
    for key in generator.sample(("rope_scaling", "rope_parameters"), generator.choice((1, 2))):
        rope: Any = {
            "rope_type": generator.choice(("yarn", "linear", "llama3", "default", None, 7)),
            "factor": generator.choice((4.0, 16.0, "4", junk(generator))),
            "original_max_position_embeddings": generator.choice((64, 128, None)),
            "rope_theta": generator.choice((1e6, 1e4, None)),
        }
        body[key] = generator.choice((rope, {"full_attention": rope, "sliding_attention": rope}, [rope]))
    store(spoiled, CONFIG, document)


def set_style(spoiled: Spoiled, generator: random.Random) -> None:
    """A key that changes what weights mean, at one level or the other."""
    document = load(spoiled, CONFIG)
    if document is None:
        return
    nested = document.get("dflash_config")
    place = nested if isinstance(nested, dict) and generator.random() < 0.5 else document
    key = generator.choice(("use_gemma_norm", "is_neox_style", "rope_is_neox_style", "use_swa", "is_causal"))
    place[key] = generator.choice((True, False, None, junk(generator)))
    store(spoiled, CONFIG, document)


def mark_bytes(spoiled: Spoiled, generator: random.Random) -> None:
    """A byte order mark, or another encoding altogether."""
    name = pick_json(spoiled, generator)
    data = spoiled.files[name]
    other = data.decode("utf-8", "replace").encode("utf-16", "replace")
    spoiled.files[name] = generator.choice((b"\xef\xbb\xbf" + data, b"\xff\xfe" + data, other))


def add_pickle(spoiled: Spoiled, generator: random.Random) -> None:
    """A mask embedding that torch could have written, damaged or not, or a manifest of a conversion."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        value = generator.choice((b"\x80\x02}q\x00.", b"\x80\x02cposix\nsystem\n.", generator.randbytes(30), b""))
        archive.writestr("a/data.pkl", value)
        archive.writestr("a/data/0", generator.randbytes(64))
    data = bytearray(stream.getvalue())
    for _ in range(generator.choice((0, 1, 5))):
        data[generator.randrange(len(data))] = generator.randrange(256)
    spoiled.files[generator.choice(("mask_embedding.pt", "mask_embedding.safetensors"))] = bytes(data)
    if generator.random() < 0.3:
        spoiled.files["conversion.json"] = generator.choice((b'{"tool": "dflash"}', b"{}", b"[]", b"{"))


MUTATIONS: tuple[Mutation, ...] = (
    flip_bytes, cut_bytes, insert_bytes, replace_value, replace_value, replace_value, remove_or_add_key, repeat_key,
    change_entry, change_entry, change_tensors, change_length, spoil_index, make_link, make_pipe, make_directory,
    remove_file, add_file, repeat_tensor, spell_rope, set_style, mark_bytes, add_pickle,
)  # fmt: skip


def pick_file(spoiled: Spoiled, generator: random.Random) -> str:
    return generator.choice(list(spoiled.files))


def pick_weights(spoiled: Spoiled, generator: random.Random) -> str:
    names = [name for name in spoiled.files if name.endswith(".safetensors")]
    if not names:
        spoiled.files[WEIGHTS] = struct.pack("<Q", 2) + b"{}"
        names = [WEIGHTS]
    return generator.choice(names)


def pick_json(spoiled: Spoiled, generator: random.Random) -> str:
    names = [name for name in spoiled.files if name.endswith(".json")]
    if not names:
        spoiled.files[CONFIG] = b"{}"
        names = [CONFIG]
    return generator.choice(names)


def pick_place(document: dict[str, Any], generator: random.Random) -> tuple[Any, Any]:
    """A container somewhere in a document, and one of its keys."""
    container: Any = document
    while True:
        keys = list(container) if isinstance(container, dict) else list(range(len(container)))
        key = generator.choice(keys)
        inner = container[key]
        if not isinstance(inner, dict | list) or not inner or generator.random() < 0.4:
            return container, key
        container = inner


def load(spoiled: Spoiled, name: str) -> dict[str, Any] | None:
    """A file's JSON object, where it still is one that is not empty."""
    try:
        document = json.loads(spoiled.files.get(name, b""))
        json.dumps(document)  # deeper than Python writes: left as it is
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and document else None


def store(spoiled: Spoiled, name: str, document: Any) -> None:
    spoiled.files[name] = unquoted(json.dumps(document)).encode("utf-8", "surrogatepass")


def unquoted(text: str) -> str:
    """Write what stands in angle brackets as it is: numbers and nesting that a JSON writer would refuse."""
    parts = text.split('"<')
    return parts[0] + "".join(part.replace('>"', "", 1).replace('\\"', '"') for part in parts[1:])


def edit_header(spoiled: Spoiled, generator: random.Random, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of one safetensors file, where it can still be read."""
    name = pick_weights(spoiled, generator)
    data = spoiled.files[name]
    if len(data) < 8:
        return
    (length,) = struct.unpack("<Q", data[:8])
    try:
        header = json.loads(data[8 : 8 + length])
    except (ValueError, RecursionError, OverflowError):
        return
    if not isinstance(header, dict) or not [key for key in header if key != "__metadata__"]:
        return
    change(header)
    text = unquoted(json.dumps(header)).encode("utf-8", "surrogatepass")
    spoiled.files[name] = struct.pack("<Q", len(text)) + text + data[8 + length :]
