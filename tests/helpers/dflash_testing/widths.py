"""Width policies that do not adapt: a list of widths, and random widths."""

import random
from collections.abc import Collection, Sequence

from dflash_runtime.device.storage.results import PendingForward
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.batch import Batch


class ListedWidths:
    """Chooses these widths step by step, then whole blocks. `chosen` has the width of every step."""

    def __init__(self, widths: Sequence[int]) -> None:
        self._widths = list(widths)
        self.chosen: list[int] = []
        self.observed: list[tuple[int, int]] = []

    def candidates(self, batch: int, widths: Collection[int]) -> list[int]:
        return list(range(1, max(widths) + 1))

    def choose(self, widths: Sequence[int], num_context: int) -> int:
        wanted = self._widths[len(self.chosen)] if len(self.chosen) < len(self._widths) else max(widths)
        self.chosen.append(min(wanted, max(widths)))
        return self.chosen[-1]

    def observe(self, num_verified: int, num_accepted: int) -> None:
        self.observed.append((num_verified, num_accepted))


class RandomWidths(ListedWidths):
    """Chooses a random width for every step, including 1, which is plain decoding."""

    def __init__(self, seed: int, widest: int) -> None:
        generator = random.Random(seed)
        super().__init__([generator.randint(1, widest) for _ in range(1000)])


def seen_widths(llm: LLM) -> list[int]:
    """A list that collects the verify width of every later step that decodes."""
    submit, widths = llm.engine.runner.submit, list[int]()

    def watched(batch: Batch) -> PendingForward | None:
        widths.extend([batch.verify_width] if batch.decode else [])
        return submit(batch)

    llm.engine.runner.submit = watched  # type: ignore[method-assign]
    return widths
