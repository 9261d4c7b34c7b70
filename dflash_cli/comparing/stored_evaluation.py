"""An evaluation read back from the document that `eval-acceptance --json` prints, with all that its reports need."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.comparing.measured_result import ResultFile
from dflash_runtime.errors import UsageError

HINT = "write one with: dflash eval-acceptance DRAFT --json > result.json"


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


def read_evaluation(file: ResultFile) -> Evaluation:
    """The evaluation in a file.

    Raises:
        UsageError: the file is not a document of `eval-acceptance`.
    """
    return file.read(Evaluation, HINT)


def _read(file: ResultFile) -> Evaluation:
    evaluation = read_evaluation(file)
    if not evaluation.total.counts.num_drafts or not evaluation.total.counts.num_speculative_tokens:
        raise file.refuse("has no steps with drafts, so no acceptance was measured", HINT)
    return evaluation


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
