"""The payload of a request that moves from one engine to another, and the checks before the other engine uses it.

KV travels in whole pages. The last page may be partly full. Each model has one tensor `[P, L, 2, page_size, W]`, in
which a page is one contiguous piece with the keys and values of every layer. Rows that are not committed are zeros. A
target with its own cache sends state tensors instead of pages. The random number of a sampled token depends only on the
seed and the token's position, so the receiver can continue sampling from the seed and the lengths.

Axis letters: P pages, L layers, W elements of a row's keys in the widest layer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dflash_runtime.checkpoint.stored.digests import digest_value
from dflash_runtime.checkpoint.stored.safetensors_header import DTYPE_BYTES
from dflash_runtime.documents import HIDDEN, INLINE, OPTIONAL, Limits, from_json, to_json
from dflash_runtime.errors import HandoffMismatch, InvalidConfig, InvalidHandoff
from dflash_runtime.json_values import as_object
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.notices import Notice
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.sampling_params import INT64, SamplingParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any  # documents leave out the field with tensors, so readers of headers need no torch

TARGET_PAGES, DRAFT_PAGES = "target", "draft"
"""Names of the tensors with the KV pages of the two models."""

STATE = "state."
"""Prefix of the names of state tensors."""

DtypeName = Literal["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "bool"]
STORED_DTYPES: Mapping[DtypeName, str] = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "int64": "I64", "int32": "I32", "bool": "BOOL",
}  # fmt: skip
"""dtype of a payload tensor -> its name in safetensors files."""

Count = Annotated[int, Limits(least=0)]

MAX_AXES = 16
MAX_ELEMENTS = 2**48
"""The most elements of a tensor, with empty axes counted as one: far more than any KV has, and safe in 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """A request after its prefill: the prompt, the output so far, and the KV of its committed rows `[0, kv_len)`.

    A hand-off without output tokens has only the first rows of a prompt. The receiver prefills the rest of the prompt,
    with its own parameters and seed.
    """

    key: str
    fingerprint: Annotated[Mapping[str, Any], "fields of the sender's fingerprint"]
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    params: Annotated[SamplingParams, "the receiver continues with them"]
    seed: Annotated[int, Limits(least=INT64.start, below=INT64.stop), "the receiver continues with it"]
    num_rows: Annotated[Mapping[str, Count], "complete rows of each model's KV"] = field(default_factory=dict)
    state_values: Annotated[Mapping[str, Any], "parts of a target's own cache that are not tensors"] = field(
        default_factory=dict
    )
    finish_reason: Annotated[FinishReason | None, "set if the request ended at the sender"] = None
    note: Annotated[Mapping[str, Any], "data of the sender, which the engine ignores"] = field(default_factory=dict)
    tensors: Annotated[Mapping[str, Tensor], HIDDEN] = field(default_factory=dict)

    @property
    def kv_len(self) -> int:
        """Rows of true KV: at most one for each token before the last. The receiver runs the last token."""
        most = len(self.prompt_token_ids) + len(self.output_token_ids) - 1
        return min(most, *self.num_rows.values()) if self.is_beginning and self.num_rows else most

    @property
    def is_beginning(self) -> bool:
        """Whether no token was generated yet, so that the receiver still prefills the rest of the prompt."""
        return not self.output_token_ids

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def header(self) -> "HandoffHeader":
        """The hand-off without the content of its tensors."""
        specs = {name: TensorSpec.of(tensor) for name, tensor in self.tensors.items()}
        return HandoffHeader(handoff=replace(self, tensors={}), tensors=specs)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Handoff":
        """The same hand-off with other tensors."""
        return replace(self, tensors=tensors)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a payload: its dtype, its shape, and the checksum of its bytes."""

    dtype: DtypeName
    shape: tuple[Count, ...]
    crc32: Annotated[int | None, OPTIONAL, "CRC-32 of the bytes, for tensors on the host"] = None

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        """The dtype and the shape of a tensor, without a checksum."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if len(self.shape) > MAX_AXES or math.prod(max(size, 1) for size in self.shape) > MAX_ELEMENTS:
            expected = f"at most {MAX_AXES} axes and {MAX_ELEMENTS} elements"
            raise InvalidConfig("shape", list(self.shape), expected, id="wrong-value")

    @property
    def torch_dtype(self) -> "torch.dtype":
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def stored_dtype(self) -> str:
        """Its dtype's name in safetensors files."""
        return STORED_DTYPES[self.dtype]

    @property
    def num_bytes(self) -> int:
        return int(DTYPE_BYTES[self.stored_dtype]) * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffHeader:
    """A hand-off without the content of its tensors: `handoff.json`, and the header of an offer."""

    KIND: ClassVar[str] = "handoff"
    VERSION_KEY: ClassVar[str] = "version"
    SCHEMA_VERSION: ClassVar[int] = 2

    handoff: Annotated[Handoff, INLINE]
    tensors: Annotated[Mapping[str, TensorSpec], "by name"]
    digest: Annotated[str, "BLAKE2b-128 of the other keys, as JSON with sorted keys"] = ""

    @property
    def sealed(self) -> "HandoffHeader":
        """The header with its digest."""
        return replace(self, digest=_digest(to_json(self)))

    @classmethod
    def read(cls, value: object) -> "HandoffHeader":
        """The header of a JSON value.

        Raises:
            InvalidHandoff: names the key that is missing, unknown or wrong, or the header differs from its digest.
            UnsupportedError: a later release wrote it.
        """
        header = from_json(cls, value, error=InvalidHandoff)
        if header.digest != _digest(as_object(value)):
            raise InvalidHandoff("damaged, the header differs from its digest", id="header-damaged", field="digest")
        return header


