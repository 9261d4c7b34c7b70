"""Read an evaluation back from the document of `eval-acceptance --json`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.curve_shape import lookup_of
from dflash_cli.acceptance.intervals.statistics import Summary
from dflash_cli.comparing.measured_result import HOW_TO_WRITE, ResultFile
from dflash_runtime.errors import UsageError
from dflash_runtime.json_values import is_number


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """An evaluation and its file, after which it is named."""

    name: str
    evaluation: Evaluation
    path: Path


def read_evaluations(paths: Sequence[Path]) -> list[StoredEvaluation]:
    """Return the evaluations of some files, in order.

    Raises:
        CheckpointNotFound: a file does not exist.
        UsageError: a file is not such a document, or its run had no draft or no steps.
    """
    return [StoredEvaluation(path.stem, _read(ResultFile(path)), path) for path in paths]


def read_evaluation(file: ResultFile) -> Evaluation:
    """Return the evaluation in a file.

    Raises:
        UsageError: the file is not a document of `eval-acceptance`, or its figures contradict each other.
    """
    evaluation = file.read(Evaluation, HOW_TO_WRITE)
    total = evaluation.total
    for name, summary in (("the total", total), *evaluation.categories.items()):
        _check_counts(file, name, summary)
    num_stated, num_found = total.num_distinct_prompts, len({item.digest for item in evaluation.conversations})
    if num_stated is not None and num_found and num_stated > num_found:
        raise _contradiction(file, "num_distinct_prompts", num_stated, num_found)
    stated, found = file.parsed.get("acceptance_len"), total.counts.acceptance_len
    if is_number(stated) and not math.isclose(stated, found or 0, rel_tol=1e-6):
        raise _contradiction(file, "acceptance_len", stated, found)
    return evaluation


def _check_counts(file: ResultFile, name: str, summary: Summary) -> None:
    """Require that the histogram, the counts by position and the sums describe the same steps."""
    counts, histogram = summary.counts, summary.histogram
    accepted = [sum(histogram[place:]) for place in range(1, counts.num_speculative_tokens + 1)]
    pairs = {
        "histogram": (sum(histogram), counts.num_drafts),
        "per_pos_accepted": (list(counts.per_pos_accepted), accepted),
        "num_accepted_tokens": (counts.num_accepted_tokens, sum(accepted)),
    }
    for field, (found, expected) in pairs.items():
        if found != expected:
            raise _contradiction(file, f"{name}: {field}", found, expected)


def _contradiction(file: ResultFile, field: str, found: object, expected: object) -> UsageError:
    return UsageError(
        id="contradictory-result",
        path=file.path,
        field=field,
        found=found,
        expected=f"{expected}, which the file's other counts give",
        hint="the file was changed or damaged; measure again",
    )


def _read(file: ResultFile) -> Evaluation:
    evaluation = read_evaluation(file)
    if not evaluation.total.counts.num_drafts or not evaluation.total.counts.num_speculative_tokens:
        raise file.refuse("no step has draft tokens, so the file holds no acceptance", HOW_TO_WRITE, id="no-steps")
    return evaluation


def refuse_without_draft(stored: StoredEvaluation) -> None:
    """Require that a draft model made the draft tokens.

    Raises:
        UsageError: naming the lookup that made them.
    """
    lookup = lookup_of(stored.evaluation.settings)
    if lookup is not None:
        raise UsageError(
            f"measured with --drafting {lookup}, expected a draft model, which this names",
            id="no-draft-model",
            path=stored.path,
            field="drafting",
            found=lookup,
            expected="model",
            hint="dflash report shows the result",
        )


def refuse_capped(stored: StoredEvaluation) -> None:
    """Require that every step verified its whole block. Otherwise the acceptance of K draft tokens is unknown.

    Raises:
        UsageError: naming how many tokens were verified.
    """
    counts = stored.evaluation.total.counts
    if counts.is_capped:
        raise UsageError(
            f"steps verified {counts.draft_tokens_per_step:.1f} of {counts.num_speculative_tokens} "
            "draft tokens, expected all: acceptance of the unverified tokens is unknown",
            id="capped-result",
            path=stored.path,
            field="num_speculative_tokens",
            found=counts.draft_tokens_per_step,
            expected=str(counts.num_speculative_tokens),
            hint="measure again without --verify-width, or with a smaller -k",
        )
