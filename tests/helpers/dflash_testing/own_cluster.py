"""A cluster of workers in this process. The test decides when a worker is lost."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dflash_cli.workers.messages import Batch, Lost, Piece, Refusal, Report, WorkerSpec
from dflash_cli.workers.prompt_worker import PromptWorker


@dataclass
class _Hired:
    worker: PromptWorker
    spec: WorkerSpec | None = None
    batch: Batch | None = None
    is_begun: bool = False
    left: set[int] = field(default_factory=set)


class OwnCluster:
    """Runs workers in turn. Before each piece it calls `is_lost` with the worker's number and its remaining rows."""

    address = "own"

    def __init__(self, is_lost: Callable[[int, Iterable[int]], bool] = lambda worker, left: False) -> None:
        self._is_lost = is_lost
        self._hired: dict[int, _Hired] = {}
        self.batches: list[list[int]] = []
        self.num_hired = 0

    def hire(self, spec: WorkerSpec) -> int:
        self._hired[self.num_hired] = _Hired(PromptWorker(), spec)
        self.num_hired += 1
        return self.num_hired - 1

    def give(self, worker: int, batch: Batch) -> None:
        hired = self._hired[worker]
        assert hired.batch is None, "the worker already has a batch"
        self.batches.append([row.index for row in batch.rows])
        hired.batch, hired.is_begun, hired.left = batch, False, {row.index for row in batch.rows}

    def wait(self) -> Report:
        number, hired = next(item for item in self._hired.items() if item[1].spec or item[1].batch)
        self._hired[number] = self._hired.pop(number)  # its next turn is after all others
        if self._is_lost(number, sorted(hired.left)):
            return Report(number, Lost("ended", "its process has ended"))
        if hired.spec is not None:
            spec, hired.spec = hired.spec, None
            return Report(number, hired.worker.load(spec))
        return Report(number, self._go_on(hired))

    def dismiss(self, worker: int) -> None:
        del self._hired[worker]

    def _go_on(self, hired: _Hired) -> Piece | Refusal:
        assert hired.batch is not None
        piece = hired.worker.more() if hired.is_begun else hired.worker.begin(hired.batch)
        hired.is_begun = True
        if isinstance(piece, Piece):
            hired.left -= {event.row.index for event in piece.events}
            if piece.is_last:
                hired.batch = None
        return piece
