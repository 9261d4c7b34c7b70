"""One safetensors file of a dump: `hidden_states` [T, L, H] and `token_ids` [N], checked by its header."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.acceptance.dumps.dump_format import HIDDEN, TOKENS
from dflash_runtime.checkpoint.files import TensorInfo, read_header, refuse_escape
from dflash_runtime.errors import CheckpointError

if TYPE_CHECKING:
    import torch

FLOATS = ("F64", "F32", "BF16", "F16")


def read_shapes(file: Path) -> dict[str, TensorInfo]:
    """The two tensors' headers.

    Raises:
        CheckpointError: the file is cut off, lacks one of them, or has one of another kind.
    """
    refuse_escape(file.parent, file)
    infos = read_header(file)
    for name, num_axes, dtypes in ((HIDDEN, 3, FLOATS), (TOKENS, 1, ("I64", "I32"))):
        info = infos.get(name)
        if info is None:
            raise CheckpointError(f"has no tensor {name} (it has {', '.join(infos) or 'none'})", path=file)
        if info.dtype not in dtypes or len(info.shape) != num_axes:
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}, expected {num_axes} axes of {' or '.join(dtypes)}",
                path=file,
            )
    return infos


def expect_shape(info: TensorInfo, expected: tuple[int, ...]) -> None:
    """Refuse a tensor of another shape than the dump says.

    Raises:
        CheckpointError: naming file and tensor.
    """
    if info.shape != expected:
        raise CheckpointError(f"{info.name} is {list(info.shape)}, expected {list(expected)}", path=info.file)


def read_tokens(file: Path) -> tuple[tuple[int, ...], Mapping[str, str]]:
    """The token ids, and the header's metadata."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as reader:
        tokens: Any = reader.get_tensor(TOKENS)
        return tuple(tokens.tolist()), reader.metadata() or {}


def rows_reader(file: Path) -> "Callable[[], torch.Tensor]":
    """What reads the hidden states, when they are wanted."""

    def read() -> "torch.Tensor":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as reader:
            tensor: torch.Tensor = reader.get_tensor(HIDDEN)
            return tensor

    return read
