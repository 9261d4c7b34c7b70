"""Open drafts and targets from directories: detect the dialect, read it, and hand the runtime what it takes."""

from dataclasses import dataclass
from pathlib import Path

from dflash_cli.formats.base import Detection, Reading, detect
from dflash_runtime.checkpoint import Checkpoint
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import UnsupportedError, located
from dflash_runtime.hf_config import read_target_config
from dflash_runtime.layout import TensorPlan, plan_tensors
from dflash_runtime.pair import DraftSource, TargetSource


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft on disk, read into canonical form."""

    checkpoint: Checkpoint
    detection: Detection
    reading: Reading

    @property
    def config(self) -> DraftConfig:
        return self.reading.config

    @property
    def source(self) -> DraftSource:
        """What the runtime takes."""
        return DraftSource(self.config, self.checkpoint)

    def plan(self) -> TensorPlan:
        """Which tensors to load and which to skip; raises `TensorMismatch` naming everything that is wrong."""
        shapes = {name: info.shape for name, info in self.checkpoint.tensors.items()}
        return plan_tensors(self.config, shapes, path=self.checkpoint.path)


def open_draft(path: str | Path) -> DraftCheckpoint:
    """Read a draft of any known dialect. Reads JSON and headers only.

    Raises:
        CheckpointNotFound, CheckpointError, UnknownFormat: see `errors`.
    """
    checkpoint = Checkpoint(path)
    detection = detect(checkpoint)
    with located(checkpoint.config_path):
        reading = detection.format.read_config(checkpoint.config, checkpoint.config_path)
    return DraftCheckpoint(checkpoint, detection, reading)


def open_target(path: str | Path) -> TargetSource:
    """Read a target's config and headers.

    Raises:
        CheckpointNotFound, CheckpointError: see `errors`.
        UnsupportedError: the directory holds a draft.
    """
    checkpoint = Checkpoint(path)
    if "speculators_model_type" in checkpoint.config or "dflash_config" in checkpoint.config:
        raise UnsupportedError(f"{checkpoint.path}: is a draft, expected a target")
    with located(checkpoint.config_path):
        return TargetSource(read_target_config(checkpoint.config, checkpoint.config_path), checkpoint)
