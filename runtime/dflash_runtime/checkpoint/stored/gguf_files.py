"""Find and read GGUF files. A split draft is several files, `NAME-00001-of-00003.gguf`, and reads like one file.

The first file has the metadata, and each file has tensors. Source: ggml-org/llama.cpp tools/gguf-split.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from dflash_runtime.checkpoint.stored.gguf import DRAFTS, MAGIC, SUFFIX, GgufHeader, StoredTensor, read_gguf_stream
from dflash_runtime.checkpoint.stored.strict_json import regular_size
from dflash_runtime.errors import CheckpointError, UnknownFormat, UsageError, unreadable
from dflash_runtime.read_files import reading

PART = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})\.gguf")
MAX_PARTS = 1000
OF_SPLIT = "split."
"""The prefix of the keys about a split."""

COUNT = f"{OF_SPLIT}count"


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all files of a split draft, from the name of any of them; of another file its own name."""
    found = PART.fullmatch(name)
    if found is None or not 0 < int(found[2]) <= int(found[4]) <= MAX_PARTS:
        return (name,)
    return tuple(f"{found[1]}{number:05}{found[3]}{found[4]}{SUFFIX}" for number in range(1, int(found[4]) + 1))


def first_names(names: Iterable[str]) -> list[str]:
    """Return the GGUF files among these, sorted. Of a split draft only the first file, whether it is there or not."""
    return sorted({part_names(name)[0] for name in names if name.endswith(SUFFIX)})


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path stands for: the file itself, or the only draft of a folder without safetensors.

    Raises:
        UsageError: the folder has several GGUF files.
        CheckpointError: a split draft lacks its first file.
    """
    if path.is_dir():
        has_weights = any(path.glob("*.safetensors"))
        names = [] if has_weights else first_names(item.name for item in path.glob(f"*{SUFFIX}"))
        if len(names) > 1:
            raise UsageError(
                f"has several GGUF files: {', '.join(names)}", id="several-gguf-files", path=path, found=names,
                expected="one file", hint=f"name the file, such as {path / names[0]}",
            )  # fmt: skip
        path = path / names[0] if names else path
    elif path.is_file():
        path = path.with_name(part_names(path.name)[0])
    else:
        return None
    if not path.exists():
        raise missing_part(path)
    if not path.is_file():
        return None
    is_named = path.suffix == SUFFIX  # reading the header refuses a file that only has the name
    return path if is_named or has_magic(path) else None


def has_magic(file: Path) -> bool:
    """Whether a file begins as GGUF files do."""
    with reading(file) as stream:
        return stream.read(len(MAGIC)) == MAGIC


def refuse_gguf(path: Path) -> None:
    """Refuse a GGUF file, or a folder with GGUF weights and without safetensors weights.

    Raises:
        UnknownFormat: names the architecture.
        CheckpointError: the header is damaged.
    """
    file = find_gguf(path)
    if file is not None:
        raise other_architecture(read_gguf(file))


def other_architecture(header: GgufHeader) -> UnknownFormat:
    """Return the refusal of a GGUF file that is not used here, such as a target."""
    architecture = header.architecture
    other = (
        "a file without a model, or not the first file of a split one"
        if architecture is None
        else f"a {architecture} model for llama.cpp, such as a target"
    )
    text = DRAFTS.get(architecture or "", other)
    return UnknownFormat(
        f"GGUF, general.architecture {architecture!r}: {text}; dflash reads only drafts from GGUF files",
        id="gguf",
        path=header.file,
        field="general.architecture",
        found=architecture,
        expected="a safetensors checkpoint",
        hint="pass the safetensors checkpoint it was made from",
    )


def read_gguf(file: Path) -> GgufHeader:
    """Read and check the header of a GGUF file, of a split draft the headers of all its files.

    Raises:
        CheckpointError: see `read_gguf_stream` and `join_parts`.
    """
    return join_parts(_read_part(file), lambda name: _read_part(file.with_name(name)))


def join_parts(first: GgufHeader, read: Callable[[str], GgufHeader]) -> GgufHeader:
    """Return the header of a whole draft from the header of its first file. `read` reads another file by its name.

    Raises:
        CheckpointError: the draft is split, and its first file is not named `NAME-00001-of-N.gguf`, or two files have
            the same tensor.
    """
    stated = first.keys.get(COUNT)
    names = part_names(first.file.name)
    count = 1 if stated is None else stated.value
    if stated is None or count == 1:
        return first
    if count != len(names) or first.file.name != names[0]:
        expected = f"NAME-00001-of-{count:05}.gguf" if isinstance(count, int) else "a number of files"
        raise CheckpointError(
            f"{COUNT} is {count!r}, so the file is one of several, expected the name {expected}", id="gguf-split",
            path=first.file, field=COUNT, found=count, expected=expected,
            hint="give the files their names of before, or merge them: llama-gguf-split --merge FIRST.gguf WHOLE.gguf",
        )  # fmt: skip
    tensors: dict[str, StoredTensor] = {}
    for part in (first, *map(read, names[1:])):
        twice = next((name for name in part.tensors if name in tensors), None)
        if twice is not None:
            text = f"tensor {twice!r} is also in {tensors[twice].file.name}"
            raise CheckpointError(text, id="gguf-tensor", path=part.file, field=twice, expected="each tensor once")
        tensors |= part.tensors
    return replace(first, keys={k: key for k, key in first.keys.items() if not k.startswith(OF_SPLIT)}, tensors=tensors)


def missing_part(file: Path) -> CheckpointError:
    """Return the error for a file of a split draft that is absent."""
    return CheckpointError(
        "no such file, although other files of the split draft are there", id="gguf-part-missing", path=file,
        expected=f"{len(part_names(file.name))} files", hint="download all files of the draft; dflash pull does",
    )  # fmt: skip


def _read_part(file: Path) -> GgufHeader:
    try:
        size = regular_size(file)
        with file.open("rb") as stream:
            return read_gguf_stream(file, stream, size)
    except FileNotFoundError as error:
        raise missing_part(file) if PART.fullmatch(file.name) else unreadable(file, error) from error
    except OSError as error:
        raise unreadable(file, error) from error