def _digest(header: Mapping[str, Any]) -> str:
    return digest_value({name: value for name, value in header.items() if name != "digest"}, digest_size=16)


def check_tokens(handoff: Handoff, vocab_size: int, path: object = None) -> None:
    """Refuse token ids outside the vocabulary, and more output tokens than a prefill makes.

    Raises:
        InvalidHandoff: names the field and the value found.
    """
    for name in ("prompt_token_ids", "output_token_ids"):
        wrong = next((token for token in getattr(handoff, name) if not 0 <= token < vocab_size), None)
        if wrong is not None:
            expected = f"ids in [0, {vocab_size})"
            raise InvalidHandoff(id="token-id-out-of-range", path=path, field=name, found=wrong, expected=expected)
    num_tokens = len(handoff.output_token_ids)
    if num_tokens > 1:
        raise InvalidHandoff(
            id="too-many-tokens", path=path, field="output_token_ids", found=num_tokens, expected="at most one token"
        )


def find_problems(handoff: Handoff, here: Fingerprint, expected: Mapping[str, tuple[int, ...]]) -> list[Notice]:
    """Why an engine cannot use a hand-off: problems of tensors first, then differences of fingerprints.

    `here` is the engine's fingerprint, and `expected` has the shapes of its tensors. Empty if the engine can use it.
    """
    found = [_tensor_problem(handoff, name, shape) for name, shape in expected.items()]
    return [problem for problem in found if problem is not None] + here.notices(handoff.fingerprint)


def concerns_target(problem: Notice) -> bool:
    """Whether a problem of a hand-off is about the target, so that the text may be wrong."""
    name = problem.field or ""
    return name == TARGET_PAGES or name.startswith((f"{TARGET_PAGES} ", STATE))


def check_handoff(
    handoff: Handoff,
    here: Fingerprint,
    expected: Mapping[str, tuple[int, ...]],
    *,
    path: object = None,
    hint: str = "run both sides with the same pair and settings",
) -> None:
    """Refuse a hand-off that this engine cannot use; see `find_problems`. `path` is its folder, for the error.

    Raises:
        HandoffMismatch: names all problems.
    """
    problems = find_problems(handoff, here, expected)
    if problems:
        raise HandoffMismatch(
            f"hand-off {handoff.key} does not fit this engine: {'; '.join(problems)}",
            id="handoff-does-not-fit", path=path, field="key", found=handoff.key, hint=hint,
        )  # fmt: skip


def _tensor_problem(handoff: Handoff, name: str, shape: Sequence[int]) -> Notice | None:
    found = handoff.tensors.get(name)
    what = "the draft's context KV" if name == DRAFT_PAGES else f"{name} KV"
    if found is None:
        return Notice(f"rows of {what} are missing", id="tensor-missing", field=name)
    if len(found.shape) == len(shape) and found.shape[1] != shape[1]:
        return Notice(f"{what} has {found.shape[1]} layers, expected {shape[1]}", id="layers-differ", field=name)
    if tuple(found.shape) != tuple(shape):
        return Notice(f"{what} has shape {list(found.shape)}, expected {list(shape)}", id="shape-differs", field=name)
    num_rows = handoff.num_rows.get(name, 0)
    if num_rows != handoff.kv_len:
        text = f"{what} has {num_rows} of {handoff.kv_len} rows: it was sent before they were written"
        return Notice(text, id="rows-missing", field=name)
    return None
