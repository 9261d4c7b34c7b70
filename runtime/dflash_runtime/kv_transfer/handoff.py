"""The payload of a request that moves from one engine to another, and the checks before the other engine uses it.

KV travels in whole pages. The last page may be partly full. Each model has one tensor `[P, L, 2, page_size, W]`, in
which a page is one contiguous piece with the keys and values of every layer. Rows that are not committed are zeros. A
target with its own cache sends state tensors instead of pages. The random number of a sampled token depends only on the
seed and the token's position, so the receiver can continue sampling from the seed and the lengths.

Axis letters: P pages, L layers, W elements of a row's keys in the widest layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.errors import MISSING, HandoffMismatch, InvalidHandoff, RequestError
from dflash_runtime.json_values import is_int
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.notices import Notice
from dflash_runtime.scheduling.request import FinishReason, SamplingParams

VERSION = 1
"""Version of the header. A reader refuses other versions."""

TARGET_PAGES, DRAFT_PAGES = "target", "draft"
"""Names of the tensors with the KV pages of the two models."""

STATE = "state."
"""Prefix of the names of state tensors."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}
"""The dtypes of payload tensors, by their names in headers."""

FIELD_TYPES: Mapping[str, tuple[type, str]] = (
    {"key": (str, "a string"), "seed": (int, "an integer")}
    | dict.fromkeys(("prompt_token_ids", "output_token_ids"), (list, "a list of token ids"))
    | dict.fromkeys(("fingerprint", "params", "num_rows", "state_values", "note", "tensors"), (dict, "an object"))
)
"""The type of each header field, and its name in errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """A request after its prefill: the prompt, the output so far, and the KV of its committed rows `[0, kv_len)`.

    params          the parameters that the receiver continues with
    seed            the seed that the receiver continues with
    num_rows        how many rows of each model's KV were complete when they were taken
    state_values    the parts of a target's own cache that are not tensors
    finish_reason   set if the request ended at the sender, so that the receiver has nothing to do
    note            data of the sender, such as an id, which the receiver ignores

    A hand-off without output tokens has only the first rows of a prompt. The receiver prefills the rest of the prompt,
    with its own parameters and seed.
    """

    key: str
    fingerprint: Fingerprint
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    num_rows: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    state_values: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    note: Mapping[str, Any] = field(default_factory=dict)

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

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Handoff":
        """The same hand-off with other tensors."""
        return replace(self, tensors=tensors)

    def to_header(self) -> dict[str, Any]:
        """All fields except the content of the tensors, as a JSON object."""
        return {
            "kind": "handoff",
            "version": VERSION,
            "key": self.key,
            "fingerprint": dict(self.fingerprint.fields),
            "prompt_token_ids": list(self.prompt_token_ids),
            "output_token_ids": list(self.output_token_ids),
            "params": asdict(self.params),
            "seed": self.seed,
            "num_rows": dict(self.num_rows),
            "state_values": dict(self.state_values),
            "finish_reason": None if self.finish_reason is None else str(self.finish_reason),
            "note": dict(self.note),
            "tensors": {
                name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
                for name, tensor in self.tensors.items()
            },
        }

    @classmethod
    def read(cls, header: Any, tensors: Mapping[str, Tensor]) -> "Handoff":
        """The hand-off of a header and its tensors.

        Raises:
            InvalidHandoff: a field is missing or malformed.
        """
        check_header(header)
        return cls(
            key=header["key"],
            fingerprint=Fingerprint.read(header["fingerprint"]),
            prompt_token_ids=_ids(header, "prompt_token_ids"),
            output_token_ids=_ids(header, "output_token_ids"),
            params=_params(header["params"]),
            seed=header["seed"],
            num_rows=_num_rows(header["num_rows"]),
            tensors=tensors,
            state_values=header["state_values"],
            finish_reason=_finish_reason(header.get("finish_reason", MISSING)),
            note=header["note"],
        )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The dtype and shape of a tensor to be received."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def tensor_specs(header: Any) -> dict[str, TensorSpec]:
    """The tensors that a header describes, by name.

    Raises:
        InvalidHandoff: a description is malformed, or no payload has its dtype.
    """
    check_header(header)
    return {name: _tensor_spec(item, f"tensors.{name}") for name, item in header["tensors"].items()}


def check_header(header: Any) -> None:
    """Check that a JSON value is a header of this version, with fields of the right types.

    Raises:
        InvalidHandoff: names the wrong field.
    """
    values = header if isinstance(header, dict) else {}
    for name, expected in (("kind", "handoff"), ("version", VERSION)):
        if values.get(name) != expected:
            raise InvalidHandoff(field=name, found=values.get(name, MISSING), expected=repr(expected))
    for name, (kind, words) in FIELD_TYPES.items():
        found = values.get(name, MISSING)
        if not isinstance(found, kind) or isinstance(found, bool):
            raise InvalidHandoff(field=name, found=found, expected=words)


def find_problems(handoff: Handoff, here: Fingerprint, expected: Mapping[str, tuple[int, ...]]) -> list[Notice]:
    """Why an engine cannot use a hand-off: problems of tensors first, then differences of fingerprints.

    `here` is the engine's fingerprint, and `expected` has the shapes of its tensors. Empty if the engine can use it.
    """
    found = [_tensor_problem(handoff, name, shape) for name, shape in expected.items()]
    problems = [problem for problem in found if problem is not None]
    return problems + [Notice(text, id="fingerprint-differs") for text in here.differences(handoff.fingerprint)]


def check_handoff(handoff: Handoff, here: Fingerprint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a hand-off that this engine cannot use; see `find_problems`.

    Raises:
        HandoffMismatch: names all problems.
    """
    problems = find_problems(handoff, here, expected)
    if problems:
        raise HandoffMismatch(
            f"hand-off {handoff.key} does not fit this engine: {'; '.join(problems)}",
            id="handoff-does-not-fit", field="key", found=handoff.key,
            hint="run both sides with the same pair and settings",
        )  # fmt: skip


