"""The worker process: it loads the pair and answers batches of rows. Does not depend on Ray."""

import platform
import time
from collections.abc import Iterator
from dataclasses import replace

from dflash_cli.generation.answers import Event
from dflash_cli.generation.loaded_pair import PairSession, open_session
from dflash_cli.workers.messages import Batch, Piece, Refusal, WorkerFacts, WorkerSpec
from dflash_runtime.errors import DFlashError
from dflash_runtime.scheduling.sampling_params import SamplingParams

PIECE_S = 0.1
"""Seconds during which answers are collected into one message, so that messages do not slow a small model."""


class PromptWorker:
    """One engine, called from another process: `load` once, then `begin` each batch and call `more` to its end."""

    def __init__(self) -> None:
        self._session: PairSession | None = None
        self._is_warm = False
        self._ended: Iterator[tuple[Event, ...]] = iter(())

    def place(self) -> None:
        """Return as soon as a machine has started the worker."""

    def load(self, spec: WorkerSpec) -> WorkerFacts | Refusal:
        """Load the pair."""
        import torch

        try:
            session = open_session(
                spec.draft,
                spec.target,
                spec.config,
                overrides=spec.overrides,
                template_options=spec.template_options,
                threads=spec.threads,
            )
        except DFlashError as error:
            return Refusal.of(error)
        except (MemoryError, torch.OutOfMemoryError) as error:
            return Refusal.out_of_memory(f"out of memory: {error}")
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
        """Begin to answer rows, and return the first finished rows."""
        assert self._session is not None
        if not self._is_warm:
            self._session.warm_up(batch.params, self._session.llm.pair.config.max_num_requests)
            self._is_warm = True
        self._ended = whole_rows(self._session.answer(batch.rows, batch.params, chat=batch.chat))
        return self.more()

    def more(self) -> Piece | Refusal:
        """Return the next finished rows, or a refusal if the device failed; this worker is then unusable."""
        until = time.monotonic() + PIECE_S
        events: list[Event] = []
        try:
            for row in self._ended:
                if self._session is not None and self._session.llm.engine.failure is not None:
                    raise self._session.llm.engine.failure  # the row did not cause the failure
                events += row
                if time.monotonic() >= until:
                    return Piece(tuple(events), is_last=False)
        except DFlashError as error:
            return Refusal.of(error)
        except (MemoryError, RuntimeError) as error:
            # A failed device raises RuntimeError without a more specific class.
            return Refusal.out_of_memory(f"{type(error).__name__}: {error}")
        return Piece(tuple(events), is_last=True)


def whole_rows(events: Iterator[Event]) -> Iterator[tuple[Event, ...]]:
    """Yield the answers of each row once it has all of them.

    An interrupted conversation is asked again from its first turn, so its earlier answers are dropped.
    """
    held: dict[int, list[Event]] = {}
    for event in events:
        if event.answer is None:
            continue
        answers = held.setdefault(event.row.index, [])
        answers.append(replace(event, token_ids=event.answer.output.token_ids, text=event.answer.text))
        if len(answers) == event.row.num_turns:
            yield tuple(held.pop(event.row.index))
