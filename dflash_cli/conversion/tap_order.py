"""Put a draft's taps in ascending order, once each, without changing what it computes.

The context projection reads the tapped features side by side, so another order of the taps is another order of the
column blocks of `fc.weight`, and a tap named twice adds its two blocks. Engines sort the taps and drop repetitions,
and leave `fc.weight` as it is. Source: vLLM 0.33.0 model_executor/models/interfaces.py.

`fc.weight` is [H, T * F] with T taps of F features; it is read and made in groups of rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_runtime.checkpoint.files import TensorInfo
from dflash_runtime.checkpoint.layout import PACKED_DTYPES
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import CheckpointError, LossyConversion, UnsupportedError

if TYPE_CHECKING:
    import torch

PROJECTION = "fc.weight"
PIECE_BYTES = 8 * 1024 * 1024


def normalise_taps(
    config: DraftConfig, tensors: Sequence[WrittenTensor], *, allow_rounding: bool
) -> tuple[DraftConfig, list[WrittenTensor], list[str]]:
    """The draft with its taps in order, its tensors with the projection that belongs to them, and warnings.

    Raises:
        LossyConversion: a repeated tap whose blocks do not add up exactly in the file's element type.
        UnsupportedError: packed weights, or repeated taps in an element type that cannot be added.
    """
    order = tuple(sorted(set(config.target_layer_ids)))
    groups = tuple(tuple(at for at, tap in enumerate(config.target_layer_ids) if tap == layer) for layer in order)
    projection = _plain_projection(config, tensors)
    blocks = _Blocks(projection, groups, config.num_taps)
    warnings: list[str] = []
    if any(len(group) > 1 for group in groups):
        if projection.dtype not in ("F64", "F32", "BF16", "F16"):
            raise UnsupportedError(
                f"{PROJECTION} is {projection.dtype}: the columns of a layer that is tapped twice cannot be added"
            )
        warnings = _check_rounding(blocks, allow_rounding=allow_rounding)
    made = MadeTensor(
        PROJECTION,
        projection.dtype,
        (projection.shape[0], projection.shape[1] // config.num_taps * len(order)),
        projection.file,
        blocks.pieces,
    )
    replaced = [made if tensor is projection else tensor for tensor in tensors]
    return replace(config, target_layer_ids=order), replaced, warnings


def _plain_projection(config: DraftConfig, tensors: Sequence[WrittenTensor]) -> TensorInfo:
    """The stored projection, whose blocks can be told apart."""
    shape = (config.hidden_size, config.num_taps * config.feature_size)
    found = next((tensor for tensor in tensors if tensor.name == PROJECTION), None)
    if not isinstance(found, TensorInfo) or found.shape != shape or found.dtype in PACKED_DTYPES:
        raise UnsupportedError(f"{PROJECTION}: packed weights cannot be reordered to match the tapped layers")
    return found


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Column blocks of a stored projection; `groups` lists, for each block of the result, those it is the sum of."""

    info: TensorInfo
    groups: tuple[tuple[int, ...], ...]
    num_blocks: int

    def rows(self) -> Iterator[bytes]:
        """The stored rows, some at a time."""
        row_bytes = self.info.num_bytes // self.info.shape[0]
        at_once = max(1, PIECE_BYTES // row_bytes) * row_bytes
        remaining = self.info.num_bytes
        with self.info.file.open("rb") as stream:
            stream.seek(self.info.begin)
            while remaining:
                piece = stream.read(min(at_once, remaining))
                if not piece:
                    raise CheckpointError(f"ended while {PROJECTION} was read", path=self.info.file)
                remaining -= len(piece)
                yield piece

    def pieces(self) -> Iterator[bytes]:
        """The bytes of the result. Blocks that are only moved are never decoded."""
        moved = all(len(group) == 1 for group in self.groups)
        for rows in self.rows():
            yield self._move(rows) if moved else self._add(rows)[0]

    def _move(self, rows: bytes) -> bytes:
        width = self.info.num_bytes // self.info.shape[0] // self.num_blocks
        view = memoryview(rows)
        order = [group[0] for group in self.groups]
        starts = range(0, len(rows), width * self.num_blocks)
        return b"".join(view[row + at * width : row + (at + 1) * width] for row in starts for at in order)

    def _add(self, rows: bytes) -> tuple[bytes, float]:
        """Sums in float64, rounded once to the stored type; and the largest rounding."""
        import torch

        stored = _torch_dtype(self.info.dtype)
        blocks = torch.frombuffer(bytearray(rows), dtype=stored).view(-1, self.num_blocks, self._width).double()
        exact = torch.stack([blocks[:, list(group)].sum(dim=1) for group in self.groups], dim=1)
        rounded = exact.to(stored)
        error = float((rounded.double() - exact).abs().max()) if exact.numel() else 0.0
        return rounded.contiguous().view(torch.uint8).numpy().tobytes(), error

    @property
    def _width(self) -> int:
        return self.info.shape[1] // self.num_blocks

    def largest_rounding(self) -> float:
        """How far a made element is from the exact sum."""
        return max((self._add(rows)[1] for rows in self.rows()), default=0.0)


def _check_rounding(blocks: _Blocks, *, allow_rounding: bool) -> list[str]:
    largest = blocks.largest_rounding()
    if largest == 0:
        return []
    message = (
        f"{PROJECTION}: the columns of a layer that is tapped twice add up to numbers that {blocks.info.dtype} rounds"
    )
    if not allow_rounding:
        raise LossyConversion(f"{message}, by up to {largest:g}", hint="--allow-lossy rounds them")
    return [f"{message}, by up to {largest:g}"]


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    return {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[name]
