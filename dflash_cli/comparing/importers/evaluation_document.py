"""The JSON document of `dflash eval-acceptance --json`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.conversation_counts import pool_conditions
from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_cli.comparing.own_facts import own_facts
from dflash_cli.comparing.stored_evaluation import read_evaluation
from dflash_runtime.documents import to_json


@RESULT_FORMATS.register("eval-acceptance")
class EvaluationDocument(ResultFormat):
    """The output of `dflash eval-acceptance --json`."""

    title: ClassVar[str] = "dflash eval-acceptance --json"

    def recognises(self, file: ResultFile) -> bool:
        return file.has("kind") and file.document["kind"] == Evaluation.KIND

    def read(self, file: ResultFile) -> MeasuredResult:
        evaluation = read_evaluation(file)
        counts, conversations = evaluation.total.counts, evaluation.conversations
        return self.of_counts(
            file,
            counts,
            conversations=pool_conditions(conversations),
            why_no_rows=None if conversations else "an older release wrote it without rows of prompts; measure again",
            facts=own_facts({**evaluation.settings, **_plain(to_json(evaluation.measured))}),
        )


def _plain(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts with a single value. Nested facts repeat settings or belong to the draft."""
    return {name: value for name, value in measured.items() if not isinstance(value, (Mapping, list))}
