"""Messages between a run and its workers, and the interface of a cluster. Loads no models."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dflash_cli.checkpoints.opening import NO_OVERRIDES, Overrides
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError, DFlashError
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from dflash_cli.generation.answers import Event
    from dflash_cli.generation.prompts import PromptRow
    from dflash_cli.generation.run_facts import PairRun
    from dflash_runtime.scheduling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything that a worker of a run loads. Directories are absolute, so that they are valid for all."""

    draft: str | None
    target: str | None
    config: EngineConfig
    overrides: Overrides = NO_OVERRIDES
    template_options: str | None = None
    threads: int | None = None

    @property
    def for_cpu(self) -> "WorkerSpec":
        """The same spec without a GPU. The default is one thread, since workers share the cores."""
        return replace(self, config=replace(self.config, device="cpu"), threads=self.threads or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Facts about a worker that is ready: its host, and the settings of its loaded pair."""

    host: str
    settings: Mapping[str, Any]
    description: "PairRun"
    num_draft_tokens: int
    max_model_len: int
    warnings: tuple[Notice, ...] = ()

    @property
    def device_name(self) -> str:
        return str(self.settings["device_name"])


@dataclass(frozen=True, slots=True)
class Refusal:
    """An expected error, in a form that can be sent between processes."""

    message: str
    hint: str | None
    exit_code: int
    id: str

    @classmethod
    def of(cls, error: DFlashError) -> "Refusal":
        return cls(error.message, error.hint, error.exit_code, error.id)

    @classmethod
    def out_of_memory(cls, text: str) -> "Refusal":
        return cls(text.splitlines()[0], None, CapacityError.exit_code, "out-of-memory")

    def to_error(self) -> DFlashError:
        error = DFlashError(self.message, id=self.id, hint=self.hint)
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
    """Finished rows of a batch, each with all its answers. `is_last` is true if the batch is done."""

    events: "tuple[Event, ...]"
    is_last: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker is lost: the situation, and the reason for users."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """News of a worker: it is ready, has answered, has refused, or is lost."""

    worker: int
    found: WorkerFacts | Piece | Refusal | Lost


class Cluster(Protocol):
    """The machines of the workers. Workers are numbered in the order in which they start."""

    address: str

    def hire(self, spec: WorkerSpec) -> int:
        """Start another worker, let it load the pair, and return its number."""

    def give(self, worker: int, batch: Batch) -> None:
        """Send a batch to an idle worker."""

    def wait(self) -> Report:
        """Wait for the next report of any worker. A worker continues by itself after a piece that is not its last."""

    def dismiss(self, worker: int) -> None:
        """Stop a worker, even if it is busy."""
