"""What a run and its workers say to each other, and what a cluster of workers can do. Loads no models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dflash_runtime.errors import DFlashError

if TYPE_CHECKING:
    from dflash_cli.checkpoints.opening import Causality
    from dflash_cli.generation.answers import Event
    from dflash_cli.generation.prompts import PromptRow
    from dflash_cli.generation.run_facts import PairRun
    from dflash_runtime.config import EngineConfig
    from dflash_runtime.scheduling.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What every worker of a run loads. Directories are absolute, so that they mean the same to all."""

    draft: str | None
    target: str | None
    config: "EngineConfig"
    causality: "Causality | None" = None
    template_options: str | None = None
    threads: int | None = None

    @property
    def for_cpu(self) -> "WorkerSpec":
        """The same without a GPU: one thread unless more are asked for, since workers share the cores."""
        return replace(self, config=replace(self.config, device="cpu"), threads=self.threads or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """A worker that is ready: where it runs, and what its loaded pair says of itself."""

    host: str
    settings: Mapping[str, Any]
    description: "PairRun"
    num_draft_tokens: int
    max_model_len: int
    warnings: tuple[str, ...] = ()

    @property
    def device_name(self) -> str:
        return str(self.settings["device_name"])


@dataclass(frozen=True, slots=True)
class Refusal:
    """A foreseen error, in a form that goes from process to process."""

    message: str
    hint: str | None
    exit_code: int

    def to_error(self) -> DFlashError:
        error = DFlashError(self.message, hint=self.hint)
        error.exit_code = self.exit_code
        return error


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one worker, and how to answer them."""

    rows: "tuple[PromptRow, ...]"
    params: "SamplingParams"
    chat: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a batch that ended, each with all its answers; `is_last` when the batch is done."""

    events: "tuple[Event, ...]"
    is_last: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a worker: it is ready, has answered, was refused, or is lost."""

    worker: int
    found: WorkerFacts | Piece | Refusal | Lost


class Cluster(Protocol):
    """Where workers run, and how they are reached. Workers are told by number, in the order in which they start."""

    address: str

    def hire(self, spec: WorkerSpec) -> int:
        """Start another worker and let it load the pair; its number."""

    def give(self, worker: int, batch: Batch) -> None:
        """Let a worker that has nothing to do begin a batch."""

    def wait(self) -> Report:
        """Wait for the next thing that came of any worker; one whose piece is not its last goes on by itself."""

    def dismiss(self, worker: int) -> None:
        """End a worker, whatever it is at."""
