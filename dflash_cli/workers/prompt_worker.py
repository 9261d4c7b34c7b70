"""What runs in a worker's process: it loads the pair and answers batches of rows. Knows no Ray."""

import platform
import time
from collections.abc import Iterator
from dataclasses import replace

from dflash_cli.generation.answers import Event
from dflash_cli.generation.loaded_pair import PairSession, open_session
from dflash_cli.workers.messages import Batch, Piece, Refusal, WorkerFacts, WorkerSpec
from dflash_runtime.errors import CapacityError, DFlashError
from dflash_runtime.scheduling.request import SamplingParams

PIECE_S = 0.1
"""Answers are handed over together for so long, so that a small model does not wait for messages."""


class PromptWorker:
    """One engine, asked from outside: `load` once, then `begin` a batch and take `more` until its last piece."""

    def __init__(self) -> None:
        self._session: PairSession | None = None
        self._is_warm = False
        self._ended: Iterator[tuple[Event, ...]] = iter(())

    def place(self) -> None:
        """Returns as soon as a machine has taken the worker."""

    def load(self, spec: WorkerSpec) -> WorkerFacts | Refusal:
        """Load the pair."""
        import torch

        try:
            session = open_session(
                spec.draft,
                spec.target,
                spec.config,
                causality=spec.causality,
                template_options=spec.template_options,
                threads=spec.threads,
            )
        except DFlashError as error:
            return Refusal(error.message, error.hint, error.exit_code)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return Refusal(f"out of memory: {error}".splitlines()[0], None, CapacityError.exit_code)
        self._session = session
        return WorkerFacts(
            host=platform.node(),
            settings=session.run_settings(SamplingParams(), chat=False),
            description=session.describe(),
            num_draft_tokens=session.num_draft_tokens,
            max_model_len=session.max_model_len,
            warnings=session.llm.warnings,
        )

    def begin(self, batch: Batch) -> Piece | Refusal:
        """Begin to answer rows, and return those that end first."""
        assert self._session is not None
        if not self._is_warm:
            self._session.warm_up(batch.params, self._session.llm.pair.config.max_num_requests)
            self._is_warm = True
        self._ended = whole_rows(self._session.answer(batch.rows, batch.params, chat=batch.chat))
        return self.more()

    def more(self) -> Piece | Refusal:
        """The rows that end next; a refusal where the device failed, after which this worker is of no use."""
        until = time.monotonic() + PIECE_S
        events: list[Event] = []
        try:
            for row in self._ended:
                if self._session is not None and self._session.llm.engine.failure is not None:
                    raise self._session.llm.engine.failure  # what such a device ends is not the row's own fault
                events += row
                if time.monotonic() >= until:
                    return Piece(tuple(events), is_last=False)
        except DFlashError as error:
            return Refusal(error.message, error.hint, error.exit_code)
        except (MemoryError, RuntimeError) as error:
            # What a device that has failed raises has no class of its own.
            return Refusal(f"{type(error).__name__}: {error}".splitlines()[0], None, CapacityError.exit_code)
        return Piece(tuple(events), is_last=True)


def whole_rows(events: Iterator[Event]) -> Iterator[tuple[Event, ...]]:
    """The answers of each row, once it has all of them.

    A conversation that is cut off is asked again from its first turn, so its earlier answers are of no use.
    """
    held: dict[int, list[Event]] = {}
    for event in events:
        if event.answer is None:
            continue
        answers = held.setdefault(event.row.index, [])
        answers.append(replace(event, token_ids=event.answer.output.token_ids, text=event.answer.text))
        if len(answers) == event.row.num_turns:
            yield tuple(held.pop(event.row.index))
