"""A checkpoint on disk: its JSON, its safetensors headers, and tensors loaded one by one.

The safetensors library reads tensor data; `safetensors_header` reads headers, without torch.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from dflash_runtime.checkpoint.layout import StoredRows
from dflash_runtime.checkpoint.stored.adapters import adapter_files, instead_of_model
from dflash_runtime.checkpoint.stored.gguf_files import refuse_gguf
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo, read_header
from dflash_runtime.checkpoint.stored.strict_json import read_json
from dflash_runtime.errors import MISSING, CheckpointError, CheckpointNotFound, TensorMismatch
from dflash_runtime.read_files import open_tensors

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    import torch

INDEX_SUFFIX = ".safetensors.index.json"
INDEX_FILE = f"model{INDEX_SUFFIX}"
SINGLE_FILE = "model.safetensors"
MASK_FILE = "mask_embedding.safetensors"
"""A learned mask embedding: a file in the folder of the weights that is not one of the weight files."""

MAX_NAME_BYTES = 255
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class TensorCut(Protocol):
    """A part of a tensor."""

    def of(self, tensor: Any) -> "torch.Tensor":
        """Read the part of a tensor that safetensors has opened."""
        ...


class Checkpoint:
    """A directory with `config.json` and safetensors weights. Reads only JSON and headers until `load` is called.

    Raises:
        CheckpointNotFound: the directory does not exist.
        CheckpointError: a missing config, malformed JSON, a malformed header, or only pickle weights.
        UnknownFormat: a GGUF file.
    """

    is_in_safetensors: ClassVar[bool] = True
    """Whether the tensors are as they are in safetensors files; else only `load_many` of the class reads them."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise CheckpointNotFound("no such directory", path=self.path)
        refuse_gguf(self.path)
        if not self.path.is_dir():
            raise CheckpointError(
                "not a directory, expected a checkpoint directory with config.json",
                id="not-a-directory",
                path=self.path,
                expected="a checkpoint directory with config.json",
            )
        refuse_escape(self.path, self.config_path)
        self.config = read_json(self.config_path, is_config=True)
        self._tensors: dict[str, TensorInfo] | None = None
        self._metadata: dict[str, str] = {}

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the checkpoint by name, from the headers."""
        if self._tensors is None:
            self._tensors = _read_tensors(self)
            logger.info("%s: headers of %d tensors", self.path, len(self._tensors))
        return self._tensors

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of the headers, which writers of safetensors may add."""
        return self._metadata if self.tensors else {}

    @property
    def file_names(self) -> frozenset[str]:
        """The names of the files beside `config.json`."""
        return frozenset(item.name for item in self.path.iterdir())

    def check_headers(self) -> None:
        """Read all headers. Refuses weights that are absent, cut off or malformed."""
        _ = self.tensors

    def read_headers(self, names: Sequence[str]) -> Iterable[dict[str, TensorInfo]]:
        """Read the headers of the named weight files, in this order."""
        for name in names:
            refuse_escape(self.path, self.path / name)
            yield read_header(self.path / name, self._metadata)

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files that hold tensors, sorted by name."""
        return sorted({info.file for info in self.tensors.values()})

    def stored_rows(self, name: str) -> StoredRows:
        """Return the stored tensor, and the rows of it, that hold a tensor."""
        return StoredRows(self.tensors[name].name)

    def name_in_file(self, name: str) -> str:
        """Return the name that the file itself has for a tensor."""
        return name

    def load(self, name: str) -> "torch.Tensor":
        """Read one tensor to the CPU in its stored dtype."""
        return next(tensor for _, tensor in self.load_many([name]))

    def load_many(
        self, names: list[str], device: str = "cpu", cuts: "Mapping[str, TensorCut] | None" = None
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Read tensors to a device file by file, and open each file once. Of a tensor in `cuts`, read only that part.

        Files are mapped into memory: a GPU copies from the mapping, and the host holds no copy of a tensor.
        """
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, members in by_file.items():
            with open_tensors(file, device) as reader:
                for name in members:
                    cut = None if cuts is None else cuts.get(name)
                    yield name, self._read(reader, name) if cut is None else cut.of(reader.get_slice(name))

    def _read(self, reader: Any, name: str) -> "torch.Tensor":
        """Read one tensor with the open reader of its file."""
        tensor: torch.Tensor = reader.get_tensor(name)
        return tensor

    def read_optional_json(self, name: str) -> dict[str, Any] | None:
        """Read a JSON file in the checkpoint's directory; None if it is absent."""
        path = self.path / name
        refuse_escape(self.path, path)
        return read_json(path) if path.exists() else None


