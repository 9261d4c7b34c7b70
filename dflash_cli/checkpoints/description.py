"""Describe a checkpoint in canonical terms. Reads JSON and headers, never torch."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from dflash_cli.checkpoints.opening import open_target, read_draft
from dflash_cli.checkpoints.references import open_checkpoint
from dflash_cli.formats.detection import Detection, find_dialect, unknown_format
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.kind_reading import KindReading
from dflash_cli.formats.fields import look_up
from dflash_cli.formats.relatives import served_in_words
from dflash_cli.terminal.shown import Shown
from dflash_runtime.checkpoint.layout import NOT_OWNED
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.ignored_files import ignored_code, ignored_files
from dflash_runtime.checkpoint.stored.safetensors_header import TensorInfo
from dflash_runtime.checkpoint.targets.recorded_types import recorded_types
from dflash_runtime.checkpoint.targets.runs_here import RunsHere, RunsHereEntry, how_it_runs, release_note
from dflash_runtime.documents import OPTIONAL
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import CheckpointError
from dflash_runtime.json_values import finite
from dflash_runtime.notices import Notice
from dflash_runtime.target_config import TargetFacts

if TYPE_CHECKING:
    from dflash_cli.checkpoints.references import Location


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFacts:
    """A draft of another kind than DFlash.

    kind        the name of the kind
    head        the part that DFlash lacks, in words
    served_by   who serves it, in words
    sizes       name of a size -> its value
    settings    dotted key -> its value: stated, or the value that readers take
    """

    kind: str
    head: str
    served_by: str
    sizes: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Description(Shown):
    """A draft or a target. The config of a draft of another kind than DFlash is its `KindFacts`.

    owned       tensors that a reader loads
    borrowed    tensors that a reader skips, because it takes them from the target
    metadata    metadata of the headers other than the format
    unserved    config key -> the computation it asks for that DFlash does not have. Such a draft is only described.
    runs_here   how dflash runs a target; None for a draft
    has_unknown_layout  the config does not state which rows of a block predict a token
    """

    path: Path
    config: DraftConfig | TargetFacts | KindFacts
    checkpoint: Checkpoint
    owned: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    dialect: str | None = None
    title: str = "target"
    evidence: str = ""
    carried: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unserved: Mapping[str, str] = field(default_factory=dict)
    runs_here: RunsHere | None = None
    has_unknown_layout: bool = False

    def summary(self) -> list[str]:
        size = f"{self.num_parameters / 1e6:.1f}M parameters, {self.num_bytes / 1e6:.1f} MB"
        return [f"{self.title}: {self.path}", size, *self.notes]

    @property
    def kind(self) -> Literal["draft", "target"]:
        """`draft` or `target`."""
        return "target" if isinstance(self.config, TargetFacts) else "draft"

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectDocument:
    """Result of `dflash inspect` of one checkpoint."""

    KIND: ClassVar[str] = "inspect"

    path: str
    role: Literal["draft", "target"]
    dialect: str | None
    evidence: str
    config: Mapping[str, Any]
    carried: Annotated[Mapping[str, Any], "keys of the config without a canonical field"]
    metadata: Annotated[Mapping[str, str], "metadata of the headers other than the format"]
    num_parameters: int
    num_bytes: int
    dtypes: Annotated[Mapping[str, int], "number of tensors by element type"]
    files: tuple[str, ...]
    borrowed: Annotated[tuple[str, ...], "tensors that a reader takes from the target"]
    notes: tuple[str, ...]
    unserved: Annotated[Mapping[str, str], "config key -> the computation it asks for that DFlash does not have"]
    runs_here: Annotated[RunsHereEntry | None, "how dflash runs a target; null for a draft"] = None
    tensors: Annotated[tuple[TensorEntry, ...] | None, OPTIONAL, "of --tensors"] = None


def inspect_document(found: Description, *, with_tensors: bool) -> InspectDocument:
    """The document of `dflash inspect` of one checkpoint."""
    checkpoint, config = found.checkpoint, asdict(found.config)
    if isinstance(found.config, DraftConfig):
        number = None if found.has_unknown_layout else found.config.num_draft_tokens
        anchor = None if found.has_unknown_layout else found.config.sample_from_anchor
        config = {"num_draft_tokens": number, **config, "sample_from_anchor": anchor}
    return InspectDocument(
        path=str(found.path),
        role=found.kind,
        dialect=found.dialect,
        evidence=found.evidence,
        config=config,
        carried=finite(dict(found.carried)),
        metadata=found.metadata,
        num_parameters=found.num_parameters,
        num_bytes=found.num_bytes,
        dtypes=found.dtypes,
        files=tuple(file.name for file in checkpoint.weight_files),
        borrowed=found.borrowed,
        notes=found.notes,
        unserved=found.unserved,
        runs_here=None if found.runs_here is None else RunsHereEntry.of(found.runs_here),
        tensors=tuple(map(_tensor, checkpoint.tensors.values())) if with_tensors else None,
    )


def describe(location: "Location") -> Description:
    """Describe a draft, or a target if no dialect recognises a draft. Only the headers of a hub repository are read.

    Raises:
        CheckpointNotFound, CheckpointError, UnsupportedError: see `errors`.
    """
    checkpoint = open_checkpoint(location)
    detection = find_dialect(checkpoint.config, _tensor_names(checkpoint))
    if detection is None:
        return _describe_target(checkpoint)
    is_other = isinstance(detection.format, Kind)
    return _describe_kind(checkpoint, detection) if is_other else _describe_draft(checkpoint, detection)


def _tensor_names(checkpoint: Checkpoint) -> frozenset[str]:
    """The names of the tensors. Without weights, a draft of another kind is refused by its name first.

    Raises:
        CheckpointError: the weights cannot be read.
        UnknownFormat: the config is of another kind of draft.
    """
    try:
        return frozenset(checkpoint.tensors)
    except CheckpointError:
        detection = find_dialect(checkpoint.config, frozenset())
        if detection is not None and detection.format.difference:
            detection.format.read_config(checkpoint.config, checkpoint.config_path)
        raise


def describe_layers(config: DraftConfig) -> str:
    """The attention of each layer in words. Neighbouring layers with the same attention share a phrase."""
    sinks = ", with attention sinks" if config.has_sinks else ""
    kinds = [
        f"{'full attention' if window is None else f'window {window}'}, {'causal' if causal else 'non-causal'}{sinks}"
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
    return "; ".join(f"{f'layer {at}' if at == last else f'layers {at}-{last}'}: {kind}" for at, last, kind in runs)


def _describe_draft(checkpoint: Checkpoint, detection: Detection) -> Description:
    draft = read_draft(checkpoint, detection)
    selection, dialect = draft.select_tensors(), detection.format
    keys = dialect.unknown_keys(checkpoint.config, draft.parsed.carried)
    unknown = {key: look_up(checkpoint.config, dialect.stored_key(key)) for key in keys}
    return Description(
        path=checkpoint.path,
        config=draft.config,
        checkpoint=draft.checkpoint,
        owned=selection.load,
        borrowed=selection.skip,
        dialect=detection.format.name,
        title=detection.format.title,
        evidence=detection.evidence,
        carried={**unknown, **draft.parsed.carried, **draft.format.unread(checkpoint.config)},
        metadata={key: value for key, value in checkpoint.metadata.items() if key != "format"},
        notes=(*draft.parsed.notes, *ignored_files(checkpoint)),
        unserved=draft.parsed.unserved,
        has_unknown_layout=draft.parsed.has_unknown_layout,
    )


def _describe_kind(checkpoint: Checkpoint, detection: Detection) -> Description:
    """Describe a draft of another kind as the table of its kind reads it. Faults are left to `dflash validate`."""
    assert isinstance(detection.format, Kind)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    reading = KindReading(detection.format, checkpoint.config, shapes)
    skipped = [name for name in shapes if NOT_OWNED.match(name) and name not in reading.expected]
    num_faults = sum(1 for found in (reading.wrong, reading.unknown) for _ in found)
    if reading.is_listed:
        num_faults += len(reading.missing) + len(reading.unexpected) + len(reading.misshapen)
    found = f"; {num_faults} {'key or tensor does' if num_faults == 1 else 'keys or tensors do'} not fit its kind"
    text = f"dflash does not run {detection.format.title} drafts: {detection.format.difference}"
    return Description(
        path=checkpoint.path,
        config=KindFacts(
            kind=detection.format.name,
            head=reading.head,
            served_by=served_in_words(detection.format, checkpoint.config),
            sizes={size: value for size, value in reading.values.items() if value is not None},
            settings=reading.settings,
        ),
        checkpoint=checkpoint,
        owned=tuple(name for name in shapes if name not in skipped),
        borrowed=tuple(skipped),
        dialect=detection.format.name,
        title=detection.format.title,
        evidence=detection.evidence,
        carried={fault.key: look_up(checkpoint.config, fault.key) for fault in reading.unknown},
        metadata={key: value for key, value in checkpoint.metadata.items() if key != "format"},
        notes=(Notice(f"{text}{found if num_faults else ''}", id="kind-not-run"),),
    )


def _describe_target(checkpoint: Checkpoint) -> Description:
    """Describe a target.

    Raises:
        CheckpointError: the config of a known model type is malformed.
        UnknownFormat: it is neither a draft nor a known model.
    """
    try:
        target = open_target(checkpoint)
    except CheckpointError as error:
        if checkpoint.config.get("model_type") in recorded_types()["decoders"]:
            raise
        raise unknown_format(checkpoint.config, checkpoint.config_path) from error
    runs_here = how_it_runs(target)
    note = None if runs_here.is_fast else release_note()
    notes = (*ignored_files(target.checkpoint), *ignored_code(target.checkpoint))
    return Description(
        path=checkpoint.path,
        config=target.facts,
        checkpoint=target.checkpoint,
        owned=tuple(target.checkpoint.tensors),
        notes=notes if note is None else (note, *notes),
        runs_here=runs_here,
    )


def _tensor(info: TensorInfo) -> TensorEntry:
    return TensorEntry(
        name=info.name, dtype=info.dtype, shape=tuple(info.shape), num_bytes=info.num_bytes, file=info.file.name
    )
