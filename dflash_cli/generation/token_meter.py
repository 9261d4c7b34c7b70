"""Progress of a run that answers prompts, token by token."""

from collections.abc import Callable

from dflash_cli.generation.answers import Event
from dflash_cli.terminal.progress import Meter


class TokenMeter(Meter):
    """`12/64 prompts  acceptance 3.41  95 tokens/s  0:12 left`.

    The bar counts the tokens of running requests too, so that it does not stand still until many end together.
    `max_new_tokens` is the most tokens of an answer; without it only whole answers count.
    """

    def __init__(
        self, num_answers: int, max_new_tokens: int | None = None, *, clock: Callable[[], float] | None = None
    ) -> None:
        super().__init__(num_answers, "prompts", **({} if clock is None else {"clock": clock}))
        self._max_new_tokens = max_new_tokens
        self._running: dict[int, int] = {}
        self._num_tokens = 0

    def tell(self, event: Event, num_done: int, acceptance: Callable[[], str]) -> None:
        """Count an event. `num_done` answers have ended; `acceptance` gives the acceptance length so far."""
        self._num_tokens += len(event.token_ids)
        if event.answer is not None:
            self._running.pop(event.row.index, None)
        else:
            self._running[event.row.index] = self._running.get(event.row.index, 0) + len(event.token_ids)
            if not self.is_due_again():
                return
        figures = []
        if length := acceptance():
            figures.append(f"acceptance {length}")
        if self._num_tokens and self.seconds > 0:
            figures.append(f"{self._num_tokens / self.seconds:.0f} tokens/s")
        self.update(num_done, "  ".join(figures), partial=self._partial)

    @property
    def _partial(self) -> float:
        """The running answers, each as the share of `max_new_tokens` that it has."""
        if not self._max_new_tokens:
            return 0.0
        return sum(min(count / self._max_new_tokens, 1.0) for count in self._running.values())
