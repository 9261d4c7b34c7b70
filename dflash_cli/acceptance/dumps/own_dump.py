"""Our own dump format: a folder with `manifest.json` and a safetensors file for each answer.

    manifest.json           target, taps, dtype, digests and settings; after the end of a run also each answer's length
    00012-0.safetensors     turn 0 of prompt row 12: `token_ids`, `hidden_states`, and facts about it in its metadata

`token_ids` are the prompt, the answer, and `num_overhang` further tokens of the target, so that the last blocks of an
answer can be judged completely. `hidden_states` has the rows of prompt and answer except for the last token, which the
target never read. Files appear complete or not at all, so the folder of a killed run is a valid dump of its answers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from dflash_cli.acceptance.dumps.dump_format import (
    DUMP_FORMATS,
    HIDDEN,
    TOKENS,
    Dump,
    DumpedText,
    TextFacts,
    check_ids_within,
)
from dflash_cli.acceptance.dumps.tensor_file import expect_shape, read_shapes, read_tokens, rows_reader
from dflash_cli.checkpoints.checkpoint_identity import Identity
from dflash_cli.documents.reading import read_document
from dflash_cli.generation.prompt_source import Failure, PromptSource
from dflash_cli.generation.run_facts import PairRun
from dflash_runtime.checkpoint.stored.digests import digest_text
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.strict_json import read_json
from dflash_runtime.documents import NOT_REQUIRED, OPTIONAL, Limits, fields_of, from_json
from dflash_runtime.errors import MISSING, CheckpointError, InvalidConfig, UsageError
from dflash_runtime.read_files import read_all

MANIFEST = "manifest.json"
METADATA = "dflash"
"""Key of a file's metadata that holds its facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedRequest:
    """One answer of a dump, and its file."""

    file: str
    index: int
    turn: int
    prompt_len: int
    answer_len: int
    num_tokens: Annotated[int, "including the overhang"]
    sha256: Annotated[str | None, NOT_REQUIRED, "of the file; null in manifests of earlier releases"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpManifest:
    """`manifest.json` of a dump; `dflash dump --json` prints it with the prompts that failed."""

    KIND: ClassVar[str] = "dump"

    is_complete: Annotated[bool, "whether every prompt was answered"] = False
    taps: tuple[Annotated[int, Limits(least=0)], ...]
    taps_convention: str
    dtype: str
    hidden_size: Annotated[int, Limits(least=1)]
    vocab_size: Annotated[int, Limits(least=1)]
    target: Identity
    ends_digest: Annotated[str | None, "hash of some rows of the target's embedding and head"] = None
    tokenizer_digest: str | None = None
    template_digest: str | None = None
    settings: Annotated[Mapping[str, Any], "everything that decides a text; --resume compares it"]
    prompts: PromptSource | None = None
    measured: PairRun
    requests: Annotated[tuple[DumpedRequest, ...] | None, OPTIONAL] = None
    failed: Annotated[tuple[Failure, ...] | None, OPTIONAL] = None

    def __post_init__(self) -> None:
        if not self.taps:
            raise InvalidConfig("taps", [], "one layer or more")


@DUMP_FORMATS.register("dflash")
class OwnDump:
    """The format of `dflash dump`."""

    def matches(self, path: Path) -> bool:
        return (path / MANIFEST).is_file()

    def open(self, path: Path, layer_ids: Sequence[int] | None) -> Dump:
        if layer_ids is not None:
            raise UsageError(
                f"{path}: the dump states its layers; leave out --dump-layer-ids",
                id="dump-layer-ids-stated",
                field="--dump-layer-ids",
                found=layer_ids,
            )
        manifest = read_manifest(path)
        files = sorted(path.glob("*.safetensors"))
        listed = {item.file: item.sha256 for item in manifest.requests or ()}
        names = [file.name for file in files]
        missing = sorted(listed.keys() - {*names})
        if missing:
            raise CheckpointError(
                f"{MANIFEST} lists {missing[0]}, but the file is missing", id="missing-file", path=path
            )
        unlisted = [name for name in names if name not in listed]
        if unlisted and manifest.requests is not None:
            raise CheckpointError(f"{MANIFEST} does not list {unlisted[0]}", id="unlisted-file", path=path)
        shape = len(manifest.taps), manifest.hidden_size
        return Dump(
            path=path,
            format="dflash",
            taps=manifest.taps,
            hidden_size=manifest.hidden_size,
            texts=tuple(read_text(file, shape, manifest.vocab_size, listed.get(file.name)) for file in files),
            vocab_size=manifest.vocab_size,
            target=manifest.target,
            ends_digest=manifest.ends_digest,
            is_complete=manifest.is_complete,
            prompts=manifest.prompts,
            settings=manifest.settings,
        )


def read_manifest(path: Path) -> DumpManifest:
    """Return the manifest of one of our dumps.

    Raises:
        CheckpointError: a key is missing, unknown or holds a wrong value.
        UnsupportedError: the manifest has a later version than this release reads.
    """
    return from_json(DumpManifest, read_json(path / MANIFEST), path=path / MANIFEST, error=CheckpointError)


def read_text(file: Path, shape: tuple[int, int], vocab_size: int, sha256: str | None = None) -> DumpedText:
    """Return one answer. `shape` is the shape of one row of hidden states, (L, H). Reading its rows checks `sha256`.

    Raises:
        CheckpointError: the file is cut off, or differs from its metadata.
    """
    infos = read_shapes(file)
    token_ids, metadata = read_tokens(file)
    if METADATA not in metadata:
        raise CheckpointError(
            id="no-metadata", path=file, field=METADATA, found=MISSING, expected="metadata that dflash dump writes"
        )
    facts = read_document(TextFacts, metadata[METADATA].encode(), file, error=CheckpointError)
    num_rows = facts.prompt_len + facts.answer_len - 1
    expect_shape(infos[TOKENS], (num_rows + 1 + facts.num_overhang,))
    expect_shape(infos[HIDDEN], (num_rows, *shape))
    check_ids_within(token_ids, vocab_size, file)
    known = fields_of(replace(facts, row=replace(facts.row, where=file.name)))
    return DumpedText(**known, file=file, token_ids=token_ids, num_rows=num_rows, read=rows_reader(file, sha256))


def text_digests(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Return digests of a target's tokenizer and chat template, None for each that is absent."""

    def digest(data: bytes | None) -> str | None:
        return None if data is None else digest_text(data)

    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
    parts = [read_all(checkpoint.path / name) for name in names if (checkpoint.path / name).is_file()]
    template = checkpoint.path / "chat_template.jinja"
    stated = (checkpoint.read_optional_json("tokenizer_config.json") or {}).get("chat_template")
    text = read_all(template) if template.is_file() else json.dumps(stated).encode() if stated else None
    return {"tokenizer_digest": digest(b"".join(parts) if parts else None), "template_digest": digest(text)}
