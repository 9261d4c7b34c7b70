"""Describe a checkpoint in canonical terms, or the differences between two. Reads JSON and headers, never torch."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_cli.checkpoints.references import open_checkpoint
from dflash_cli.conversion.verify import same_bytes
from dflash_cli.formats.dialect import detect
from dflash_runtime.checkpoint.files import Checkpoint, TensorInfo
from dflash_runtime.config import DraftConfig, TargetConfig
from dflash_runtime.errors import CheckpointError, UnknownFormat

if TYPE_CHECKING:
    from dflash_cli.checkpoints.references import Location

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A draft or a target. `borrowed` names tensors that the file holds and a reader skips."""

    path: Path
    config: DraftConfig | TargetConfig
    checkpoint: Checkpoint
    owned: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    dialect: str | None = None
    title: str = "target"
    evidence: str = ""
    carried: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        return sum(self.checkpoint.tensors[name].num_elements for name in self.owned)

    @property
    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self.checkpoint.tensors.values())

    @property
    def dtypes(self) -> dict[str, int]:
        """Element type -> number of tensors, the most frequent first."""
        return dict(Counter(info.dtype for info in self.checkpoint.tensors.values()).most_common())

    def document(self, *, with_tensors: bool = False) -> Json:
        """As JSON."""
        config = _derived(self.config) | asdict(self.config)
        tensors = {"tensors": [_tensor(info) for info in self.checkpoint.tensors.values()]} if with_tensors else {}
        return {
            "path": str(self.path),
            "kind": "draft" if isinstance(self.config, DraftConfig) else "target",
            "dialect": self.dialect,
            "evidence": self.evidence,
            "config": config,
            "carried": dict(self.carried),
            "num_parameters": self.num_parameters,
            "num_bytes": self.num_bytes,
            "dtypes": self.dtypes,
            "files": [file.name for file in self.checkpoint.weight_files],
            "borrowed": list(self.borrowed),
            "notes": list(self.notes),
            **tensors,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs between two checkpoints. Values come in pairs, the first checkpoint's first."""

    fields: dict[str, tuple[Any, Any]]
    carried: dict[str, tuple[Any, Any]]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    reshaped: dict[str, tuple[str, str]]
    rewritten: tuple[str, ...]
    num_equal: int

    @property
    def is_empty(self) -> bool:
        return not any((self.fields, self.carried, self.only_first, self.only_second, self.reshaped, self.rewritten))


def describe(location: "Location") -> Description:
    """Read a draft, or a target where it is no draft; a repository on the hub by its headers.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: see `errors`.
    """
    checkpoint = open_checkpoint(location)
    try:
        detect(checkpoint)
    except UnknownFormat:
        return _describe_target(checkpoint)
    draft = open_draft(checkpoint)
    plan = draft.select_tensors()
    return Description(
        path=checkpoint.path,
        config=draft.config,
        checkpoint=draft.checkpoint,
        owned=plan.load,
        borrowed=plan.skip,
        dialect=draft.detection.format.name,
        title=draft.detection.format.title,
        evidence=draft.detection.evidence,
        carried=draft.reading.carried,
        notes=draft.reading.notes,
    )


def compare(first: Description, second: Description) -> Difference:
    """Canonical fields, carried keys and tensors that differ; tensors of one shape are compared byte for byte."""
    ours, theirs = first.checkpoint.tensors, second.checkpoint.tensors
    shared = [name for name in ours if name in theirs]
    reshaped = {
        name: (_shape(ours[name]), _shape(theirs[name]))
        for name in shared
        if _shape(ours[name]) != _shape(theirs[name])
    }
    same_shape = [name for name in shared if name not in reshaped]
    rewritten = tuple(name for name in same_shape if not same_bytes(ours[name], theirs[name]))
    return Difference(
        fields=_pairs(asdict(first.config), asdict(second.config)),
        carried=_pairs(first.carried, second.carried),
        only_first=tuple(name for name in ours if name not in theirs),
        only_second=tuple(name for name in theirs if name not in ours),
        reshaped=reshaped,
        rewritten=rewritten,
        num_equal=len(same_shape) - len(rewritten),
    )


def describe_layers(config: DraftConfig) -> str:
    """Attention of each layer in words, neighbours that agree together."""
    kinds = [
        f"{'full attention' if window is None else f'window {window}'}, {'causal' if causal else 'non-causal'}"
        for window, causal in zip(config.windows, config.causal, strict=True)
    ]
    runs: list[tuple[int, int, str]] = []
    for index, kind in enumerate(kinds):
        if runs and runs[-1][2] == kind:
            runs[-1] = (runs[-1][0], index, kind)
        else:
            runs.append((index, index, kind))
    if len(runs) == 1:
        return f"all {len(kinds)} layers: {kinds[0]}" if len(kinds) > 1 else f"1 layer: {kinds[0]}"
    return "; ".join(f"{_range(first, last)}: {kind}" for first, last, kind in runs)


def _describe_target(checkpoint: Checkpoint) -> Description:
    """A target; where the config is no target either, the reason why it is no draft is the better message."""
    try:
        target = open_target(checkpoint)
    except CheckpointError:
        detect(checkpoint)
        raise
    return Description(
        path=checkpoint.path, config=target.config, checkpoint=target.checkpoint, owned=tuple(target.checkpoint.tensors)
    )


def _derived(config: DraftConfig | TargetConfig) -> Json:
    return {"num_draft_tokens": config.num_draft_tokens} if isinstance(config, DraftConfig) else {}


def _tensor(info: TensorInfo) -> Json:
    return {
        "name": info.name,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "num_bytes": info.num_bytes,
        "file": info.file.name,
    }


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names: Iterator[str] = iter(dict.fromkeys([*first, *second]))
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def _shape(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _range(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first}-{last}"
