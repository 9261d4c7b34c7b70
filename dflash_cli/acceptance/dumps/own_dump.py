"""Our own format: a folder with `manifest.json` and a safetensors file for each answer.

    manifest.json           what was dumped: target, taps, dtype, digests, settings; at the end how many tokens each has
    00012-0.safetensors     turn 0 of prompt row 12: `token_ids`, `hidden_states`, and in its metadata what it is

`token_ids` are the prompt, the answer, and `num_overhang` more that the target goes on with whatever it says, so that
the last blocks of an answer can be judged to their ends. `hidden_states` has the rows of prompt and answer but for the
last token, which was never read. A file is there with all of its bytes or not at all, so a folder whose writer was
killed is a dump of what was finished.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_cli.acceptance.dumps.dump_format import DUMP_FORMATS, HIDDEN, TOKENS, Dump, DumpedText, check_ids_within
from dflash_cli.acceptance.dumps.tensor_file import expect_shape, read_shapes, read_tokens, rows_reader
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.strict_json import read_json
from dflash_runtime.errors import CheckpointError, UnsupportedError, UsageError
from dflash_runtime.json_values import is_int
from dflash_runtime.scheduling.request import FinishReason

MANIFEST = "manifest.json"
KIND = "dump"
DUMP_VERSION = 1
METADATA = "dflash"
"""Where a file's metadata says what it is."""

COUNTS = ("prompt_len", "answer_len", "num_overhang")


@DUMP_FORMATS.register("dflash")
class OwnDump:
    """What `dflash dump` writes."""

    def matches(self, path: Path) -> bool:
        """See `dump_format.DumpFormat`."""
        return (path / MANIFEST).is_file()

    def open(self, path: Path, layer_ids: Sequence[int] | None) -> Dump:
        """See `dump_format.DumpFormat`."""
        if layer_ids is not None:
            raise UsageError(f"{path}: says itself which layers it holds; leave out --dump-layer-ids")
        manifest = read_manifest(path)
        taps = tuple(manifest["taps"])
        size, vocab_size = manifest["hidden_size"], manifest["vocab_size"]
        files = sorted(path.glob("*.safetensors"))
        missing = sorted({item["file"] for item in manifest.get("requests", ())} - {file.name for file in files})
        if missing:
            raise CheckpointError(f"{MANIFEST} lists {missing[0]}, which is not there", path=path)
        return Dump(
            path=path,
            format="dflash",
            taps=taps,
            hidden_size=size,
            texts=tuple(read_text(file, (len(taps), size), vocab_size) for file in files),
            vocab_size=vocab_size,
            target=manifest["target"],
            ends_digest=manifest.get("ends_digest"),
            is_complete=manifest.get("is_complete") is True,
            prompts=manifest.get("prompts"),
            settings=manifest["settings"],
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a dump of ours.

    Raises:
        CheckpointError: it is none, or lacks what a reader needs.
        UnsupportedError: a later version than this release reads.
    """
    file = path / MANIFEST
    manifest = read_json(file)
    if manifest.get("kind") != KIND:
        raise CheckpointError(f"kind: found {manifest.get('kind')!r}, expected {KIND!r}", path=file)
    if manifest.get("schema_version") != DUMP_VERSION:
        found = manifest.get("schema_version")
        raise UnsupportedError(f"{file}: schema_version {found!r}, this release reads {DUMP_VERSION}")
    taps = manifest.get("taps")
    if not isinstance(taps, list) or not taps or not all(is_int(tap) for tap in taps):
        raise CheckpointError(f"taps: found {taps!r}, expected a list of layers", path=file)
    for name, kind in (("hidden_size", int), ("vocab_size", int), ("target", dict), ("settings", dict)):
        if not isinstance(manifest.get(name), kind):
            raise CheckpointError(f"{name}: missing, or not what it must be", path=file)
    return manifest


def read_text(file: Path, shape: tuple[int, int], vocab_size: int) -> DumpedText:
    """One answer; `shape` is that of one row's hidden states.

    Raises:
        CheckpointError: the file is cut off, or is not what its metadata says.
    """
    infos = read_shapes(file)
    token_ids, metadata = read_tokens(file)
    said = _read_metadata(metadata, file)
    prompt_len, answer_len, num_overhang = (said[name] for name in COUNTS)
    num_rows = prompt_len + answer_len - 1
    expect_shape(infos[TOKENS], (num_rows + 1 + num_overhang,))
    expect_shape(infos[HIDDEN], (num_rows, *shape))
    check_ids_within(token_ids, vocab_size, file)
    return DumpedText(
        row=PromptRow(**said["row"], where=file.name),
        turn=said["turn"],
        file=file,
        token_ids=token_ids,
        prompt_len=prompt_len,
        answer_len=answer_len,
        num_rows=num_rows,
        read=rows_reader(file),
        finish_reason=FinishReason(said["finish_reason"]),
    )


def _read_metadata(metadata: Mapping[str, str], file: Path) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(metadata[METADATA])
        PromptRow(**said["row"])
        FinishReason(said["finish_reason"])
        if not all(is_int(said[name]) for name in (*COUNTS, "turn")) or said["prompt_len"] < 1:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError("its metadata does not say what it is, as dflash dump writes it", path=file) from error
    return said


def row_fields(row: PromptRow) -> dict[str, Any]:
    """A prompt row as a file's metadata has it: without the place it came from, which is a path of the writer's."""
    return {name: getattr(row, name) for name in PromptRow.__dataclass_fields__ if name != "where"}


def text_digests(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Digests of a target's tokenizer and of its chat template, None where it has none."""
    import hashlib

    def digest(data: bytes | None) -> str | None:
        return None if data is None else hashlib.sha256(data).hexdigest()[:16]

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
    parts = [(checkpoint.path / name).read_bytes() for name in names if (checkpoint.path / name).is_file()]
    template = checkpoint.path / "chat_template.jinja"
    stated = (checkpoint.read_optional_json("tokenizer_config.json") or {}).get("chat_template")
    text = template.read_bytes() if template.is_file() else json.dumps(stated).encode() if stated else None
    return {"tokenizer_digest": digest(b"".join(parts) if parts else None), "template_digest": digest(text)}
