"""Progress of an evaluation, with the acceptance length so far and its interval, both kept up to date cheaply."""

import math
from collections.abc import Hashable, Sequence

from dflash_cli import console
from dflash_cli.evaluation.statistics import MIN_CONVERSATIONS, student_quantile
from dflash_cli.generation.answers import Answer, Event
from dflash_runtime.scheduling.request import RequestOutput


class RunningAcceptance:
    """Acceptance length over the conversations so far.

    Its 95% interval is that of a ratio of sums by the delta method (Cochran 1977, chapter 6) with Student's t, whose
    unit is the conversation as in the bootstrap of the result; it is kept up to date by sums, whatever there is before.
    """

    def __init__(self) -> None:
        self._conversations: dict[Hashable, tuple[int, int]] = {}
        self._tokens = self._steps = 0
        self._tokens_squared = self._steps_squared = self._product = 0

    def add(self, output: RequestOutput, conversation: Hashable) -> None:
        """Count one turn of a conversation; one without verify steps is left out."""
        tokens, steps = sum(output.acceptance_lengths), len(output.acceptance_lengths)
        if not steps:
            return
        before = self._conversations.get(conversation, (0, 0))
        after = before[0] + tokens, before[1] + steps
        self._conversations[conversation] = after
        for (some_tokens, some_steps), sign in ((before, -1), (after, 1)):
            self._tokens += sign * some_tokens
            self._steps += sign * some_steps
            self._tokens_squared += sign * some_tokens * some_tokens
            self._steps_squared += sign * some_steps * some_steps
            self._product += sign * some_tokens * some_steps

    @property
    def value(self) -> float | None:
        return self._tokens / self._steps if self._steps else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end; None for fewer conversations than an interval takes."""
        ratio, count = self.value, len(self._conversations)
        if ratio is None or count < MIN_CONVERSATIONS:
            return None
        squares = self._tokens_squared - 2 * ratio * self._product + ratio * ratio * self._steps_squared
        error = math.sqrt(max(squares, 0.0) * count / (count - 1)) / self._steps
        width = student_quantile(0.975, count - 1) * error
        return ratio - width, ratio + width

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
        self._num_answers = num_answers
        self._num_done = self._num_failed = 0

    @property
    def text(self) -> str:
        """`5 of 64 answered, acceptance length 3.41 [3.2, 3.6] so far`."""
        so_far = f", acceptance length {self._acceptance.text} so far" if self._acceptance.text else ""
        return f"{self._num_done - self._num_failed} of {self._num_answers} answered{so_far}"

    def __enter__(self) -> "AcceptanceProgress":
        self._meter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._meter.__exit__(*error)

    def resume(self, answers: Sequence[Answer]) -> None:
        """Count answers of an earlier run, which took no time in this one."""
        for answer in answers:
            self._acceptance.add(answer.output, answer.row.index)
        self._num_done += len(answers)
        self._meter.resume(self._num_done)

    def __call__(self, event: Event) -> None:
        if event.answer is not None:
            self._acceptance.add(event.answer.output, event.answer.row.index)
            self._num_done += 1
            self._num_failed += event.answer.output.error is not None
            self._meter.update(self._num_done, self._acceptance.text)
