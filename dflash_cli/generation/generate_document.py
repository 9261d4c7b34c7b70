"""The JSON document of `dflash generate --json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from dflash_cli.generation.answers import AnswerRow, Tally
from dflash_cli.generation.loaded_pair import PairSession
from dflash_cli.generation.run_facts import PairRun
from dflash_runtime.documents import INLINE
from dflash_runtime.lossless import Lossless
from dflash_runtime.metrics import AcceptanceCounts, count_widths


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffFacts:
    """Counts of the hand-offs that a run sent or loaded."""

    place: str
    is_sending: bool
    num_sent: int
    num_loaded: Annotated[int, "prompts that continued from a hand-off"]
    num_bytes: int
    num_given_up: Annotated[int, "prompts that were prefilled here instead"]
    why_given_up: Annotated[str | None, "reason of the first of these prompts"]
    problems: Annotated[tuple[str, ...], "mismatches in hand-offs that were loaded all the same"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateDocument:
    """Result of `dflash generate`."""

    KIND: ClassVar[str] = "generate"

    draft: str | None
    target: str | None
    num_speculative_tokens: int
    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: Annotated[int, "prompt tokens that were found in the prefix cache"]
    seconds: float
    counts: Annotated[AcceptanceCounts, INLINE]
    verify_width_histogram: Annotated[Mapping[int, int], "number of steps by verified rows; 1 is plain decoding"]
    lossless: Lossless | None
    handoffs: HandoffFacts | None
    measured: PairRun
    rows: tuple[AnswerRow, ...]


def generate_document(
    tally: Tally,
    session: PairSession,
    seconds: float,
    *,
    num_traced: int = 0,
    lossless: Lossless | None = None,
    handoffs: HandoffFacts | None = None,
) -> GenerateDocument:
    """Return the document of a run, with answers in prompt order. The first `num_traced` prompts have their steps."""
    answers = sorted(tally.answers, key=lambda item: (item.row.index, item.turn))
    return GenerateDocument(
        draft=session.references["draft"],
        target=session.references["target"],
        num_speculative_tokens=tally.num_speculative_tokens,
        num_tokens=tally.num_tokens,
        num_prompt_tokens=sum(len(answer.output.prompt_token_ids) for answer in answers),
        num_cached_tokens=sum(answer.output.num_cached for answer in answers),
        seconds=round(seconds, 6),
        counts=tally.counts,
        verify_width_histogram=count_widths(tally.outputs),
        lossless=lossless,
        handoffs=handoffs,
        measured=session.describe(),
        rows=tuple(
            AnswerRow.of(item, tally.num_speculative_tokens, with_trace=item.row.prompt_index < num_traced)
            for item in answers
        ),
    )
