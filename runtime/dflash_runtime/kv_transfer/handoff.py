"""The payload of a request that is handed from one engine to another, and what makes it fit to go on from.

KV travels in whole pages, of which the last may be partly full: a tensor `[P, L, 2, page_size, W]` a model, in which a
page is one contiguous piece of every layer's keys and values. Rows that are not committed are zeros. A target that
keeps its own cache has tensors of its state instead of pages. A sampled token's random number comes of the seed and the
token's position, so that seed and lengths are all that a sample needs to go on.

Axis letters: P pages, L layers, W numbers of a row's keys in the layer that has most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dflash_runtime.errors import DFlashError, HandoffMismatch, InvalidHandoff
from dflash_runtime.json_values import is_int
from dflash_runtime.kv_transfer.fingerprint import Fingerprint
from dflash_runtime.scheduling.request import FinishReason, SamplingParams

VERSION = 1
"""Of the header; a reader refuses any other."""

TARGET_PAGES, DRAFT_PAGES = "target", "draft"
"""Names of the tensors with the KV pages of either model; those of a state begin with STATE."""

STATE = "state."

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
}
"""What tensors of a payload may hold, by the names they have in headers."""

FIELD_TYPES: Mapping[str, tuple[type, str]] = {"key": (str, "a string"), "seed": (int, "a number")} | dict.fromkeys(
    ("fingerprint", "params", "num_rows", "state_values", "note", "tensors"), (dict, "an object")
)
"""What fields of a header must be before anything is made of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handoff:
    """A request after its prefill: what it is, what it has said, and the KV of its committed rows `[0, kv_len)`.

    `params` and `seed` are those it is to go on with. `num_rows` says of how many rows each model's KV was complete
    when it was taken. With a `finish_reason` the request ended where it was prefilled, and nothing goes on.
    `state_values` are the parts of a target's own cache that are no tensors. Where nothing was said yet it is the
    beginning of a prompt: its rows are as many as every model has, and who loads it prefills the rest, with parameters
    and a seed of its own.
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
    note: Mapping[str, Any] = field(default_factory=dict)  # the sender's own, as an id; nothing is made of it

    @property
    def kv_len(self) -> int:
        """Rows of true KV: at most everything before the last token, which is run by who goes on."""
        most = len(self.prompt_token_ids) + len(self.output_token_ids) - 1
        return min(most, *self.num_rows.values()) if self.is_beginning and self.num_rows else most

    @property
    def is_beginning(self) -> bool:
        """Whether no token came of it yet, so that its prompt is not through."""
        return not self.output_token_ids

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "Handoff":
        """The same with the tensors somewhere else."""
        return replace(self, tensors=tensors)

    def to_header(self) -> dict[str, Any]:
        """Everything but the tensors' content, as JSON."""
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
        """What a header and its tensors say.

        Raises:
            InvalidHandoff: a field that is missing or malformed.
        """
        check_header(header)
        try:
            return cls(
                key=header["key"],
                fingerprint=Fingerprint.read(header["fingerprint"]),
                prompt_token_ids=_ids(header, "prompt_token_ids"),
                output_token_ids=_ids(header, "output_token_ids"),
                params=SamplingParams(
                    **{**header["params"], "stop_token_ids": tuple(header["params"]["stop_token_ids"])}
                ),
                seed=header["seed"],
                num_rows=_num_rows(header),
                tensors=tensors,
                state_values=header["state_values"],
                finish_reason=None if header["finish_reason"] is None else FinishReason(header["finish_reason"]),
                note=header["note"],
            )
        except InvalidHandoff:
            raise
        except DFlashError as error:
            raise InvalidHandoff(error.message, hint=error.hint) from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidHandoff(f"header: {type(error).__name__}: {error}") from error


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The dtype and shape of a tensor that is to come."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def tensor_specs(header: Any) -> dict[str, TensorSpec]:
    """The tensors a header announces, by name.

    Raises:
        InvalidHandoff: one is malformed, or of a dtype that no payload has.
    """
    check_header(header)
    specs = {}
    try:
        for name, item in header["tensors"].items():
            if not all(is_int(size) and size >= 0 for size in item["shape"]):
                raise InvalidHandoff(f"tensors.{name}.shape: found {item['shape']}, expected sizes of 0 or more")
            specs[name] = TensorSpec(DTYPES[item["dtype"]], tuple(item["shape"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidHandoff(f"tensors: {type(error).__name__}: {error}") from error
    return specs


def check_header(header: Any) -> None:
    """Refuse what is no header of this version.

    Raises:
        InvalidHandoff: naming what was found.
    """
    if not isinstance(header, dict) or header.get("kind") != "handoff":
        found = header.get("kind") if isinstance(header, dict) else type(header).__name__
        raise InvalidHandoff(f"kind: found {found!r}, expected 'handoff'")
    if header.get("version") != VERSION:
        raise InvalidHandoff(f"version: found {header.get('version')!r}, expected {VERSION}")
    for name, (kind, words) in FIELD_TYPES.items():
        found = header.get(name)
        if not isinstance(found, kind) or isinstance(found, bool):
            text = f"found {type(found).__name__}" if name in header else "missing"
            raise InvalidHandoff(f"{name}: {text}, expected {words}")


def find_problems(handoff: Handoff, here: Fingerprint, expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Why an engine with fingerprint `here`, whose tensors have the shapes `expected`, cannot go on from a hand-off.

    In words for people, the fingerprint's first. Empty where it can.
    """
    problems = here.differences(handoff.fingerprint)
    for name, shape in expected.items():
        problems += _tensor_problems(handoff, name, shape)
    return problems


def check_handoff(handoff: Handoff, here: Fingerprint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse what this engine cannot go on from; see `find_problems`.

    Raises:
        HandoffMismatch: all problems at once.
    """
    problems = find_problems(handoff, here, expected)
    if problems:
        raise HandoffMismatch(
            f"hand-off {handoff.key} does not fit this engine: {'; '.join(problems)}",
            hint="run both sides with the same pair and settings",
        )


def _tensor_problems(handoff: Handoff, name: str, shape: Sequence[int]) -> list[str]:
    found = handoff.tensors.get(name)
    what = "the draft's context KV" if name == DRAFT_PAGES else f"{name} KV"
    if found is None:
        return [f"it has no rows of {what}"]
    if len(found.shape) == len(shape) and found.shape[1] != shape[1]:
        return [f"{what} is of {found.shape[1]} layers, expected {shape[1]}"]
    if tuple(found.shape) != tuple(shape):
        return [f"{what} has shape {list(found.shape)}, expected {list(shape)}"]
    num_rows = handoff.num_rows.get(name, 0)
    if num_rows != handoff.kv_len:
        return [f"{what} has {num_rows} of {handoff.kv_len} rows: it was sent before they were written"]
    return []


def _ids(header: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = header[name]
    if not isinstance(ids, list) or not all(map(is_int, ids)):
        raise InvalidHandoff(f"{name}: expected a list of token ids")
    return tuple(ids)


def _num_rows(header: Mapping[str, Any]) -> Mapping[str, int]:
    rows = header["num_rows"]
    if not isinstance(rows, dict) or not all(is_int(count) and count >= 0 for count in rows.values()):
        raise InvalidHandoff(f"num_rows: found {rows}, expected a number of rows for each model")
    return rows
