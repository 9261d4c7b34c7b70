"""Open drafts and targets from directories: detect the dialect, read it, and hand the runtime what it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dflash_cli.formats.dialect import Detection, Format, ParsedConfig, detect, is_draft
from dflash_cli.formats.stated import StatedConfig
from dflash_cli.formats.unserved import refuse_unserved
from dflash_runtime.checkpoint.canonical_names import CanonicalCheckpoint, find_quantization, refuse_packed
from dflash_runtime.checkpoint.files import Checkpoint
from dflash_runtime.checkpoint.hf_config import BODY_KEYS, read_target_config, read_target_facts
from dflash_runtime.checkpoint.layout import NOT_OWNED, TensorSelection, owned_shapes, select_tensors
from dflash_runtime.checkpoint.pair import DraftSource, TargetSource
from dflash_runtime.config import DraftConfig, TargetFacts
from dflash_runtime.errors import MISSING, InvalidConfig, UnsupportedError, naming_file
from dflash_runtime.notices import Notice

Causality = Literal["causal", "non-causal", "layer-types"]
"""How a draft's blocks attend, whatever its config says; `layer-types`: sliding layers causal, full layers not."""


MISREAD = {"is_neox_style": False, "rope_is_neox_style": False, "use_gemma_norm": True}
"""Keys of a draft that the runtime does not look at -> the value that asks for another computation."""

SCALED_EMBEDDINGS = ("gemma", "muse", "minicpm", "granite")
"""Starts of the model types of targets that multiply or normalise their embedding."""


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft on disk, read into canonical form; `checkpoint` gives its tensors under canonical names.

    `quantization` names the key, file or tensor that shows that its weights are packed, None if they are plain.
    """

    checkpoint: Checkpoint
    detection: Detection
    parsed: ParsedConfig
    quantization: str | None = None

    @property
    def config(self) -> DraftConfig:
        return self.parsed.config

    @property
    def format(self) -> Format:
        """The dialect it is written in."""
        return self.detection.format

    @property
    def stated(self) -> StatedConfig:
        """The fields that its config states."""
        return StatedConfig(self.format, self.checkpoint.config)

    @property
    def source(self) -> DraftSource:
        """What the runtime takes.

        Raises:
            UnsupportedError: see `check_runnable`.
        """
        self.check_runnable()
        return DraftSource(self.config, self.checkpoint)

    def check_runnable(self) -> None:
        """Refuse what the runtime cannot load, or would compute otherwise than the config says.

        Raises:
            UnsupportedError: the weights are packed; rope rotates interleaved pairs, or norms add one to their weight.
        """
        refuse_packed(self.checkpoint.path, self.quantization)
        for key, value in MISREAD.items():
            if any(item.value == value for item in self.stated.statements(key)):
                stated = f"{key} is {str(value).lower()}"
                raise UnsupportedError(
                    f"{self.checkpoint.config_path}: {stated}, which this runtime does not compute",
                    hint="dflash validate --engine says which engines do",
                )

    def select_tensors(self) -> TensorSelection:
        """Which tensors a reader loads and which it skips.

        Packed weights have names and shapes of their own, so nothing is expected of them; nor is it of a draft that is
        another model than its canonical form says.

        Raises:
            TensorMismatch: naming every missing, unexpected and misshapen tensor.
        """
        tensors = self.checkpoint.tensors
        if self.quantization is not None or self.parsed.unserved:
            owned = tuple(name for name in tensors if not NOT_OWNED.match(name))
            return TensorSelection(load=owned, skip=tuple(name for name in tensors if NOT_OWNED.match(name)))
        shapes = {name: info.shape for name, info in tensors.items()}
        return select_tensors(owned_shapes(self.config), shapes, path=self.checkpoint.path)


def open_draft(path: str | Path | Checkpoint, *, causality: Causality | None = None) -> DraftCheckpoint:
    """Read a draft of any known dialect. Reads JSON and headers only. `causality` overrules the config.

    Raises:
        CheckpointNotFound, CheckpointError, UnknownFormat: see `errors`.
    """
    stored = path if isinstance(path, Checkpoint) else Checkpoint(path)
    return read_draft(stored, detect(stored), causality=causality)


def read_draft(stored: Checkpoint, detection: Detection, *, causality: Causality | None = None) -> DraftCheckpoint:
    """Read a draft whose dialect is known.

    Raises:
        CheckpointError: its config cannot be read in that dialect.
        UnsupportedError: nor can it, or it asks for what is not served.
    """
    draft = read_any_draft(stored, detection, causality=causality)
    with naming_file(stored.config_path):
        refuse_unserved(draft.parsed.unserved)
    return draft


def read_any_draft(stored: Checkpoint, detection: Detection, *, causality: Causality | None = None) -> DraftCheckpoint:
    """As `read_draft`, also a draft that asks for what is not served: to be described, and for nothing else."""
    with naming_file(stored.config_path):
        parsed = detection.format.read_config(stored.config, stored.config_path)
    if causality is not None:
        parsed = override_causality(parsed, causality)
    quantization = find_quantization(stored)
    checkpoint = CanonicalCheckpoint(stored, None if quantization is not None else parsed.config)
    return DraftCheckpoint(checkpoint, detection, parsed, quantization)


def lacks_embedding_scale(draft: StatedConfig, target: TargetFacts) -> bool:
    """Whether the target scales its embedding, and the draft does not state the scale it was trained with."""
    is_stated = draft.value("input_embedding_scale") is not None
    return target.model_type.lower().startswith(SCALED_EMBEDDINGS) and not is_stated


def override_causality(parsed: ParsedConfig, causality: Causality) -> ParsedConfig:
    """The parsed config with another causality, whatever the file states."""
    config = parsed.config
    causal = {
        "causal": (True,) * config.num_layers,
        "non-causal": (False,) * config.num_layers,
        "layer-types": tuple(window is not None for window in config.windows),
    }[causality]
    note = Notice(f"attention is read as {causality}, because of --causality", id="causality-given")
    return replace(
        parsed,
        config=replace(config, causal=causal),
        notes=(*(item for item in parsed.notes if not item.id.startswith("causality")), note),
        has_doubtful_causality=False,
    )


def open_target(path: str | Path | Checkpoint) -> TargetSource:
    """Read what a target's config states. One that the runtime does not run is refused only when it is to be run.

    Raises:
        CheckpointNotFound, CheckpointError: see `errors`.
        UnsupportedError: the directory holds a draft.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    if is_draft(checkpoint.config):
        raise UnsupportedError(f"{checkpoint.path}: is a draft, expected a target")
    with naming_file(checkpoint.config_path):
        return TargetSource(read_target(checkpoint.config, checkpoint.config_path), checkpoint)


def read_target(config: Mapping[str, Any], path: Path) -> TargetFacts:
    """The whole config of a dense decoder, the facts of any other target.

    A key of a dense decoder that holds something wrong is told at once. One that is absent, or lists a value for each
    layer, need not be wrong in another family; it is named as not known.
    """
    facts = read_target_facts(config, path)
    try:
        return read_target_config(config, path)
    except UnsupportedError:
        return facts
    except InvalidConfig as error:
        is_absent = error.found is MISSING or error.found is None
        is_by_layer = error.field in BODY_KEYS and isinstance(error.found, list)
        if not is_absent and not is_by_layer:
            raise
        return replace(facts, not_known=tuple(dict.fromkeys((*facts.not_known, str(error.field)))))
