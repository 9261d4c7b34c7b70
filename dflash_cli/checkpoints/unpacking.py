"""Compute the numbers that packed matrices stand for, row by row: MLX's 2, 4 and 8 bits, quantised types of GGUF, FP8.

MLX: each group of adjacent numbers of a row has a scale and a bias, number = scale * code + bias. Codes fill words of
32 bits from the lowest bits on. Source: ml-explore/mlx docs, mlx.core.quantize, mode affine.
Q8_0: a half-precision scale and 32 signed bytes, number = scale * byte. Q4_0: a half-precision scale and 16 bytes. The
low halves of the bytes are the first 16 codes, the high halves the last 16, and number = scale * (code - 8).
Source: gguf 0.19.0 quants.py. Other types need the package gguf.
FP8: a scale per matrix, row or block of it, number = scale * code. `quantised/fp8_format.py` lists the forms.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dflash_cli.formats.fields import REMOVED, with_keys
from dflash_cli.formats.gguf_fields import FILE_TYPE, OWN
from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.checkpoint.quantised.fp8_format import fp8_matrices, read_fp8_format, refuse_unless_fp8
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.gguf import TYPE_NUMBERS, TYPES
from dflash_runtime.checkpoint.stored.gguf_checkpoint import GgufCheckpoint, is_plain
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.checkpoint.targets.target_facts import MLX_KEYS, PACKING, mlx_bits
from dflash_runtime.errors import TensorMismatch, UnsupportedError, UsageError
from dflash_runtime.json_values import as_object, is_int
from dflash_runtime.read_files import read_range

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from dflash_runtime.checkpoint.stored.files import TensorCut

RESULT = "BF16"
"""The element type of unpacked matrices."""

CHUNK_ELEMENTS = 1 << 22
"""Elements that are unpacked at once, so that memory does not grow with the matrix."""

WORD_BITS = 32
MLX_BITS = (2, 4, 8)
"""Numbers of bits that divide a word."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A packed matrix: its stored tensors, the shape it stands for, and a function that unpacks rows [begin, end).

    how     the packed form in words
    parts   names of the stored tensors with scales and biases
    """

    info: TensorInfo
    shape: tuple[int, ...]
    how: str
    unpack: "Callable[[int, int], NDArray[Any]]"
    parts: tuple[str, ...] = ()

    def pieces(self) -> Iterator[bytes]:
        """The bytes of the unpacked matrix, in pieces of whole rows."""
        import torch

        at_once = max(1, CHUNK_ELEMENTS // max(1, self.shape[-1]))
        for begin in range(0, self.num_rows, at_once):
            rows = torch.from_numpy(self.unpack(begin, min(begin + at_once, self.num_rows))).to(torch.bfloat16)
            yield rows.contiguous().view(torch.uint8).numpy().tobytes()

    @property
    def num_rows(self) -> int:
        """The product of all dimensions but the last."""
        count = 1
        for length in self.shape[:-1]:
            count *= length
        return count


class UnpackedCheckpoint(Checkpoint):
    """A view on `stored` in which packed matrices are plain bfloat16, and the config does not say that they are packed.

    `begin` and `end` of a packed matrix enclose its stored codes.
    """

    is_in_safetensors: ClassVar[bool] = False

    def __init__(self, stored: Checkpoint, packed: Mapping[str, PackedMatrix], config: dict[str, Any]) -> None:
        self.stored, self.packed = stored, packed
        self.path, self.config = stored.path, config
        self._metadata = {}
        self._tensors = None

    @property
    def config_path(self) -> Path:
        return self.stored.config_path

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        if self._tensors is None:
            parts = {part for matrix in self.packed.values() for part in matrix.parts}
            self._tensors = {
                name: replace(info, dtype=RESULT, shape=self.packed[name].shape) if name in self.packed else info
                for name, info in self.stored.tensors.items()
                if name not in parts
            }
        return self._tensors

    @property
    def metadata(self) -> dict[str, str]:
        return self.stored.metadata

    @property
    def file_names(self) -> frozenset[str]:
        """The stored files without the one that says how weights are packed."""
        return self.stored.file_names - {QUANTIZATION_FILE}

    def name_in_file(self, name: str) -> str:
        return self.stored.name_in_file(name)

    def load_many(
        self, names: list[str], device: str = "cpu", cuts: "Mapping[str, TensorCut] | None" = None
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        import torch

        yield from self.stored.load_many([name for name in names if name not in self.packed], device, cuts)
        for name in names:
            if name in self.packed:
                data = bytearray(b"".join(self.packed[name].pieces()))
                tensor = torch.frombuffer(data, dtype=torch.bfloat16).reshape(self.packed[name].shape)
                cut = None if cuts is None else cuts.get(name)
                yield name, (tensor if cut is None else cut.of(tensor)).to(device)


def states_known_packing(config: Mapping[str, Any]) -> bool:
    """Whether a config says that its matrices are packed in a form that `unpacked` may know."""
    return mlx_bits(config) is not None


def unpacked(stored: Checkpoint) -> UnpackedCheckpoint:
    """A view on a draft with its packed matrices as plain numbers.

    Raises:
        UsageError: no matrix is packed in a form that is known here.
        UnsupportedError: a matrix is packed in a form that cannot be unpacked.
        TensorMismatch: scales or biases of a matrix are missing or have another shape.
    """
    if isinstance(stored, GgufCheckpoint):
        packed = {name: _of_gguf(info) for name, info in stored.tensors.items() if not is_plain(info.dtype)}
        plain = with_keys(stored.config, {FILE_TYPE: REMOVED, f"{OWN}dtype": "bfloat16"})
    else:
        packed = dict(_of_fp8(stored) if read_fp8_format(stored) else _of_mlx(stored))
        plain = with_keys(stored.config, {**dict.fromkeys((*MLX_KEYS, *PACKING), REMOVED), "dtype": "bfloat16"})
    if not packed:
        raise UsageError(
            "--dequantize: no matrix of the draft is in FP8, packed by MLX, or in a quantised type of GGUF",
            id="nothing-packed",
            path=stored.path,
            field="--dequantize",
            hint="leave out --dequantize",
        )
    return UnpackedCheckpoint(stored, packed, plain)


def _of_gguf(info: TensorInfo) -> PackedMatrix:
    kind = TYPES[TYPE_NUMBERS[info.dtype]]
    compute = GGUF_TYPES.get(info.dtype) or _by_package(info)
    row_bytes = info.shape[-1] // kind.block * kind.num_bytes

    def unpack(begin: int, end: int) -> "NDArray[Any]":
        import numpy as np

        data = _read(info, begin * row_bytes, end * row_bytes)
        blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, kind.num_bytes)
        return compute(blocks).reshape(end - begin, info.shape[-1])

    return PackedMatrix(info, info.shape, info.dtype, unpack)


def _q8_0(blocks: "NDArray[Any]") -> "NDArray[Any]":
    import numpy as np

    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return scales * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: "NDArray[Any]") -> "NDArray[Any]":
    import numpy as np

    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    return scales * (codes.astype(np.float32) - np.float32(8))


GGUF_TYPES: "Mapping[str, Callable[[NDArray[Any]], NDArray[Any]]]" = {"Q8_0": _q8_0, "Q4_0": _q4_0}
"""Quantised type -> the function from its blocks [number of blocks, bytes] to numbers."""


def _by_package(info: TensorInfo) -> "Callable[[NDArray[Any]], NDArray[Any]]":
    """The function of the package gguf for a type.

    Raises:
        UnsupportedError: the package is absent, or does not know the type.
    """
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise UnsupportedError(
            f"{info.name} is {info.dtype}, which dflash unpacks only with the package gguf",
            id="type-needs-gguf",
            path=info.file,
            found=info.dtype,
            hint="pip install 'dflash-cli[gguf]'",
        ) from None
    number = GGMLQuantizationType(TYPE_NUMBERS[info.dtype])

    def compute(blocks: "NDArray[Any]") -> "NDArray[Any]":
        try:
            found: NDArray[Any] = quants.dequantize(blocks, number)
        except NotImplementedError:
            text = f"{info.name} is {info.dtype}, which the package gguf does not unpack"
            raise UnsupportedError(text, id="type-not-unpacked", path=info.file, found=info.dtype) from None
        return found

    return compute


def _of_mlx(stored: Checkpoint) -> Iterator[tuple[str, PackedMatrix]]:
    """The matrices that MLX packed, by name."""
    if mlx_bits(stored.config) is None:
        return
    stated = next(value for value in (as_object(stored.config.get(key)) for key in MLX_KEYS) if "bits" in value)
    for name, info in stored.tensors.items():
        module = name.removesuffix(".weight")
        if name != module and f"{module}.scales" in stored.tensors:
            own = stated.get(module)
            yield name, _mlx_matrix(stored, info, module, {**stated, **as_object(own)})


def _mlx_matrix(stored: Checkpoint, info: TensorInfo, module: str, stated: Mapping[str, Any]) -> PackedMatrix:
    bits, group, mode = stated.get("bits"), stated.get("group_size"), stated.get("mode", "affine")
    if mode != "affine" or bits not in MLX_BITS or not is_int(group) or group < 1:
        text = f"{info.name}: MLX packed it with mode {mode}, bits {bits}, group_size {group}"
        expected = f"mode affine, bits {', '.join(map(str, MLX_BITS))}"
        raise UnsupportedError(text, id="mlx-form", path=info.file, field=info.name, found=mode, expected=expected)
    scales, biases = (stored.tensors.get(f"{module}.{part}") for part in ("scales", "biases"))
    per_word = WORD_BITS // bits
    width = info.shape[-1] * per_word if len(info.shape) == 2 else 0
    grid = (info.shape[0], width // group) if width and width % group == 0 else None
    for part, found in (("scales", scales), ("biases", biases)):
        shape = None if found is None else found.shape
        if grid is None or shape != grid or info.dtype != "U32":
            name = f"{module}.{part}"
            expected = f"{list(grid) if grid else 'a matrix'} for {info.dtype} {list(info.shape)}"
            raise TensorMismatch(wrong={name: (str(None if shape is None else list(shape)), expected)}, path=info.file)
    assert scales is not None
    assert biases is not None
    parts = (scales, biases)

    def unpack(begin: int, end: int) -> "NDArray[Any]":
        import numpy as np

        words = np.frombuffer(_rows(info, begin, end), dtype="<u4").reshape(end - begin, -1)
        shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
        codes = (words[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
        grouped = codes.reshape(end - begin, -1, group).astype(np.float32)
        scale, bias = (_floats(_rows(part, begin, end), part) for part in parts)
        rows = end - begin
        found: NDArray[Any] = grouped * scale.reshape(rows, -1, 1) + bias.reshape(rows, -1, 1)
        return found.reshape(rows, width)

    names = tuple(part.name for part in parts)
    return PackedMatrix(info, (info.shape[0], width), f"MLX, {bits} bits", unpack, names)


def _of_fp8(stored: Checkpoint) -> Iterator[tuple[str, PackedMatrix]]:
    """The matrices in FP8, by name."""
    form = refuse_unless_fp8(stored)
    assert form is not None
    for name, names in fp8_matrices(stored, stored.tensors).items():
        info, scales = stored.tensors[name], stored.tensors[names.scales]
        if len(info.shape) != 2:
            text = f"{name} is a stack of matrices in FP8, which --dequantize does not unpack"
            raise UnsupportedError(text, id="fp8-stack", path=info.file, field=name, found=list(info.shape))
        parts = (names.scales,) if names.input_scale is None else (names.scales, names.input_scale)
        yield name, PackedMatrix(info, info.shape, "FP8", partial(_fp8_rows, info, scales, form.block), parts)


def _fp8_rows(
    info: TensorInfo, scales: TensorInfo, block: tuple[int, int] | None, begin: int, end: int
) -> "NDArray[Any]":
    """Rows [begin, end) of a matrix in FP8, in float32."""
    import numpy as np
    import torch

    codes = torch.frombuffer(bytearray(_rows(info, begin, end)), dtype=torch.float8_e4m3fn)
    numbers = codes.float().numpy().reshape(end - begin, -1)
    scale = _floats(_read(scales, 0, scales.num_bytes), scales)
    if block is not None:
        grid = scale.reshape(scales.shape)[np.arange(begin, end) // block[0]]
        scale = np.repeat(grid, block[1], axis=1)[:, : numbers.shape[1]]
    elif scale.size > 1:
        scale = scale[begin:end, None]
    found: NDArray[Any] = numbers * scale
    return found


def _floats(data: bytes, info: TensorInfo) -> "NDArray[Any]":
    """Numbers of a plain element type in float32."""
    import numpy as np

    if info.dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    if info.dtype not in ("F16", "F32"):
        text = f"{info.name} is {info.dtype}, expected BF16, F16 or F32"
        raise UnsupportedError(text, id="mlx-form", path=info.file, field=info.name, found=info.dtype)
    return np.frombuffer(data, dtype="<f2" if info.dtype == "F16" else "<f4").astype(np.float32)


def _rows(info: TensorInfo, begin: int, end: int) -> bytes:
    row_bytes = info.num_bytes // info.shape[0]
    return _read(info, begin * row_bytes, end * row_bytes)


def _read(info: TensorInfo, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of a stored tensor."""
    return read_range(info.file, info.begin + begin, info.begin + end, info.name)
