"""One safetensors file of a dump, with `hidden_states` [T, L, H] and `token_ids` [N]. Shapes come from its header."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.acceptance.dumps.dump_format import HIDDEN, TOKENS
from dflash_runtime.checkpoint.stored.digests import hash_file
from dflash_runtime.checkpoint.stored.files import refuse_escape
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo, read_header
from dflash_runtime.errors import MISSING, CheckpointError
from dflash_runtime.read_files import open_tensors

if TYPE_CHECKING:
    import torch

FLOATS = ("F64", "F32", "BF16", "F16")


def read_shapes(file: Path) -> dict[str, TensorInfo]:
    """Return the headers of the two tensors.

    Raises:
        CheckpointError: the file is cut off, lacks a tensor, or has a tensor of another dtype or number of axes.
    """
    refuse_escape(file.parent, file)
    infos = read_header(file)
    for name, num_axes, dtypes in ((HIDDEN, 3, FLOATS), (TOKENS, 1, ("I64", "I32"))):
        info = infos.get(name)
        if info is None:
            raise CheckpointError(
                f"lacks the tensor {name}; found {', '.join(infos) or 'an empty file'}",
                id="missing-tensor",
                path=file,
                field=name,
                found=MISSING,
            )
        if info.dtype not in dtypes or len(info.shape) != num_axes:
            raise CheckpointError(
                id="wrong-tensor",
                path=file,
                field=name,
                found=f"{info.dtype} {list(info.shape)}",
                expected=f"{num_axes} axes of {' or '.join(dtypes)}",
            )
    return infos


def expect_shape(info: TensorInfo, expected: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape than the dump's.

    Raises:
        CheckpointError: naming file and tensor.
    """
    if info.shape != expected:
        raise CheckpointError(
            id="wrong-shape", path=info.file, field=info.name, found=list(info.shape), expected=str(list(expected))
        )


def read_tokens(file: Path) -> tuple[tuple[int, ...], Mapping[str, str]]:
    """Return the token ids and the header's metadata."""
    with open_tensors(file) as reader:
        tokens: Any = reader.get_tensor(TOKENS)
        return tuple(tokens.tolist()), reader.metadata() or {}


def rows_reader(file: Path, sha256: str | None = None) -> "Callable[[], torch.Tensor]":
    """Return a function that loads the hidden states when it is called, if the file has this digest."""

    def read() -> "torch.Tensor":
        found = hash_file(file) if sha256 is not None else None
        if found != sha256:
            expected = f"{sha256}, the digest in the manifest"
            raise CheckpointError(id="file-changed", path=file, field="sha256", found=found, expected=expected)
        with open_tensors(file) as reader:
            tensor: torch.Tensor = reader.get_tensor(HIDDEN)
            return tensor

    return read
