"""Tensors on their way into and out of GGUF: llama.cpp needs vectors in F32, and unpacked matrices become bfloat16.

Widening a vector from BF16 or F16 to F32 is exact, and `dflash_cli.norms` in the metadata names the type before it, so
that the way back gives the same bytes. Source: ggml-org/llama.cpp conversion/base.py prepare_tensors, which writes
tensors with one dimension in F32.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_cli.checkpoints.unpacking import RESULT, UnpackedCheckpoint
from dflash_cli.formats.fields import look_up, with_keys
from dflash_cli.formats.gguf import NORMS
from dflash_runtime.checkpoint.canonical_names import CanonicalCheckpoint
from dflash_runtime.checkpoint.files import TensorInfo
from dflash_runtime.errors import LossyConversion, UnsupportedError

if TYPE_CHECKING:
    import torch

GGUF_FILE = "draft.gguf"
"""The name of the file in a converted draft's folder."""

WIDE = "F32"
NARROW = ("BF16", "F16")
FLOATS = (*NARROW, WIDE)


def with_unpacked(draft: DraftCheckpoint, tensors: Sequence[WrittenTensor]) -> list[WrittenTensor]:
    """The tensors of a result, with packed matrices as computed bfloat16."""
    checkpoint = draft.checkpoint
    stored = checkpoint.stored if isinstance(checkpoint, CanonicalCheckpoint) else checkpoint
    if not isinstance(stored, UnpackedCheckpoint):
        return list(tensors)
    found: list[WrittenTensor] = []
    for tensor in tensors:
        at = checkpoint.stored_rows(tensor.name)
        packed = stored.packed.get(at.stored)
        if packed is None or isinstance(tensor, MadeTensor):
            found.append(tensor)
            continue
        if at.rows is not None:
            text = f"{at.stored}: a fused projection that is packed ({packed.how}) is not split"
            raise UnsupportedError(text, id="fused-and-packed", field=at.stored)
        why = f"its numbers in bfloat16, unpacked from {packed.how}"
        found.append(MadeTensor(tensor.name, RESULT, packed.shape, tensor.file, packed.pieces, why))
    return found


def into_gguf(tensors: Sequence[WrittenTensor], config_json: dict[str, Any]) -> tuple[list[WrittenTensor], Any]:
    """The tensors of a GGUF file, with vectors in F32, and its metadata with their type before.

    Raises:
        LossyConversion: a tensor has a type that llama.cpp does not multiply, or the vectors have several types.
    """
    kinds = {tensor.dtype for tensor in tensors if len(tensor.shape) == 1}
    strange = next((tensor for tensor in tensors if len(tensor.shape) == 1 and tensor.dtype not in FLOATS), None)
    if len(kinds) > 1 or strange is not None:
        field = strange.name if strange is not None else "norms"
        text = f"{field}: vectors of the types {', '.join(sorted(kinds))}; GGUF holds vectors in F32"
        raise LossyConversion(text, id="vector-types", field=field, found=sorted(kinds))
    if kinds <= {WIDE}:
        stated = config_json if not kinds else with_keys(config_json, {NORMS: WIDE})
        return list(tensors), stated
    widened = [_converted(tensor, WIDE) if len(tensor.shape) == 1 else tensor for tensor in tensors]
    return widened, with_keys(config_json, {NORMS: kinds.pop()})


def out_of_gguf(draft: DraftCheckpoint, tensors: Sequence[WrittenTensor]) -> list[WrittenTensor]:
    """The tensors of a result without GGUF, with vectors in the type that they had before, if that is exact.

    A file that does not state this type has vectors of the type of its matrices, if all have one.
    """
    matrices = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    stated = look_up(draft.checkpoint.config, NORMS)
    before = stated if stated in FLOATS else matrices.pop() if len(matrices) == 1 else WIDE
    vectors = [tensor for tensor in tensors if isinstance(tensor, TensorInfo) and len(tensor.shape) == 1]
    is_exact = before in NARROW and all(
        tensor.dtype == WIDE and _is_exact(draft.checkpoint.load(tensor.name), before) for tensor in vectors
    )
    names = {tensor.name for tensor in vectors} if is_exact else set()
    return [_converted(tensor, before) if tensor.name in names else tensor for tensor in tensors]


def _converted(tensor: WrittenTensor, dtype: str) -> MadeTensor:
    """A vector in another element type."""

    def pieces() -> Iterator[bytes]:
        import torch

        if isinstance(tensor, MadeTensor):
            data = b"".join(tensor.pieces())
        else:
            with tensor.file.open("rb") as stream:
                stream.seek(tensor.begin)
                data = stream.read(tensor.num_bytes)
        values = torch.frombuffer(bytearray(data), dtype=_torch_dtype(tensor.dtype)).to(_torch_dtype(dtype))
        yield values.view(torch.uint8).numpy().tobytes()

    why = f"{dtype} instead of {tensor.dtype}, with the same values"
    return MadeTensor(tensor.name, dtype, tensor.shape, tensor.file, pieces, why)


def _is_exact(values: "torch.Tensor", dtype: str) -> bool:
    """Whether an element type holds the values of a vector without rounding."""
    import torch

    return torch.equal(values.to(_torch_dtype(dtype)).to(values.dtype), values)


def _torch_dtype(name: str) -> "torch.dtype":
    import torch

    return {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[name]
