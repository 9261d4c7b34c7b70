"""Which tensors of a draft's file the runtime loads. Needs no torch for the families of `layout.py`."""

from dflash_runtime.checkpoint.layout import HEAD, owned_shapes, select_tensors
from dflash_runtime.checkpoint.pair import DraftLike
from dflash_runtime.checkpoint.quantised.fp8_format import fp8_matrices, refuse_packed_unless_fp8, scale_tensors
from dflash_runtime.checkpoint.stored.element_types import refuse_wrong_dtypes
from dflash_runtime.checkpoint.stored.files import MASK_FILE
from dflash_runtime.errors import UnsupportedError

MASK_EMBEDDINGS = ("mask_embedding.pt", MASK_FILE)
"""Files with a learned embedding of the mask token, which replaces the target's."""


def owned_tensors(source: DraftLike) -> tuple[str, ...]:
    """Return the names of the tensors that a draft owns, from the headers. The runtime loads only these.

    Raises:
        UnsupportedError: another quantization than FP8, a learned mask embedding, or a family that is not registered.
        TensorMismatch: lists all missing, unexpected and misshapen tensors, or all matrices of integers.
    """
    checkpoint = source.checkpoint
    refuse_packed_unless_fp8(checkpoint)
    for name in MASK_EMBEDDINGS:
        if (checkpoint.path / name).exists():
            raise UnsupportedError(
                "a learned mask embedding, which this runtime does not apply",
                id="mask-embedding",
                path=checkpoint.path / name,
                hint="measure acceptance in the engine that the draft was trained for",
            )
    scales = scale_tensors(checkpoint)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items() if name not in scales}
    expected = owned_shapes(source.config)
    if HEAD not in expected and HEAD in fp8_matrices(checkpoint, [HEAD] if HEAD in shapes else []):
        # A head in FP8 is the draft's own: the target's head, rounded.
        expected = {**expected, HEAD: (source.config.draft_vocab_size, source.config.hidden_size)}
    names = select_tensors(expected, shapes, path=checkpoint.path).load
    refuse_wrong_dtypes((checkpoint.tensors[name] for name in names), checkpoint.path)
    return names
