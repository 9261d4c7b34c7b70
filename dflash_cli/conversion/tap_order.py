"""Sort a draft's tapped layers, list each once, and reorder `fc.weight` to match. The draft computes the same.

`fc.weight` [H, T * F] has a block of F columns for each of the T taps. Sorting the taps permutes the blocks, and the
blocks of a repeated tap are added. Engines sort the taps and drop repeats without changing `fc.weight`.
Source: vLLM 0.33.0 model_executor/models/interfaces.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_runtime.checkpoint.layout import PACKED_DTYPES
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import CheckpointError, LossyConversion, UnsupportedError
from dflash_runtime.notices import Notice
from dflash_runtime.read_files import reading

if TYPE_CHECKING:
    import torch

PROJECTION = "fc.weight"
PIECE_BYTES = 8 * 1024 * 1024


def normalise_taps(
    config: DraftConfig, tensors: Sequence[WrittenTensor], *, allow_rounding: bool
) -> tuple[DraftConfig, list[WrittenTensor], list[Notice]]:
    """The config with sorted taps, the tensors with the reordered projection, and warnings.

    Raises:
        LossyConversion: the element type rounds the sum of a repeated tap's blocks.
        UnsupportedError: quantised weights, or repeated taps in an element type without addition.
    """
    order = tuple(sorted(set(config.target_layer_ids)))
    groups = tuple(tuple(at for at, tap in enumerate(config.target_layer_ids) if tap == layer) for layer in order)
    projection = _plain_projection(config, tensors)
    blocks = _Blocks(projection, groups, config.num_taps)
    warnings: list[Notice] = []
    if any(len(group) > 1 for group in groups):
        if projection.dtype not in ("F64", "F32", "BF16", "F16"):
            text = f"{PROJECTION} is {projection.dtype}: the columns of a layer that is tapped twice cannot be added"
            raise UnsupportedError(text, id="taps-not-addable", field=PROJECTION, found=projection.dtype)
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
    """The stored projection, if its blocks have the expected shape."""
    shape = (config.hidden_size, config.num_taps * config.feature_size)
    found = next((tensor for tensor in tensors if tensor.name == PROJECTION), None)
    if not isinstance(found, TensorInfo) or found.shape != shape or found.dtype in PACKED_DTYPES:
        raise UnsupportedError(
            f"{PROJECTION}: quantised weights cannot be reordered to match the tapped layers",
            id="quantised-weights",
            field=PROJECTION,
        )
    return found


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Column blocks of a stored projection. A block of the result is the sum of a group of stored blocks."""

    info: TensorInfo
    groups: tuple[tuple[int, ...], ...]
    num_blocks: int

    def rows(self) -> Iterator[bytes]:
        """The stored rows, in pieces of whole rows."""
        row_bytes = self.info.num_bytes // self.info.shape[0]
        at_once = max(1, PIECE_BYTES // row_bytes) * row_bytes
        remaining = self.info.num_bytes
        with reading(self.info.file) as stream:
            stream.seek(self.info.begin)
            while remaining:
                piece = stream.read(min(at_once, remaining))
                if not piece:
                    text = f"ended while {PROJECTION} was read"
                    raise CheckpointError(text, id="source-shrank", path=self.info.file, field=PROJECTION)
                remaining -= len(piece)
                yield piece

    def pieces(self) -> Iterator[bytes]:
        """The bytes of the result. Blocks that are only permuted are not decoded."""
        moved = all(len(group) == 1 for group in self.groups)
        for rows in self.rows():
            yield self._move(rows) if moved else self.add(rows)[0]

    def _move(self, rows: bytes) -> bytes:
        width = self.info.num_bytes // self.info.shape[0] // self.num_blocks
        view = memoryview(rows)
        order = [group[0] for group in self.groups]
        starts = range(0, len(rows), width * self.num_blocks)
        return b"".join(view[row + at * width : row + (at + 1) * width] for row in starts for at in order)

    def add(self, rows: bytes) -> tuple[bytes, float]:
        """The sums of blocks, computed in float64 and rounded to the stored type, and the largest rounding error."""
        import torch

        stored = _torch_dtype(self.info.dtype)
        blocks = (
            torch.frombuffer(bytearray(rows), dtype=stored)
            .view(-1, self.num_blocks, self.info.shape[1] // self.num_blocks)
            .double()
        )
        exact = torch.stack([blocks[:, list(group)].sum(dim=1) for group in self.groups], dim=1)
        rounded = exact.to(stored)
        error = float((rounded.double() - exact).abs().max()) if exact.numel() else 0.0
        return rounded.contiguous().view(torch.uint8).numpy().tobytes(), error


def _check_rounding(blocks: _Blocks, *, allow_rounding: bool) -> list[Notice]:
    """A warning if the element type rounds the sums, or the refusal to round them."""
    largest, dtype = max((blocks.add(rows)[1] for rows in blocks.rows()), default=0.0), blocks.info.dtype
    if largest == 0:
        return []
    text = f"{PROJECTION}: {dtype} rounds the sums of the columns of a layer that is tapped twice, by up to {largest:g}"
    if not allow_rounding:
        hint = "--allow-lossy rounds them"
        raise LossyConversion(text, id="taps-rounded", field=PROJECTION, found=largest, expected="0", hint=hint)
    return [Notice(text, id="taps-rounded")]


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    return {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[name]
