"""A checkpoint on disk: its JSON, its safetensors headers, and tensors loaded one by one.

Headers are parsed and checked here, without torch, because a header-only command must start at once and a malformed
header must be named rather than crash a reader. Tensor data is read by the safetensors library.

Layout of a safetensors file: u64 header length, JSON header, data. Source: huggingface/safetensors README, "Format".
"""

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_runtime.checkpoint.gguf import refuse_gguf
from dflash_runtime.checkpoint.layout import StoredRows
from dflash_runtime.checkpoint.strict_json import parse_json, read_json, regular_size
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from dflash_runtime.json_values import is_int

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MASK_FILE = "mask_embedding.safetensors"
"""A learned mask embedding, which lies beside the weights and does not count as one of them."""
MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 50_000
"""The most tensors in one file: several times what a shard of the largest published checkpoint has, read in seconds."""

MAX_NAME_BYTES = 255
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")

DTYPE_BYTES: Mapping[str, float] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1,
    "F4": 0.5, "F6_E2M3": 0.75, "F6_E3M2": 0.75,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `begin` and `end` are absolute byte offsets in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_floating(self) -> bool:
        return self.dtype.startswith(("F", "BF"))


class Checkpoint:
    """A directory with `config.json` and safetensors weights. Reads JSON and headers only, until `load` is called.

    Raises:
        CheckpointNotFound: the directory does not exist.
        CheckpointError: no config, unreadable JSON, a header that breaks the format, pickle weights only.
        UnknownFormat: a GGUF file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise CheckpointNotFound(f"{self.path}: no such directory")
        refuse_gguf(self.path)
        if not self.path.is_dir():
            raise CheckpointError("not a directory, expected a checkpoint directory with config.json", path=self.path)
        refuse_escape(self.path, self.config_path)
        self.config = read_json(self.config_path)
        self._tensors: dict[str, TensorInfo] | None = None

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor of the checkpoint, by name, from the headers."""
        if self._tensors is None:
            self._tensors = _read_all_headers(self.path)
        return self._tensors

    @property
    def weight_files(self) -> list[Path]:
        """The safetensors files that hold tensors, in order of name."""
        return sorted({info.file for info in self.tensors.values()})

    def stored_rows(self, name: str) -> StoredRows:
        """Where a tensor lies, by the names its file uses."""
        return StoredRows(self.tensors[name].name)

    def load(self, name: str) -> "torch.Tensor":
        """Read one tensor to the CPU, in the dtype it is stored in."""
        return next(tensor for _, tensor in self.load_many([name]))

    def load_many(self, names: list[str], device: str = "cpu") -> "Iterator[tuple[str, torch.Tensor]]":
        """Read tensors to a device, file by file, so that each file is opened once.

        Files are mapped, not read into memory: a device copies from the mapping, and the host holds no tensor.
        """
        from safetensors import SafetensorError, safe_open

        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file, members in by_file.items():
            try:
                with safe_open(file, framework="pt", device=device) as reader:
                    for name in members:
                        yield name, self._read(reader, name)
            except SafetensorError as error:
                raise CheckpointError(str(error), path=file) from error

    def _read(self, reader: Any, name: str) -> "torch.Tensor":
        """One tensor from the file that holds it, which is open."""
        tensor: torch.Tensor = reader.get_tensor(name)
        return tensor

    def read_optional_json(self, name: str) -> dict[str, Any] | None:
        """A JSON file beside the config, or None where there is none."""
        path = self.path / name
        refuse_escape(self.path, path)
        return read_json(path) if path.exists() else None


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Parse and check one safetensors header.

    The checks are those of the format: the header fits the file, every entry has a known dtype, a shape and offsets
    that agree, and the data is covered without holes or overlaps.

    Raises:
        CheckpointError: naming the file, the tensor and what is wrong.
    """
    try:
        size = regular_size(file)
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{size} bytes, expected at least 8: not a safetensors file", path=file)
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or length < 2:
                raise CheckpointError(
                    f"header length {length}, expected 2..{MAX_HEADER_BYTES}: not a safetensors file", path=file
                )
            if length > size - 8:
                raise CheckpointError(f"truncated: header of {length} bytes in a file of {size}", path=file)
            text = stream.read(length)
            if text.count(b'"data_offsets"') > MAX_TENSORS:
                raise CheckpointError(f"more than {MAX_TENSORS} tensors: not a checkpoint this tool reads", path=file)
            header = parse_json(text, file)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", path=file) from error
    _check_metadata(header.pop("__metadata__", None), file)
    infos = {name: _tensor_info(name, entry, file, 8 + length) for name, entry in header.items()}
    _check_coverage(infos, file, 8 + length, size)
    return infos


def _check_metadata(metadata: Any, file: Path) -> None:
    """Loaders stop at metadata that is anything but text by name."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("header entry '__metadata__' is not an object of strings", path=file)


