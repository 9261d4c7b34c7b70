"""Write packed matrices of a draft as the numbers that they stand for."""

from collections.abc import Sequence

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.checkpoints.safetensors_writer import MadeTensor, WrittenTensor
from dflash_cli.checkpoints.unpacking import RESULT, UnpackedCheckpoint
from dflash_runtime.checkpoint.canonical_names import CanonicalCheckpoint
from dflash_runtime.errors import UnsupportedError


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
