"""A draft in a GGUF file as a checkpoint: its metadata is the config, and its tensors have canonical names.

The elements of a tensor have the same order in GGUF and in safetensors: rows of q and k are not permuted, and norms are
stored as they are. Only the list of dimensions is reversed.
Source: ggml-org/llama.cpp src/models/dflash.cpp at 01b78a15; its converter's class DFlashModel.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dflash_runtime.checkpoint.layout import SINKS
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.gguf import DRAFTS, GgufHeader
from dflash_runtime.checkpoint.stored.gguf_files import find_gguf, other_architecture, read_gguf
from dflash_runtime.checkpoint.stored.safetensors_header import DTYPE_BYTES, TensorInfo
from dflash_runtime.checkpoint.stored.strict_json import parse_json
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, UnsupportedError
from dflash_runtime.read_files import read_range

if TYPE_CHECKING:
    import torch

    from dflash_runtime.checkpoint.stored.files import TensorCut

ENDS = {
    "fc.weight": "fc.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "token_embd.weight": "embed_tokens.weight",
    "output.weight": "lm_head.weight",
}
"""Tensor in GGUF, outside layers -> its canonical name."""

OF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_sinks.weight": f"self_attn.{SINKS}",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
"""Tensor of a layer in GGUF -> its canonical name. Source: gguf-py tensor_mapping.py, dflash.cpp load_arch_tensors."""

JSON_KEYS = ("dflash_cli.carried",)
"""Keys whose text is a JSON object."""

MAX_DEPTH = 8
"""The most dots of a key that become objects."""

GGUF_ENDS = {canonical: name for name, canonical in ENDS.items()}
GGUF_OF_LAYER = {canonical: name for name, canonical in OF_LAYER.items()}
GGUF_LAYER = re.compile(r"blk\.(\d{1,9})\.(.+)")
LAYER = re.compile(r"layers\.(\d{1,9})\.(.+)")


def canonical_of(name: str) -> str:
    """Return the canonical name of a tensor in GGUF; a name that no DFlash draft has stays."""
    layer = GGUF_LAYER.fullmatch(name)
    if layer is not None and layer[2] in OF_LAYER:
        return f"layers.{layer[1]}.{OF_LAYER[layer[2]]}"
    return ENDS.get(name, name)


def gguf_name(canonical: str) -> str:
    """Return the name in GGUF of a draft's tensor.

    Raises:
        UnsupportedError: llama.cpp has no such tensor.
    """
    layer = LAYER.fullmatch(canonical)
    if layer is not None and layer[2] in GGUF_OF_LAYER:
        return f"blk.{layer[1]}.{GGUF_OF_LAYER[layer[2]]}"
    if canonical not in GGUF_ENDS:
        text = f"{canonical}: llama.cpp has no such tensor of a DFlash draft"
        raise UnsupportedError(text, id="tensor-not-in-gguf", field=canonical)
    return GGUF_ENDS[canonical]


class GgufCheckpoint(Checkpoint):
    """A draft in a GGUF file. `path` is the file, or the folder that holds it. Reads headers until `load` is called."""

    is_in_safetensors: ClassVar[bool] = False

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path = path
        self.header = header
        self.config = nested({name: _plain_value(name, key.value, path) for name, key in header.keys.items()})
        self._metadata = {}
        self._tensors = None

    @property
    def config_path(self) -> Path:
        return self.header.file

    @cached_property
    def gguf_names(self) -> Mapping[str, str]:
        """Canonical name of a tensor -> its name in the file."""
        names: dict[str, str] = {}
        for name in self.header.tensors:
            other = names.setdefault(canonical_of(name), name)
            if other != name:
                text = f"{other} and {name} both stand for the tensor {canonical_of(name)}"
                raise CheckpointError(text, id="tensor-stored-twice", path=self.header.file, field=canonical_of(name))
        return names

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by its canonical name. The element type of quantised weights is its name in GGUF."""
        if self._tensors is None:
            stored = self.header.tensors
            self._tensors = {
                name: TensorInfo(name, at.type.name, at.shape, at.file, at.begin, at.end)
                for name, at in ((name, stored[own]) for name, own in self.gguf_names.items())
            }
        return self._tensors

    @property
    def file_names(self) -> frozenset[str]:
        return frozenset(file.name for file in self.weight_files)

    @property
    def weight_files(self) -> list[Path]:
        return sorted({self.header.file, *(item.file for item in self.header.tensors.values())})

    def name_in_file(self, name: str) -> str:
        return self.gguf_names[name]

    def load_many(
        self, names: list[str], device: str = "cpu", cuts: "Mapping[str, TensorCut] | None" = None
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Read tensors of plain element types to a device.

        Raises:
            UnsupportedError: a tensor is quantised.
        """
        import torch

        types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
        types |= {"I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
        for name in names:
            info = self.tensors[name]
            if info.dtype not in types:
                text = f"{name} is {info.dtype}, which dflash does not compute with"
                raise UnsupportedError(text, id="quantised-weights", path=info.file, found=info.dtype)
            data = bytearray(read_range(info.file, info.begin, info.end, name))
            tensor = torch.frombuffer(data, dtype=types[info.dtype]).reshape(info.shape)
            cut = None if cuts is None else cuts.get(name)
            yield name, (tensor if cut is None else cut.of(tensor)).to(device)

    def read_optional_json(self, name: str) -> dict[str, Any] | None:
        return None


def open_stored(path: str | Path) -> Checkpoint:
    """Return the checkpoint of a path: a draft in a GGUF file, or a folder with config.json and safetensors weights.

    Raises:
        CheckpointNotFound, CheckpointError: see `Checkpoint` and `read_gguf`.
        UnknownFormat: a GGUF file that is not a draft.
    """
    where = Path(path)
    if not where.exists():
        raise CheckpointNotFound("no such directory", path=where)
    file = find_gguf(where)
    return Checkpoint(where) if file is None else draft_in_gguf(where, read_gguf(file))


def draft_in_gguf(path: Path, header: GgufHeader) -> GgufCheckpoint:
    """Return the draft of a GGUF file.

    Raises:
        UnknownFormat: the file is not a draft.
    """
    if header.architecture not in DRAFTS:
        raise other_architecture(header)
    return GgufCheckpoint(path, header)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted keys as objects inside objects. A key stays dotted if another key is its start."""
    found: dict[str, Any] = {}
    for name in sorted(values):
        *parents, last = name.split(".", MAX_DEPTH)
        place: Any = found
        for parent in parents:
            place = place.setdefault(parent, {}) if isinstance(place, dict) else None
        if isinstance(place, dict) and last not in place:
            place[last] = values[name]
        else:
            found[name] = values[name]
    return found


def _plain_value(name: str, value: Any, path: Path) -> Any:
    """Return the value of a key, parsed if it is JSON."""
    return parse_json(value.encode(), path) if name in JSON_KEYS and isinstance(value, str) else value


def is_plain(dtype: str) -> bool:
    """Whether an element type is one of safetensors, and not a quantised type of GGUF."""
    return dtype in DTYPE_BYTES
