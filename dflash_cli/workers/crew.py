"""Several workers that answer the prompts of one run like one pair. Depends on neither Ray nor models.

Rows are handed out in batches: large at first, so that engines are full, and smaller towards the end, so that no worker
finishes long after the others. Unanswered rows of a lost worker are handed out again. Rows that it may have been
running go out in batches of one, so that a row that ends another worker is identified.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dflash_cli.generation.answers import Event, fail_row
from dflash_cli.generation.loaded_pair import OpenedPair, check_params
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.run_facts import PairRun, WorkerEngine, Workers, command_and_date
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.terminal import console
from dflash_cli.workers.messages import Batch, Cluster, Piece, Refusal, Report, WorkerFacts, WorkerSpec
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError, CheckpointError, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.sampling_params import SamplingParams

BATCHES_PER_WORKER = 2
"""Batch size: the remaining rows divided by this number of batches per worker."""
FULL_ENGINES = 4
"""Limit of a batch, in multiples of the rows that an engine runs together."""
LOSSES_PER_WORKER = 3
"""Limit of replaced workers in a run, per worker."""
OF_THE_MACHINE = ("modified_ns",)
"""Suffixes of settings that differ between machines with the same files."""


class WorkersLost(CapacityError):
    """All workers are lost, and the limit of replacements is reached."""


@dataclass(slots=True)
class _Member:
    """A worker of the crew. `facts` is set when it is ready. `rows` are given but not answered."""

    facts: WorkerFacts | None = None
    rows: dict[int, PromptRow] = field(default_factory=dict)
    is_free: bool = False
    num_answered: int = 0


class Crew:
    """Loaded workers that answer prompts instead of a pair in this process.

    Raises:
        DFlashError: the first workers cannot load the pair, or their pair differs from this process's pair.
    """

    def __init__(self, pair: OpenedPair, cluster: Cluster, spec: WorkerSpec, config: EngineConfig, size: int) -> None:
        self._pair = pair
        self._cluster = cluster
        self._spec = spec
        self._config = config
        self._size = size
        self._members: dict[int, _Member] = {}
        self._left: list[_Member] = []  # were ready, and are lost
        self._num_losses = 0
        self._last_reason = ""
        self._facts: WorkerFacts | None = None
        for _ in range(size):
            self._hire()
        while any(member.facts is None for member in self._members.values()):
            for _ in self._take(self._cluster.wait(), None):
                raise AssertionError("rows before any were given")
        self._check_left()

    @property
    def references(self) -> Mapping[str, str | None]:
        return self._pair.references

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._pair.stop_token_ids

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._pair.tokenizer

    @property
    def num_draft_tokens(self) -> int:
        """K in use."""
        return self._first.num_draft_tokens

    @property
    def max_model_len(self) -> int:
        """Limit of the number of tokens of a prompt and its answer together."""
        return self._first.max_model_len

    def check_params(self, params: SamplingParams) -> None:
        """Refuse sampling parameters that this pair cannot apply.

        Raises:
            UsageError: more positions to verify than a block has, or a stop id outside the vocabulary.
        """
        vocab_size = self._pair.target.facts.vocab_size
        check_params(params, num_draft_tokens=self.num_draft_tokens, vocab_size=vocab_size)

    def run_settings(self, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
        """Return `PairSession.run_settings`. The number of workers does not affect the result of a run."""
        own = {
            f"{role}_{key}": getattr(identity, key)
            for role, identity in self._pair.identities.items()
            for key in ("digest", "modified_ns")
        }
        asked = {"chat": chat, **params.settings}
        return {**self._first.settings, **own, **asked}

    def describe(self) -> PairRun:
        """Return `PairSession.describe` with facts about the workers."""
        members = [*self._left, *self._members.values()]
        engines = tuple(
            WorkerEngine(host=item.facts.host, device_name=item.facts.device_name, num_prompts=item.num_answered)
            for item in members
            if item.facts is not None
        )
        return replace(
            self._first.description,
            draft=self._pair.identities.get("draft"),
            target=self._pair.identities["target"],
            template_digest=self._pair.template_digest,
            engine=asdict(self._config),
            workers=Workers(
                address=self._cluster.address, num_workers=self._size, num_lost=self._num_losses, engines=engines
            ),
            **command_and_date(),
        )

    def warm_up(self, params: SamplingParams, num_prompts: int) -> None:
        """Do nothing: each worker prepares its device with its first batch."""

    def summary(self) -> str:
        """`2 workers on 1 host: 2 x NVIDIA H200`."""
        facts = [member.facts for member in self._members.values() if member.facts is not None]
        devices = Counter(item.device_name for item in facts)
        hosts = plural(len({item.host for item in facts}), "host")
        named = ", ".join(f"{count} x {name}" for name, count in devices.items())
        return f"{plural(len(facts), 'worker')} on {hosts}: {named}"

    def answer(self, rows: Sequence[PromptRow], params: SamplingParams, *, chat: bool) -> Iterator[Event]:
        """Answer every row with any worker. A row that ended two workers gets an error as its answer.

        Raises:
            WorkersLost: all workers are lost.
        """
        queue = _Queue(rows, FULL_ENGINES * self._config.max_num_requests)
        while queue or any(member.rows for member in self._members.values()):
            self._check_left()
            for number, member in self._members.items():
                if queue and member.is_free:
                    given = queue.take(BATCHES_PER_WORKER * len(self._members))
                    member.rows, member.is_free = {row.index: row for row in given}, False
                    self._cluster.give(number, Batch(tuple(given), params, chat))
            yield from self._take(self._cluster.wait(), queue)

    @property
    def _first(self) -> WorkerFacts:
        assert self._facts is not None
        return self._facts

    def _hire(self) -> None:
        self._members[self._cluster.hire(self._spec)] = _Member()

    def _check_left(self) -> None:
        if not self._members:
            text = f"all workers are lost ({self._num_losses} in total); the last: {self._last_reason}"
            raise WorkersLost(text, found=self._num_losses)

    def _take(self, report: Report, queue: "_Queue | None") -> Iterator[Event]:
        """Process a worker's report, and yield its answers."""
        member, found = self._members[report.worker], report.found
        if isinstance(found, WorkerFacts):
            self._welcome(member, found)
        elif isinstance(found, Piece):
            for event in found.events:
                if member.rows.pop(event.row.index, None) is not None:
                    member.num_answered += 1
                yield event
            assert not (found.is_last and member.rows)
            member.is_free = found.is_last
        elif isinstance(found, Refusal) and self._facts is None:
            raise found.to_error()
        else:
            reason = found.message if isinstance(found, Refusal) else found.reason
            yield from self._lose(report.worker, reason, queue)

    def _welcome(self, member: _Member, facts: WorkerFacts) -> None:
        """Accept a worker that is ready, if its pair and settings equal the others'.

        Raises:
            CheckpointError: its files differ from the files of this process.
            UsageError: a setting that affects results differs from the first worker's.
        """
        for role, identity in self._pair.identities.items():
            digest = facts.settings[f"{role}_digest"]
            if digest != identity.digest:
                raise CheckpointError(
                    f"worker on {facts.host}: {role} {identity.name}: found digest {digest}, "
                    f"expected {identity.digest}, the digest on this machine",
                    id="worker-has-other-files",
                    field=role,
                    found=digest,
                    expected=identity.digest,
                    hint="give every machine the same files, or name a repository of the hub with its revision",
                )
        first = self._facts = self._facts or facts
        for key, found in facts.settings.items():
            if not key.endswith(OF_THE_MACHINE) and found != first.settings.get(key):
                raise UsageError(
                    f"worker on {facts.host}: {key}: found {found!r}, expected {first.settings.get(key)!r}, "
                    f"as on {first.host}",
                    id="worker-has-other-settings",
                    field=key,
                    found=found,
                    expected=repr(first.settings.get(key)),
                    hint="use machines of one kind with the same package versions",
                )
        if first is facts:
            for text in facts.warnings:
                console.warn(text)
        member.facts, member.is_free = facts, True

    def _lose(self, number: int, reason: str, queue: "_Queue | None") -> Iterator[Event]:
        """Remove a lost worker, start a replacement, and queue its rows again."""
        member = self._members.pop(number)
        self._cluster.dismiss(number)
        self._num_losses += 1
        where = f" on {member.facts.host}" if member.facts is not None else ""
        self._last_reason = f"worker {number + 1}{where}: {reason}"
        if member.facts is not None:
            self._left.append(member)
        is_replaced = self._num_losses <= LOSSES_PER_WORKER * self._size
        if is_replaced:
            self._hire()
        again = f"; {plural(len(member.rows), 'prompt')} asked again" if member.rows else ""
        end = "" if is_replaced else "; it is not replaced, since too many workers were lost"
        console.warn(Notice(f"{self._last_reason}{again}{end}", id="worker-lost"))
        if queue is not None:
            for row in queue.put_back(list(member.rows.values()), self._config.max_num_requests):
                error = f"{row.where}: two workers were lost while answering this prompt; the second: {reason}"
                yield from fail_row(row, error, WorkersLost.exit_code)


class _Queue:
    """Rows that wait for a worker. Rows that a lost worker may have been running come first, one per batch."""

    def __init__(self, rows: Sequence[PromptRow], most: int) -> None:
        self._rows = deque(rows)
        self._alone: deque[PromptRow] = deque()
        self._struck: set[int] = set()
        self._most = most

    def __bool__(self) -> bool:
        return bool(self._rows or self._alone)

    def take(self, num_batches: int) -> list[PromptRow]:
        """Return the next batch, sized so that `num_batches` such batches would empty the queue."""
        if self._alone:
            return [self._alone.popleft()]
        count = min(self._most, math.ceil(len(self._rows) / num_batches))
        return [self._rows.popleft() for _ in range(count)]

    def put_back(self, rows: Sequence[PromptRow], num_running: int) -> list[PromptRow]:
        """Take back a lost worker's unanswered rows. The first `num_running` of them may have been running.

        Returns the rows that were lost a second time; they are not asked again.
        """
        running, waiting = rows[:num_running], rows[num_running:]
        self._rows.extendleft(reversed(waiting))
        failed = [row for row in running if row.index in self._struck]
        self._alone += [row for row in running if row.index not in self._struck]
        self._struck |= {row.index for row in running}
        return failed
