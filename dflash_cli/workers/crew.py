"""Several workers that answer the prompts of one run as if they were one. Knows neither Ray nor models.

Rows are handed out in batches, large ones first, so that engines are full, and smaller ones towards the end, so that
nobody waits long for the last. What a lost worker had not answered is handed out again: rows that it may have been
running alone, each in a batch of its own, so that a row which ends its worker once more is the one to blame.
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
from dflash_runtime.config import EngineConfig
from dflash_runtime.errors import CapacityError, CheckpointError, UsageError
from dflash_runtime.phrases import plural
from dflash_runtime.scheduling.request import SamplingParams

BATCHES_PER_WORKER = 2
"""A batch is what is left, divided by so many batches for each worker."""
FULL_ENGINES = 4
"""A batch has at most so many times the rows that an engine runs together."""
LOSSES_PER_WORKER = 3
"""So many workers a place are replaced in a run at most."""
OF_THE_MACHINE = ("modified_ns",)
"""Ends of settings that differ between machines with the same files."""


class WorkersLost(CapacityError):
    """No worker is left to answer, and none is replaced any more."""


@dataclass(slots=True)
class _Member:
    """A worker of the crew: `facts` once it is ready, and the rows it was given and has not answered."""

    facts: WorkerFacts | None = None
    rows: dict[int, PromptRow] = field(default_factory=dict)
    is_free: bool = False
    num_answered: int = 0


class Crew:
    """Workers that are loaded and can answer prompts, in place of a pair in this process.

    Raises:
        DFlashError: the first workers cannot load the pair, or do not have the one of this process.
    """

    def __init__(self, pair: OpenedPair, cluster: Cluster, spec: WorkerSpec, config: EngineConfig, size: int) -> None:
        self._pair = pair
        self._cluster = cluster
        self._spec = spec
        self._config = config
        self._size = size
        self._members: dict[int, _Member] = {}
        self._left: list[_Member] = []  # ready once, and lost
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
        """Most tokens that a prompt and its answer have together."""
        return self._first.max_model_len

    def check_params(self, params: SamplingParams) -> None:
        """Refuse sampling parameters that mean nothing for this pair.

        Raises:
            UsageError: more positions to verify than a block has, or a stop id outside the vocabulary.
        """
        vocab_size = self._pair.target.facts.vocab_size
        check_params(params, num_draft_tokens=self.num_draft_tokens, vocab_size=vocab_size)

    def run_settings(self, params: SamplingParams, *, chat: bool) -> dict[str, Any]:
        """As `PairSession.run_settings`: how many workers there are does not decide what a run produces."""
        own = {
            f"{role}_{key}": getattr(identity, key)
            for role, identity in self._pair.identities.items()
            for key in ("digest", "modified_ns")
        }
        asked = {"chat": chat, **asdict(params), "stop_token_ids": list(params.stop_token_ids)}
        return {**self._first.settings, **own, **asked}

    def describe(self) -> PairRun:
        """See `PairSession.describe`; includes the workers."""
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
        """Nothing here: each worker prepares its device when it is given its first batch."""

    def summary(self) -> str:
        """`2 workers on 1 host: 2 x NVIDIA H200`."""
        facts = [member.facts for member in self._members.values() if member.facts is not None]
        devices = Counter(item.device_name for item in facts)
        hosts = plural(len({item.host for item in facts}), "host")
        named = ", ".join(f"{count} x {name}" for name, count in devices.items())
        return f"{plural(len(facts), 'worker')} on {hosts}: {named}"

    def answer(self, rows: Sequence[PromptRow], params: SamplingParams, *, chat: bool) -> Iterator[Event]:
        """Answer every row, whoever does; a row that has ended two workers is answered with an error.

        Raises:
            WorkersLost: none is left.
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
            raise WorkersLost(f"all workers are lost, {self._num_losses} of them; the last one: {self._last_reason}")

    def _take(self, report: Report, queue: "_Queue | None") -> Iterator[Event]:
        """Take in what came of a worker, and yield what was answered."""
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
        """Take a worker in that is ready, unless it has another pair or runs it otherwise than the others.

        Raises:
            CheckpointError: its files are others than those of this process.
            UsageError: a setting that decides results differs from the first worker's.
        """
        for role, identity in self._pair.identities.items():
            digest = facts.settings[f"{role}_digest"]
            if digest != identity.digest:
                raise CheckpointError(
                    f"worker on {facts.host}: {role} {identity.name}: found digest {digest}, "
                    f"expected {identity.digest}, that of this machine",
                    hint="give every machine the same files, or name a repository of the hub with its revision",
                )
        first = self._facts = self._facts or facts
        for key, found in facts.settings.items():
            if not key.endswith(OF_THE_MACHINE) and found != first.settings.get(key):
                raise UsageError(
                    f"worker on {facts.host}: {key}: found {found!r}, expected {first.settings.get(key)!r}, "
                    f"as on {first.host}",
                    hint="the answers of one run come from one kind of machine and one set of releases",
                )
        if first is facts:
            for text in facts.warnings:
                console.warn(text)
        member.facts, member.is_free = facts, True

    def _lose(self, number: int, reason: str, queue: "_Queue | None") -> Iterator[Event]:
        """Let a worker go, hire another in its place, and hand its rows out again."""
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
        console.warn(f"{self._last_reason}{again}" + ("" if is_replaced else "; it is not replaced any more"))
        if queue is not None:
            for row in queue.put_back(list(member.rows.values()), self._config.max_num_requests):
                error = f"{row.where}: two workers were lost while answering it; the second: {reason}"
                yield from fail_row(row, error, WorkersLost.exit_code)


class _Queue:
    """Rows that wait to be handed out; those that a lost worker may have been running stand first, one by one."""

    def __init__(self, rows: Sequence[PromptRow], most: int) -> None:
        self._rows = deque(rows)
        self._alone: deque[PromptRow] = deque()
        self._struck: set[int] = set()
        self._most = most

    def __bool__(self) -> bool:
        return bool(self._rows or self._alone)

    def take(self, num_batches: int) -> list[PromptRow]:
        """The next batch, one of so many that would empty the queue."""
        if self._alone:
            return [self._alone.popleft()]
        count = min(self._most, math.ceil(len(self._rows) / num_batches))
        return [self._rows.popleft() for _ in range(count)]

    def put_back(self, rows: Sequence[PromptRow], num_running: int) -> list[PromptRow]:
        """Take back what a lost worker had not answered, the first `num_running` of it as what it was running.

        Returns the rows that were lost a second time, which are not asked again.
        """
        running, waiting = rows[:num_running], rows[num_running:]
        self._rows.extendleft(reversed(waiting))
        failed = [row for row in running if row.index in self._struck]
        self._alone += [row for row in running if row.index not in self._struck]
        self._struck |= {row.index for row in running}
        return failed