def _read_tensors(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint: of the shards that its index names, or of the weight files without an index.

    Raises:
        CheckpointError: no weights, a malformed index, or a tensor in two files.
        TensorMismatch: the index and its shards do not hold the same tensors.
    """
    names = checkpoint.file_names
    index = _find_index(names)
    if index is None:
        files = _loose_files(names, checkpoint.path)
        return _merge(dict(zip(files, checkpoint.read_headers(files), strict=True)), checkpoint.path)
    path = checkpoint.path / index
    weight_map = _weight_map(checkpoint.read_optional_json(index) or {}, names, path)
    shards = sorted(set(weight_map.values()))
    headers = dict(zip(shards, checkpoint.read_headers(shards), strict=True))
    missing = [f"{name} (in {shard})" for name, shard in weight_map.items() if name not in headers[shard]]
    orphans = [
        f"{name} (in {shard}; the index gives it to {weight_map[name]})" if name in weight_map else name
        for shard, header in headers.items()
        for name in header
        if weight_map.get(name) != shard
    ]
    if missing or orphans:  # some readers load orphans, others do not
        raise TensorMismatch(missing=missing, unexpected=orphans, path=path)
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _find_index(names: Iterable[str]) -> str | None:
    """Return the index of the usual name, or else the only index of another name if no single weight file exists."""
    if INDEX_FILE in names:
        return INDEX_FILE
    others = [name for name in names if name.endswith(INDEX_SUFFIX) and not name.startswith(".")]
    return others[0] if len(others) == 1 and SINGLE_FILE not in names else None


def _loose_files(names: Collection[str], path: Path) -> list[str]:
    """Return the weight files of a checkpoint without an index."""
    others = {MASK_FILE, *adapter_files(names)}
    files = sorted(
        name for name in names if name.endswith(".safetensors") and not name.startswith(".") and name not in others
    )
    if files:
        return [SINGLE_FILE] if SINGLE_FILE in files else files
    pickles = sorted(name for name in names if name.endswith(PICKLE_SUFFIXES))
    if pickles:
        raise CheckpointError(
            f"only pickle weights ({pickles[0]}), which can run code when read; refused",
            id="pickle-weights",
            path=path,
            found=pickles[0],
            expected="safetensors weights",
            hint="save the checkpoint as safetensors with the code that made it",
        )
    text = "no *.safetensors file, expected the weights beside config.json"
    expected, hint = "*.safetensors beside config.json", instead_of_model(names)
    raise CheckpointError(text, id="no-weights", path=path, expected=expected, hint=hint)


def _merge(headers: Mapping[str, Mapping[str, TensorInfo]], path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of all weight files."""
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for name, info in header.items():
            if name in tensors:
                found = (tensors[name].file.name, file)
                text, id = f"tensor {name!r} is also in {found[0]}", "tensor-in-two-files"
                raise CheckpointError(text, id=id, path=path / file, field=name, found=found, expected="one file")
            tensors[name] = info
    return tensors


def _weight_map(index: Mapping[str, Any], names: Collection[str], path: Path) -> dict[str, str]:
    """Return tensor -> shard of the index at `path`, after checking that each shard is a file beside the index."""
    found = index.get("weight_map", MISSING)
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            id="index-without-map",
            path=path,
            field="weight_map",
            found=MISSING if found is None else found,
            expected="an object from tensor name to file name",
        )
    for shard in found.values():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            text, expected = f"weight_map names {shard!r}, expected a file beside the index", "a file beside the index"
            raise CheckpointError(
                text, id="shard-outside", path=path, field="weight_map", found=shard, expected=expected
            )
    missing = next((shard for shard in sorted(set(found.values())) if shard not in names), None)
    if missing is not None:
        raise CheckpointError(
            f"names {missing}, which is not there",
            id="shard-missing",
            path=path,
            field="weight_map",
            found=missing,
            expected="files that exist",
            hint="download the checkpoint again, with all its files",
        )
    return found


def _is_plain_name(name: str) -> bool:
    is_alone = name == Path(name).name and name not in ("", ".", "..")
    return is_alone and not {"\\", "\0"} & set(name) and len(name.encode()) <= MAX_NAME_BYTES


BLOB_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""The hub's cache names a blob by its git hash or its SHA-256."""


def refuse_escape(root: Path, file: Path) -> None:
    """Refuse a link that leaves the checkpoint, other than links of the hub cache.

    The cache has `models--ORG--NAME/snapshots/REV/file -> ../../blobs/HASH`. A directory of links into it, which older
    releases of the hub's client make, is followed too.

    Raises:
        CheckpointError: the link leaves the checkpoint, or leads to itself.
    """
    if not file.is_symlink():
        return
    try:
        resolved = file.resolve()
    except RuntimeError as error:  # Python 3.11 and 3.12 report links that lead to each other this way
        raise CheckpointError("links to itself", id="link-to-itself", path=file) from error
    home = root.resolve()
    blobs = home.parent.parent / "blobs"
    is_cache = home.parent.name == "snapshots" and resolved.parent == blobs
    if not is_cache and not _is_cached_blob(resolved) and home not in resolved.parents:
        raise CheckpointError(
            f"links to {file.readlink()}, outside the checkpoint",
            id="link-outside",
            path=file,
            found=str(file.readlink()),
            expected="a file in the checkpoint",
        )


def _is_cached_blob(file: Path) -> bool:
    """Whether a file is a blob of a model in the hub's cache, by the layout of the cache and the form of its name."""
    repo = file.parent.parent
    is_layout = file.parent.name == "blobs" and repo.name.startswith("models--") and (repo / "snapshots").is_dir()
    return is_layout and BLOB_NAME.fullmatch(file.name) is not None
