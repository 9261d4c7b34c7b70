"""Element types of vectors: readers of some dialects need vectors in F32, whatever the type of the matrices.

Widening a vector from BF16 or F16 to F32 is exact, and a key of the result names the type before it, so that the way
back gives the same bytes.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_cli.formats.dialect import Format, Json
from dflash_cli.formats.fields import look_up, with_keys
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.errors import MISSING, LossyConversion
from dflash_runtime.read_files import read_range

if TYPE_CHECKING:
    import torch

WIDE = "F32"
NARROW = ("BF16", "F16")
FLOATS = (*NARROW, WIDE)


def with_vector_types(
    draft: DraftCheckpoint, tensors: Sequence[WrittenTensor], config_json: Json, result: Format
) -> tuple[list[WrittenTensor], Json]:
    """The tensors of a result with vectors in the type that its readers need, and the config with the type before.

    Raises:
        LossyConversion: the vectors have several types, or one that cannot be widened.
    """
    source_key, key = draft.format.vector_type_key, result.vector_type_key
    if source_key and not key:
        return _restored(draft, tensors, look_up(draft.checkpoint.config, source_key)), config_json
    if key and not source_key:
        return _widened(tensors, config_json, result)
    if not key:
        return list(tensors), config_json
    before = look_up(draft.checkpoint.config, source_key)
    is_narrow = {tensor.name for tensor in tensors if len(tensor.shape) == 1 and tensor.dtype in NARROW}
    found = [_converted(tensor, WIDE) if tensor.name in is_narrow else tensor for tensor in tensors]
    return found, config_json if before is MISSING else with_keys(config_json, {key: before})


def _widened(tensors: Sequence[WrittenTensor], config_json: Json, result: Format) -> tuple[list[WrittenTensor], Json]:
    kinds = {tensor.dtype for tensor in tensors if len(tensor.shape) == 1}
    strange = next((tensor for tensor in tensors if len(tensor.shape) == 1 and tensor.dtype not in FLOATS), None)
    if len(kinds) > 1 or strange is not None:
        field = strange.name if strange is not None else "norms"
        text = f"{field}: vectors of the types {', '.join(sorted(kinds))}; {result.title} holds vectors in {WIDE}"
        raise LossyConversion(text, id="vector-types", field=field, found=sorted(kinds))
    before = kinds.pop() if kinds else WIDE
    narrow = {tensor.name for tensor in tensors if len(tensor.shape) == 1 and before != WIDE}
    found = [_converted(tensor, WIDE) if tensor.name in narrow else tensor for tensor in tensors]
    return found, with_keys(config_json, {result.vector_type_key: before})


def _restored(draft: DraftCheckpoint, tensors: Sequence[WrittenTensor], stated: object) -> list[WrittenTensor]:
    """The tensors with vectors in the stated type, if that is exact.

    A file that does not state this type has vectors of the type of its matrices, if all have one.
    """
    matrices = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    before = str(stated) if stated in FLOATS else matrices.pop() if len(matrices) == 1 else WIDE
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
            data = read_range(tensor.file, tensor.begin, tensor.end, tensor.name)
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
