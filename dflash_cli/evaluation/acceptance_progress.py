"""Progress of an evaluation, with the acceptance length so far and its interval, both kept up to date cheaply."""

import math
from collections.abc import Sequence

from dflash_cli import console
from dflash_cli.generation.answers import Answer, Event
from dflash_runtime.scheduling.request import RequestOutput

NORMAL_95 = 1.96


class RunningAcceptance:
    """Acceptance length over the requests so far.

    Its 95% interval is that of a ratio of sums by the delta method (Cochran 1977, chapter 6), whose unit is the
    request as in the bootstrap of the result; it needs six sums instead of all requests.
    """

    def __init__(self) -> None:
        self._num_requests = 0
        self._tokens = self._steps = 0
        self._tokens_squared = self._steps_squared = self._product = 0

    def add(self, output: RequestOutput) -> None:
        """Count one request; a request without verify steps is left out."""
        tokens, steps = sum(output.acceptance_lengths), len(output.acceptance_lengths)
        if not steps:
            return
        self._num_requests += 1
        self._tokens += tokens
        self._steps += steps
        self._tokens_squared += tokens * tokens
        self._steps_squared += steps * steps
        self._product += tokens * steps

    @property
    def value(self) -> float | None:
        return self._tokens / self._steps if self._steps else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end; None for fewer than two requests."""
        ratio, count = self.value, self._num_requests
        if ratio is None or count < 2:
            return None
        squares = self._tokens_squared - 2 * ratio * self._product + ratio * ratio * self._steps_squared
        error = math.sqrt(max(squares, 0.0) * count / (count - 1)) / self._steps
        return ratio - NORMAL_95 * error, ratio + NORMAL_95 * error

    @property
    def text(self) -> str:
        """`3.41 [3.2, 3.6]`."""
        if self.value is None:
            return ""
        return f"{self.value:.2f}" + ("" if self.interval is None else " [{:.1f}, {:.1f}]".format(*self.interval))


class AcceptanceProgress:
    """Shows answers and acceptance so far: `12/64 prompts  3.41 [3.2, 3.6]  0:12 left`."""

    def __init__(self, num_answers: int) -> None:
        self._acceptance = RunningAcceptance()
        self._meter = console.Meter(num_answers, "prompts")
        self._num_done = 0

    def __enter__(self) -> "AcceptanceProgress":
        self._meter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._meter.__exit__(*error)

    def resume(self, answers: Sequence[Answer]) -> None:
        """Count answers of an earlier run, which took no time in this one."""
        for answer in answers:
            self._acceptance.add(answer.output)
        self._num_done += len(answers)
        self._meter.resume(self._num_done)

    def __call__(self, event: Event) -> None:
        if event.answer is not None:
            self._acceptance.add(event.answer.output)
            self._num_done += 1
            self._meter.update(self._num_done, self._acceptance.text)
