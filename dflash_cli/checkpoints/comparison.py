"""Compare two checkpoints, field by field and byte by byte."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar

from dflash_cli.checkpoints.byte_comparison import same_bytes
from dflash_cli.checkpoints.description import Description, KindFacts
from dflash_cli.terminal.shown import Shown, Table
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.target_config import TargetFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifferences:
    """The differences between the tensors of two checkpoints.

    `num_not_compared` tensors have the same type and shape in both checkpoints, and their values were not read.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    reshaped: Mapping[str, tuple[str, str]]
    rewritten: tuple[str, ...]
    num_equal: int
    num_not_compared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(TensorDifferences, Shown):
    """The differences between two checkpoints. Pairs have the value of the first checkpoint, then of the second."""

    first: Description
    second: Description
    fields: dict[str, tuple[Any, Any]]
    carried: dict[str, tuple[Any, Any]]

    def summary(self) -> list[str]:
        num_other = len(self.only_first) + len(self.only_second) + len(self.reshaped) + len(self.rewritten)
        return [
            f"{len(self.fields) + len(self.carried)} fields and {num_other} tensors differ; {self.num_equal} are equal"
        ]

    def shown_tables(self) -> dict[str, Table]:
        rows = [(name, str(one), str(other)) for name, (one, other) in (self.fields | self.carried).items()]
        return {"": (("field", "first", "second"), rows)} if rows else {}

    @property
    def is_empty(self) -> bool:
        return not any((self.fields, self.carried, self.only_first, self.only_second, self.reshaped, self.rewritten))

    @property
    def document(self) -> "DifferenceDocument":
        """The document of `dflash inspect --json` of two checkpoints."""
        return DifferenceDocument(
            first=str(self.first.path),
            second=str(self.second.path),
            dialects=(self.first.dialect, self.second.dialect),
            is_equal=None if self.is_empty and self.num_not_compared else self.is_empty,
            fields=self.fields,
            carried=self.carried,
            tensors=TensorDifferences(**{item.name: getattr(self, item.name) for item in fields(TensorDifferences)}),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferenceDocument:
    """Result of `dflash inspect` of two checkpoints."""

    KIND: ClassVar[str] = "inspect"

    first: str
    second: str
    dialects: tuple[str | None, str | None]
    is_equal: Annotated[bool | None, "null if values were not compared"]
    fields: Mapping[str, tuple[Any, Any]]
    carried: Mapping[str, tuple[Any, Any]]
    tensors: TensorDifferences


def compare(first: Description, second: Description, *, with_values: bool = True) -> Difference:
    """The canonical fields, carried keys and tensors that differ.

    `with_values` compares tensors of the same type and shape byte for byte.
    """
    ours, theirs = first.checkpoint.tensors, second.checkpoint.tensors
    shared = [name for name in ours if name in theirs]
    reshaped = {
        name: (_shape(ours[name]), _shape(theirs[name]))
        for name in shared
        if _shape(ours[name]) != _shape(theirs[name])
    }
    same_shape = [name for name in shared if name not in reshaped]
    compared = same_shape if with_values else []
    rewritten = tuple(name for name in compared if not same_bytes(ours[name], theirs[name]))
    return Difference(
        first=first,
        second=second,
        fields=_pairs(_compared_fields(first.config), _compared_fields(second.config)),
        carried=_pairs(first.carried, second.carried),
        only_first=tuple(name for name in ours if name not in theirs),
        only_second=tuple(name for name in theirs if name not in ours),
        reshaped=reshaped,
        rewritten=rewritten,
        num_equal=len(compared) - len(rewritten),
        num_not_compared=len(same_shape) - len(compared),
    )


def _compared_fields(config: DraftConfig | TargetFacts | KindFacts) -> dict[str, Any]:
    """The fields of a config that equal configs must share."""
    if isinstance(config, KindFacts):
        return {"kind": config.kind, **config.sizes}
    values = asdict(config)
    return {item.name: values[item.name] for item in fields(config) if item.compare}


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = dict.fromkeys([*first, *second])
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def _shape(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"
