"""Which element types the weights of a model may have."""

from collections.abc import Iterable
from pathlib import Path

from dflash_runtime.checkpoint.layout import PACKED_DTYPES
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import TensorMismatch


def wrong_dtypes(infos: Iterable[TensorInfo]) -> dict[str, tuple[str, str]]:
    """Return name -> (found, expected) element type of matrices that hold neither floats nor packed numbers."""
    return {
        info.name: (info.dtype, "F16, BF16, F32 or F64")
        for info in infos
        if len(info.shape) > 1 and not info.is_floating and info.dtype not in PACKED_DTYPES
    }


def refuse_wrong_dtypes(infos: Iterable[TensorInfo], path: Path) -> None:
    """Refuse tensors of `wrong_dtypes`.

    Raises:
        TensorMismatch: lists all of them.
    """
    wrong = wrong_dtypes(infos)
    if wrong:
        raise TensorMismatch(wrong=wrong, path=path)
