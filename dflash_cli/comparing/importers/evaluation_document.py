"""The JSON document of `dflash eval-acceptance --json`."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.acceptance.conversation_counts import ConversationCounts, pool_conditions
from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_runtime.metrics import AcceptanceCounts


@RESULT_FORMATS.register("eval-acceptance")
class EvaluationDocument(ResultFormat):
    """What `dflash eval-acceptance --json` prints."""

    title: ClassVar[str] = "dflash eval-acceptance --json"

    def recognises(self, file: ResultFile) -> bool:
        return isinstance(file.document, dict) and file.document.get("kind") == "eval-acceptance"

    def read(self, file: ResultFile) -> MeasuredResult:
        document = file.document
        if document["acceptance_len"] is None:
            raise file.refuse("has no steps, so there is no acceptance to compare")
        rows = document.get("conversations")
        return MeasuredResult(
            name=str(file.path),
            source=self.title,
            acceptance_len=document["acceptance_len"],
            conversations=pool_conditions(ConversationCounts(**row) for row in rows or ()),
            why_no_rows=None if rows else "it was written by a release that kept no rows of prompts; measure again",
            counts=_counts(document),
            facts=document["settings"] | _plain(document["measured"]),
        )


def _counts(document: Mapping[str, Any]) -> AcceptanceCounts:
    return AcceptanceCounts(
        num_speculative_tokens=len(document["per_pos_accepted"]),
        num_drafts=document["num_drafts"],
        num_accepted_tokens=document["num_accepted_tokens"],
        per_pos_accepted=document["per_pos_accepted"],
        per_pos_verified=document["per_pos_verified"],
    )


def _plain(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Facts that are one value each; what is nested repeats settings, or is the draft's."""
    return {name: value for name, value in measured.items() if not isinstance(value, (Mapping, list))}