def _tensor_info(name: str, entry: Any, file: Path, base: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise CheckpointError(f"header entry {name!r} is not an object", path=file)
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"tensor {name!r} has unknown dtype {dtype!r}", path=file)
    if not _is_count_list(shape):
        raise CheckpointError(f"tensor {name!r} has shape {shape!r}, expected a list of sizes", path=file)
    if not _is_count_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"tensor {name!r} has data_offsets {offsets!r}, expected [begin, end]", path=file)
    expected = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise CheckpointError(
            f"tensor {name!r} takes {offsets[1] - offsets[0]} bytes, expected {expected:g} for {dtype} {shape}",
            path=file,
        )
    return TensorInfo(name, dtype, tuple(shape), file, base + offsets[0], base + offsets[1])


def _check_coverage(infos: Mapping[str, TensorInfo], file: Path, base: int, size: int) -> None:
    position = base
    for info in sorted(infos.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != position:
            problem = "overlaps the tensor before it" if info.begin < position else "leaves a hole before it"
            raise CheckpointError(f"tensor {info.name!r} {problem} (byte {info.begin - base})", path=file)
        position = info.end
    if position != size:
        problem = "truncated" if position > size else "oversized"
        raise CheckpointError(f"{problem}: {size} bytes, expected {position} from the header", path=file)


def _is_count_list(value: Any) -> bool:
    return isinstance(value, list) and all(is_int(item) and 0 <= item < 2**63 for item in value)


def _read_all_headers(path: Path) -> dict[str, TensorInfo]:
    index_path = _find_index(path)
    if index_path is not None:
        refuse_escape(path, index_path)
        return _read_sharded(path, index_path)
    files = sorted(
        item for item in path.glob("*.safetensors") if not item.name.startswith(".") and item.name != MASK_FILE
    )
    if not files:
        _refuse_without_safetensors(path)
    tensors: dict[str, TensorInfo] = {}
    for file in [path / SINGLE_FILE] if path / SINGLE_FILE in files else files:
        refuse_escape(path, file)
        for name, info in read_header(file).items():
            if name in tensors:
                raise CheckpointError(f"tensor {name!r} is also in {tensors[name].file.name}", path=file)
            tensors[name] = info
    return tensors


def _find_index(path: Path) -> Path | None:
    """The index under its usual name; otherwise the only one of another name, unless there is a single weight file."""
    if (path / INDEX_FILE).exists():
        return path / INDEX_FILE
    others = [item for item in path.glob("*.safetensors.index.json") if not item.name.startswith(".")]
    return others[0] if len(others) == 1 and not (path / SINGLE_FILE).exists() else None


def _read_sharded(path: Path, index_path: Path) -> dict[str, TensorInfo]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("weight_map: missing, expected a map from tensor to file", path=index_path)
    headers: dict[str, dict[str, TensorInfo]] = {}
    for shard in _shard_names(weight_map, index_path):
        file = path / shard
        if not file.exists():
            raise CheckpointError(f"names {shard}, which is not there", path=index_path)
        refuse_escape(path, file)
        headers[shard] = read_header(file)
    missing = [f"{name} (in {shard})" for name, shard in weight_map.items() if name not in headers[shard]]
    orphans = find_orphans(weight_map, headers)
    if missing or orphans:
        raise TensorMismatch(missing=missing, unexpected=orphans, path=index_path)
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def find_orphans(weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, TensorInfo]]) -> list[str]:
    """What shards hold although the index does not give it to them: some readers take it, others do not."""
    return [
        f"{name} (in {shard}; the index gives it to {weight_map[name]})" if name in weight_map else name
        for shard, header in headers.items()
        for name in header
        if weight_map.get(name) != shard
    ]


def _shard_names(weight_map: Mapping[str, Any], index_path: Path) -> list[str]:
    """Refuse anything but plain file names: a checkpoint must not reach outside its own directory."""
    strays = [shard for shard in weight_map.values() if not isinstance(shard, str)]
    names = sorted(set(weight_map.values())) if not strays else []
    strays += [name for name in names if not _is_plain_name(name)]
    if strays:
        raise CheckpointError(f"weight_map names {strays[0]!r}, expected a file beside the index", path=index_path)
    return names


def _is_plain_name(name: str) -> bool:
    is_alone = name == Path(name).name and name not in ("", ".", "..")
    return is_alone and not {"\\", "\0"} & set(name) and len(name.encode()) <= MAX_NAME_BYTES


def refuse_escape(root: Path, file: Path) -> None:
    """Follow a link only where the hub cache keeps its own: `snapshots/REV/file -> ../../blobs/HASH`."""
    if not file.is_symlink():
        return
    try:
        resolved = file.resolve()
    except RuntimeError as error:  # how Python 3.11 and 3.12 say that links lead to each other
        raise CheckpointError("links to itself", path=file) from error
    home = root.resolve()
    blobs = home.parent.parent / "blobs"
    is_cache = home.parent.name == "snapshots" and resolved.parent == blobs
    if not is_cache and home not in resolved.parents:
        raise CheckpointError(f"links to {file.readlink()}, outside the checkpoint", path=file)


def _refuse_without_safetensors(path: Path) -> None:
    pickles = sorted(item.name for item in path.iterdir() if item.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"only pickle weights ({pickles[0]}), which can run code when read; refused",
            path=path,
            hint="save the checkpoint as safetensors where it was made",
        )
    raise CheckpointError("no *.safetensors file, expected the weights beside config.json", path=path)