def _tensor_problem(handoff: Handoff, name: str, shape: Sequence[int]) -> Notice | None:
    found = handoff.tensors.get(name)
    what = "the draft's context KV" if name == DRAFT_PAGES else f"{name} KV"
    if found is None:
        return Notice(f"it has no rows of {what}", id="tensor-missing")
    if len(found.shape) == len(shape) and found.shape[1] != shape[1]:
        return Notice(f"{what} has {found.shape[1]} layers, expected {shape[1]}", id="layers-differ")
    if tuple(found.shape) != tuple(shape):
        return Notice(f"{what} has shape {list(found.shape)}, expected {list(shape)}", id="shape-differs")
    num_rows = handoff.num_rows.get(name, 0)
    if num_rows != handoff.kv_len:
        text = f"{what} has {num_rows} of {handoff.kv_len} rows: it was sent before they were written"
        return Notice(text, id="rows-missing")
    return None


def _tensor_spec(item: Any, name: str) -> TensorSpec:
    values = item if isinstance(item, dict) else {}
    dtype, shape = values.get("dtype", MISSING), values.get("shape", MISSING)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InvalidHandoff(field=f"{name}.dtype", found=dtype, expected=f"one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(is_int(size) and size >= 0 for size in shape):
        raise InvalidHandoff(field=f"{name}.shape", found=shape, expected="a list of sizes of 0 or more")
    return TensorSpec(DTYPES[dtype], tuple(shape))


def _ids(header: Mapping[str, Any], name: str) -> tuple[int, ...]:
    if not all(map(is_int, header[name])):
        raise InvalidHandoff(field=name, found=header[name], expected="a list of token ids")
    return tuple(header[name])


def _params(values: Mapping[str, Any]) -> SamplingParams:
    names = [item.name for item in fields(SamplingParams)]
    unknown = next((name for name in values if name not in names), None)
    if unknown is not None:
        raise InvalidHandoff(field=f"params.{unknown}", found=values[unknown], expected=f"one of {', '.join(names)}")
    if not isinstance(values.get("stop_token_ids"), list | tuple):
        found = values.get("stop_token_ids", MISSING)
        raise InvalidHandoff(field="params.stop_token_ids", found=found, expected="a list of token ids")
    try:
        return SamplingParams(**{**values, "stop_token_ids": tuple(values["stop_token_ids"])})
    except RequestError as error:
        raise InvalidHandoff(field=f"params.{error.field}", found=error.found, expected=error.expected) from error


def _num_rows(rows: Mapping[str, Any]) -> Mapping[str, int]:
    if not all(is_int(count) and count >= 0 for count in rows.values()):
        raise InvalidHandoff(field="num_rows", found=rows, expected="a number of rows for each model")
    return rows


def _finish_reason(value: Any) -> FinishReason | None:
    if value is not None and value not in list(FinishReason):
        raise InvalidHandoff(field="finish_reason", found=value, expected=f"null or one of {', '.join(FinishReason)}")
    return None if value is None else FinishReason(value)
