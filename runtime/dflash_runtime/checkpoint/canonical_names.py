"""A view on a draft's checkpoint with canonical tensor names. Needs no torch until `load`.

The view removes prefixes and splits fused projections by rows. Rows are byte ranges of a file, so making the view reads
no tensor data. A conversion copies these ranges, and the runtime loads them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash_runtime.checkpoint.layout import PACKED, PACKED_DTYPES, StoredRows, canonical_name, find_stored_rows
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.safetensors_header import DTYPE_BYTES, TensorInfo
from dflash_runtime.checkpoint.targets.target_facts import MLX, NESTED, PACKING, mlx_bits
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.json_values import as_object

if TYPE_CHECKING:
    import torch

    from dflash_runtime.checkpoint.stored.files import TensorCut

QUANTIZATION_FILE = "hf_quant_config.json"
"""File in which Model-Optimizer states how it quantised the weights."""


NO_STATEMENT = "config.json states no quantization_config: copy it from the repository of these weights"


class CanonicalCheckpoint(Checkpoint):
    """A view on `stored`. For quantised weights, which keep their own shapes, `config` is None.

    They keep their own names too, except weights in a format of `fp8_format.py`, with `is_renamed`.

    Raises, when `tensors` is first read:
        CheckpointError, TensorMismatch: see `layout.find_stored_rows`.
    """

    def __init__(self, stored: Checkpoint, config: DraftConfig | None, *, is_renamed: bool = False) -> None:
        self.stored = stored
        self.path = stored.path
        self.config = stored.config
        self._config = config
        self._is_renamed = is_renamed
        self._metadata = {}
        self._tensors = None
        self._stored_rows: dict[str, StoredRows] = {}

    @property
    def config_path(self) -> Path:
        return self.stored.config_path

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by its canonical name. `begin` and `end` enclose only the rows of this tensor."""
        if self._tensors is None:
            stored = self.stored.tensors
            if self._config is None:
                self._stored_rows = {self._name_of(name): StoredRows(name) for name in stored}
            else:
                shapes = {name: info.shape for name, info in stored.items()}
                self._stored_rows = find_stored_rows(self._config, shapes, path=self.path)
            self._tensors = {name: _slice(name, stored[at.stored], at.rows) for name, at in self._stored_rows.items()}
        return self._tensors

    @property
    def naming(self) -> Literal["split", "renamed", "stored"]:
        """How tensors get their names: fused ones are split by the config, or all are renamed, or stored names stay."""
        return "split" if self._config is not None else "renamed" if self._is_renamed else "stored"

    def _name_of(self, stored: str) -> str:
        return canonical_name(stored) if self._is_renamed else stored

    @property
    def metadata(self) -> dict[str, str]:
        return self.stored.metadata

    @property
    def file_names(self) -> frozenset[str]:
        return self.stored.file_names

    def read_optional_json(self, name: str) -> dict[str, Any] | None:
        return self.stored.read_optional_json(name)

    def stored_rows(self, name: str) -> StoredRows:
        canonical = self.tensors[name].name  # fills the table first
        return self._stored_rows[canonical]

    def load_many(
        self, names: list[str], device: str = "cpu", cuts: "Mapping[str, TensorCut] | None" = None
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        if self.stored.is_in_safetensors:
            yield from super().load_many(names, device, cuts)
            return
        for name in names:
            at, cut = self.stored_rows(name), None if cuts is None else cuts.get(name)
            tensor = self.stored.load(at.stored)
            tensor = tensor if at.rows is None else tensor[slice(*at.rows)]
            yield name, (tensor if cut is None else cut.of(tensor)).to(device)

    def name_in_file(self, name: str) -> str:
        return self.stored.name_in_file(self.stored_rows(name).stored)

    def _read(self, reader: Any, name: str) -> "torch.Tensor":
        at = self.stored_rows(name)
        tensor: torch.Tensor
        if at.rows is None:
            tensor = reader.get_tensor(at.stored)
        else:
            begin, end = at.rows
            tensor = reader.get_slice(at.stored)[begin:end]
        return tensor


def find_quantization(stored: Checkpoint, *, has_headers: bool = True) -> str | None:
    """Return the config key, file or tensor that shows that a checkpoint is quantised, or None if it is not.

    For MLX, return its name. Without `has_headers` no tensor is looked at.
    """
    bodies = (as_object(stored.config.get(key)) for key in ("transformer_layer_config", *NESTED))
    for config in (stored.config, *bodies):
        if (bits := mlx_bits(config)) is not None:
            return f"{MLX}, {bits} bits"
        for key in PACKING:
            if config.get(key):
                return key
    if QUANTIZATION_FILE in stored.file_names:
        return QUANTIZATION_FILE
    for name, info in stored.tensors.items() if has_headers else ():
        if name.endswith(".scales") and f"{name.removesuffix('scales')}biases" in stored.tensors:
            return f"{MLX}, the tensor {name}"
        if PACKED.match(name):
            return f"the tensor {name}"
        if info.dtype not in DTYPE_BYTES or (info.dtype in PACKED_DTYPES and len(info.shape) > 1):
            return f"{name} is {info.dtype}"
    return None


def refuse_packed(path: Path, quantization: str | None) -> None:
    """Refuse to run quantised weights, where `quantization` is the result of `find_quantization`.

    Raises:
        UnsupportedError: the weights are quantised.
    """
    if quantization is not None:
        engine = "run it in an engine that reads this quantization"
        is_stated = not (quantization.startswith("the tensor ") or " is " in quantization)
        raise UnsupportedError(
            f"quantised weights ({quantization}), which this runtime does not run",
            id="quantised-weights",
            path=path,
            found=quantization,
            expected="plain weights",
            hint=f"{engine if is_stated else NO_STATEMENT}, or pass the weights it was made from",
        )


def _slice(name: str, info: TensorInfo, rows: tuple[int, int] | None) -> TensorInfo:
    """Return a stored tensor, or rows of it, under its canonical name."""
    if rows is None:
        return replace(info, name=name)
    row_bytes = info.num_bytes // info.shape[0]
    begin, end = rows
    return replace(
        info,
        name=name,
        shape=(end - begin, *info.shape[1:]),
        begin=info.begin + begin * row_bytes,
        end=info.begin + end * row_bytes,
    )
