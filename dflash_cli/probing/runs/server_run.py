"""Send all prompts to one server at a given concurrency, and measure acceptance from answers and counters."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.curve_shape import CurveShape, find_shapes
from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.prompt_source import Failure
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.runs.run_figures import Origin
from dflash_cli.probing.runs.run_load import NO_LOAD, RunLoad
from dflash_cli.probing.servers.inference_server import Asked
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.documents import HIDDEN, INLINE, computed_key
from dflash_runtime.notices import Notice

FOREIGN = {"other-clients-counted", "steps-of-other-clients", "step-counts-differ"}
"""Ids of notes that say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """The prompts and options of a run, and the options of its intervals. Answers are stored in `journal`.

    After `ends_at`, in seconds of `time.monotonic`, no prompt is asked.
    """

    rows: Sequence[PromptRow]
    asked: Asked
    tokenizer: Tokenizer
    chat: bool = False
    confidence: float = 0.95
    num_resamples: int = 10_000
    ends_at: float = math.inf
    journal: Path | None = None
    resume: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class DraftWidths:
    """Draft tokens and verify steps of a run. `widest` is the largest number of draft tokens of a step, if known."""

    num_draft_tokens: int
    num_steps: int
    widest: int | None = None

    @property
    def mean(self) -> float:
        """Draft tokens per step."""
        return self.num_draft_tokens / self.num_steps


@dataclass(frozen=True, slots=True)
class ReadLength:
    """Tokens of a prompt, and how many the server says that it read."""

    sent: int
    read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRun:
    """A server's answers with `concurrency` requests at the same time."""

    total: Annotated[Summary, INLINE]
    name: str
    concurrency: Annotated[int, "requests at the same time"]
    origin: Annotated[Origin, "source of the acceptance: the steps of each answer, counters, or sums in answers"]
    counted: Annotated[ServerCounters | None, "by how much the server's counters rose, if that is known"]
    notes: Annotated[tuple[Notice, ...], "what to know about the figures"]
    failed: tuple[Failure, ...]
    seconds: float
    facts: Annotated[ServerFacts, HIDDEN]
    asked: Annotated[Asked, HIDDEN]
    chat: Annotated[bool, HIDDEN]
    conversations: Annotated[tuple[ConversationCounts, ...], HIDDEN]
    answers: Annotated[tuple[Answer, ...], HIDDEN]
    has_counters: Annotated[bool, HIDDEN]
    lists_steps: Annotated[bool, HIDDEN] = False
    reports_steps: Annotated[bool, HIDDEN] = False
    is_ordered: Annotated[bool, HIDDEN] = False
    sums: Annotated[Mapping[tuple[int, ...], tuple[int, int]], HIDDEN] = field(default_factory=dict)
    """Prompt -> accepted draft tokens and steps of its answer, where a server tells the sums alone."""
    widths: Annotated[DraftWidths | None, HIDDEN] = None
    ids: Annotated[Mapping[tuple[int, ...], str], HIDDEN] = field(default_factory=dict)
    """Prompt -> the server's id of its answer."""
    read_lengths: Annotated[tuple[ReadLength, ...], HIDDEN] = ()
    load: Annotated[RunLoad, HIDDEN] = NO_LOAD
    refusals: Annotated[Mapping[int, int], HIDDEN] = field(default_factory=dict)
    """Status of a server with too many requests -> answers with it, retries included."""
    end_ids: Annotated[frozenset[int], HIDDEN] = frozenset()
    """Tokens that ended several answers, as the answers tell."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", round(self.seconds, 6))

    @property
    @computed_key
    def is_engaged(self) -> bool | None:
        """Whether a token was drafted; null if neither answers nor counters show it."""
        if self.total.counts.num_drafts > 0:
            return True
        is_unanswered = bool(self.failed) and not self.answers
        return False if not is_unanswered and (self.counted is not None or not self.has_counters) else None

    @property
    def includes_others(self) -> bool:
        """Whether counters of the run include requests of other clients."""
        return any(note.id in FOREIGN for note in self.notes)

    def is_comparable(self, other: "ServerRun") -> bool:
        """Whether the lengths of two runs are about the same requests. Totals are about all requests of the server."""
        if self.conversations and other.conversations:
            return True
        asked = [{answer.row.digest for answer in run.answers} for run in (self, other)]
        return asked[0] == asked[1] and not any(run.includes_others for run in (self, other))

    @property
    @computed_key
    def shapes(self) -> list[CurveShape]:
        """Shapes of the acceptance curve that point to a fault."""
        return find_shapes(self.total.counts if self.total.counts.num_speculative_tokens else None, self.conversations)

    def as_result(self) -> MeasuredResult:
        """The run as a result to compare. The run must be engaged."""
        length = self.total.counts.acceptance_len
        assert length is not None
        return MeasuredResult(
            name=self.name,
            source=f"a server of {self.facts.engine}",
            acceptance_len=length,
            conversations=self.conversations,
            why_no_rows=None if self.conversations else self.total.acceptance_len_no_interval,
            counts=self.total.counts,
            facts=answer_settings(self.facts, self.asked, chat=self.chat),
        )


def answer_settings(facts: ServerFacts, asked: Asked, *, chat: bool) -> dict[str, Any]:
    """The settings that determine the answers, under the names of `eval-acceptance`."""
    return {"num_speculative_tokens": facts.num_draft_tokens or 0, "chat": chat, **asdict(asked)}
