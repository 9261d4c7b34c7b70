"""Progress of an evaluation, with the acceptance length so far and a cheap approximation of its interval."""

from collections.abc import Hashable, Sequence

from dflash_cli.acceptance.intervals.statistics import pooled_acceptance_len, running_interval
from dflash_cli.generation.answers import Answer, Event
from dflash_cli.generation.token_meter import TokenMeter
from dflash_runtime.scheduling.request_output import RequestOutput


class RunningAcceptance:
    """Acceptance length over the conversations so far. Its 95% interval approximates the interval of the result."""

    def __init__(self) -> None:
        self._conversations: dict[Hashable, tuple[int, int]] = {}

    def add(self, output: RequestOutput, conversation: Hashable) -> None:
        """Count one turn of a conversation; a turn without verify steps is ignored."""
        tokens, steps = sum(output.acceptance_lengths), len(output.acceptance_lengths)
        if not steps:
            return
        before = self._conversations.get(conversation, (0, 0))
        self._conversations[conversation] = before[0] + tokens, before[1] + steps

    @property
    def value(self) -> float | None:
        return pooled_acceptance_len(self._sample) if self._conversations else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Lower and upper end, or None if there are too few conversations for an interval."""
        return running_interval(self._sample)

    @property
    def text(self) -> str:
        """`3.41 [3.2, 3.6]`."""
        if self.value is None:
            return ""
        interval = self.interval
        return f"{self.value:.2f}" + ("" if interval is None else " [{:.1f}, {:.1f}]".format(*interval))

    @property
    def _sample(self) -> list[tuple[int, int]]:
        return list(self._conversations.values())


def _unit(answer: Answer) -> Hashable:
    """Return the answer's distinct prompt. Under several conditions, repeats of a prompt are told apart."""
    return answer.row.digest if answer.row.condition is None else answer.row.prompt_index


class AcceptanceProgress:
    """Shows the number of answers, the acceptance length so far with its interval, and tokens per second."""

    def __init__(self, num_answers: int, max_new_tokens: int | None = None) -> None:
        self._acceptance = RunningAcceptance()
        self._meter = TokenMeter(num_answers, max_new_tokens)
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
        """Count answers of an earlier run. They do not affect the estimate of the time left."""
        for answer in answers:
            self._acceptance.add(answer.output, _unit(answer))
        self._num_done += len(answers)
        self._meter.resume(self._num_done)

    def __call__(self, event: Event) -> None:
        if event.answer is not None:
            self._acceptance.add(event.answer.output, _unit(event.answer))
            self._num_done += 1
            self._num_failed += event.answer.output.error is not None
        self._meter.tell(event, self._num_done, lambda: self._acceptance.text)
