"""The tensor that makes a target's logits NaN. It is searched only after such logits were seen. Needs no torch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import NON_FINITE, CheckpointError, FileUnreadable
from dflash_runtime.read_files import read_range

CHUNK_BYTES = 16 * 2**20

EXPONENTS: Mapping[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80_0000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
    "F8_E8M0": ("u1", 0xFF),
}
"""Element type -> the integers that hold its bits, and the bits that are all set in NaN and infinite numbers only."""


class NonFiniteWeights:
    """The first tensor of a checkpoint with NaN or infinite numbers. All weights are read when it is first needed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def first(self) -> TensorInfo | None:
        """The tensor as its file names it; None if all numbers are finite, or a file is gone meanwhile."""
        try:
            return next(filter(_has_non_finite, self._checkpoint.tensors.values()), None)
        except (CheckpointError, FileUnreadable):
            return None

    def error(self, where: str) -> CheckpointError:
        """Return the error about logits that are not finite. `where` says which logits."""
        tensor = self.first
        if tensor is None:
            return CheckpointError(
                f"{where}, and the weights are finite: a value is too large for the number format of the run",
                id=NON_FINITE, path=self._checkpoint.path, expected="finite logits",
                hint="run in another number format: --dtype float32",
            )  # fmt: skip
        return CheckpointError(
            f"{where}, because {tensor.name} holds NaN or infinite numbers", id=NON_FINITE,
            path=tensor.file, field=tensor.name, expected="finite numbers", hint="export the weights again",
        )  # fmt: skip


@contextmanager
def naming_tensor(checkpoint: Checkpoint) -> Iterator[None]:
    """Name the tensor that holds NaN in errors about logits that are not finite."""
    try:
        yield
    except CheckpointError as error:
        if error.id != NON_FINITE:
            raise
        raise NonFiniteWeights(checkpoint).error(error.message) from error


def _has_non_finite(info: TensorInfo) -> bool:
    import numpy as np

    if info.dtype not in EXPONENTS:
        return False
    kind, mask = EXPONENTS[info.dtype]
    for begin in range(info.begin, info.end, CHUNK_BYTES):
        data = read_range(info.file, begin, min(begin + CHUNK_BYTES, info.end), info.name)
        bits = np.frombuffer(data, dtype=kind)
        if bool(((bits & np.array(mask, kind)) == mask).any()):
            return True
    return False
