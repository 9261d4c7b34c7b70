"""An evaluation read back from the document that `eval-acceptance --json` prints, with all that its reports need."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cli.acceptance.acceptance_report import Evaluation, Failure, PromptSource
from dflash_cli.acceptance.condition_results import ConditionResult
from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.exact_match import ExactMatch, PlainMatch
from dflash_cli.acceptance.intervals.statistics import DEFINITIONS, Interval, Summary
from dflash_cli.acceptance.rejected_tokens import RejectedToken, Replacement
from dflash_cli.comparing.measured_result import ResultFile
from dflash_cli.generation.conditions import Condition
from dflash_runtime.errors import UsageError
from dflash_runtime.metrics import AcceptanceCounts

KIND = "eval-acceptance"
HINT = "write one with: dflash eval-acceptance DRAFT --json > result.json"
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """An evaluation and the name of its file, by which people tell it from others."""

    name: str
    evaluation: Evaluation


def read_evaluations(paths: Sequence[Path]) -> list[StoredEvaluation]:
    """The evaluations of some files, in their order.

    Raises:
        CheckpointNotFound: a file does not exist.
        UsageError: a file is no such document, or nothing was measured: a run without a draft, or without steps.
    """
    return [StoredEvaluation(path.stem, _read(ResultFile(path))) for path in paths]


def _read(file: ResultFile) -> Evaluation:
    document = file.document
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind != KIND:
        found = f"kind {kind!r}" if kind else "no document of dflash"
        raise file.refuse(f"found {found}, expected kind {KIND!r}", HINT)
    try:
        evaluation = evaluation_from_json(document)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise file.refuse(f"is no document of {KIND} as expected: {error!r}", HINT) from error
    if not evaluation.total.counts.num_drafts or not evaluation.total.counts.num_speculative_tokens:
        raise file.refuse("has no steps with drafts, so no acceptance was measured", HINT)
    return evaluation


def evaluation_from_json(document: Json) -> Evaluation:
    """What `Evaluation.to_json` wrote; the exit codes of failures are not in it.

    Raises:
        LookupError, TypeError, ValueError: it is something else.
    """
    prompts = document["prompts"]
    source = {name: prompts[name] for name in PromptSource.__dataclass_fields__ if name in prompts}
    return Evaluation(
        total=_summary(document),
        categories={name: _summary(item) for name, item in document["categories"].items()},
        settings=dict(document["settings"]),
        measured=dict(document["measured"]),
        source=PromptSource(**source),
        conversations=tuple(ConversationCounts(**item) for item in document["conversations"]),
        failures=tuple(Failure(**item, exit_code=0) for item in document["failed"]),
        anchors=_anchors(document["anchors"]) if document["anchors"] else None,
        conditions=tuple(_condition(item) for item in document.get("conditions", ())),
        exact_match=tuple(_exact_match(item) for item in document.get("exact_match", ())),
        rejected_tokens=tuple(_rejected(item) for item in document.get("rejected_tokens", ())),
        seconds=float(document["seconds"]),
    )


def _summary(document: Json) -> Summary:
    accepted = _whole_numbers(document["per_pos_accepted"])
    return Summary(
        counts=AcceptanceCounts(
            num_speculative_tokens=len(accepted),
            num_drafts=int(document["num_drafts"]),
            num_accepted_tokens=int(document["num_accepted_tokens"]),
            per_pos_accepted=accepted,
            per_pos_verified=_whole_numbers(document["per_pos_verified"]),
        ),
        num_requests=int(document["num_requests"]),
        num_conversations=int(document["num_conversations"]),
        num_tokens=int(document["num_tokens"]),
        interval=_interval(document["acceptance_len_interval"]),
        no_interval=document["acceptance_len_no_interval"],
        per_pos_intervals=tuple(_interval(item) for item in document["per_pos_intervals"]),
        conditional_intervals=_conditional_intervals(document, len(accepted)),
        histogram=tuple(_whole_numbers(document["histogram"])),
        definitions={name: document["definitions"].get(name) for name in DEFINITIONS},
    )


def _anchors(document: Json) -> Summary:
    """The mean over anchors, whose counts by position follow from how many anchors gave how many tokens."""
    histogram = _whole_numbers(document["histogram"])
    accepted = [sum(histogram[place:]) for place in range(1, len(histogram))]
    return Summary(
        counts=AcceptanceCounts(len(accepted), int(document["num_anchors"]), sum(accepted), accepted),
        num_requests=0,
        num_conversations=0,
        num_tokens=0,
        interval=_interval(document["mean_over_anchors_interval"]),
        no_interval=None,
        per_pos_intervals=(),
        conditional_intervals=(),
        histogram=tuple(histogram),
        definitions={},
    )


def _conditional_intervals(document: Json, num_positions: int) -> tuple[Interval | None, ...]:
    """None each in a document of a release that had none."""
    return tuple(_interval(item) for item in document.get("per_pos_conditional_intervals", [None] * num_positions))


def _condition(document: Json) -> ConditionResult:
    return ConditionResult(
        condition=Condition(thinking=document["thinking"], context_len=document["context_len"]),
        summary=_summary(document),
        num_failed=int(document["num_failed"]),
        prompt_len=document["prompt_len"],
        num_pairs=int(document["num_pairs"]),
        difference=document["difference"],
        difference_interval=_interval(document["difference_interval"]),
    )


def _exact_match(document: Json) -> ExactMatch:
    """Only counts are read: what follows from them is computed again."""
    interval = document["interval"]
    confidence = 0.95 if interval is None else float(interval["confidence"])
    counts = {name: int(document[name]) for name in ("num_scored", "num_correct", "num_cut")}
    plain = document["plain"]
    if plain is not None:
        names = ("num_pairs", "num_correct", "num_only_draft", "num_only_plain", "num_same_text")
        plain = PlainMatch(**{name: int(plain[name]) for name in names}, confidence=confidence)
    return ExactMatch(condition=document["condition"], **counts, confidence=confidence, plain=plain)


def _rejected(document: Json) -> RejectedToken:
    return RejectedToken(
        token_id=document["token_id"],
        text=document["text"],
        num_rejected=int(document["num_rejected"]),
        num_judged=int(document["num_judged"]),
        replacements=tuple(Replacement(**item) for item in document["replacements"]),
    )


def _interval(document: Json | None) -> Interval | None:
    return None if document is None else Interval(**{name: float(value) for name, value in document.items()})


def _whole_numbers(values: Sequence[Any]) -> list[int]:
    return [int(value) for value in values]


def refuse_capped(stored: StoredEvaluation) -> None:
    """Require that every step verified its whole block, as a figure for K drafted tokens takes.

    Raises:
        UsageError: naming how many were verified.
    """
    counts = stored.evaluation.total.counts
    if counts.is_capped:
        raise UsageError(
            f"{stored.name}: steps verified {counts.draft_tokens_per_step:.1f} of {counts.num_speculative_tokens} "
            "drafted tokens, expected all: what the others would have given is not known",
            hint="measure again without --verify-width, or with a smaller -k",
        )
