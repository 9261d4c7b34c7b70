"""Results of speculators' `scripts/evaluate`: `acceptance.csv`, one row per subset, next to GuideLLM's files."""

import csv
import io
from typing import ClassVar

from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_runtime.metrics import AcceptanceCounts

COLUMNS = {"subset", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "acceptance_length"}
POSITION = "acceptance_at_pos_"


@RESULT_FORMATS.register("speculators")
class SpeculatorsEvaluation(ResultFormat):
    """Totals of vLLM's counters, all subsets together. Source: `scripts/evaluate/perf_utils.py`, 2026-08-20."""

    title: ClassVar[str] = "speculators' acceptance.csv"

    def recognises(self, file: ResultFile) -> bool:
        return set(file.text.partition("\n")[0].strip().split(",")) >= COLUMNS

    def read(self, file: ResultFile) -> MeasuredResult:
        rows = list(csv.DictReader(io.StringIO(file.text, newline="")))
        places = sorted(
            (name for name in rows[0] if name.startswith(POSITION)), key=lambda name: int(name.removeprefix(POSITION))
        )
        counts = AcceptanceCounts(
            num_speculative_tokens=len(places),
            num_drafts=round(sum(float(row["num_drafts"]) for row in rows)),
            num_accepted_tokens=round(sum(float(row["num_accepted_tokens"]) for row in rows)),
            per_pos_accepted=[
                round(sum(float(row[place] or 0) * float(row["num_drafts"]) for row in rows)) for place in places
            ],
        )
        return self.of_counts(
            file,
            counts,
            why_no_rows="acceptance.csv has totals of each subset, not rows of prompts",
            facts={"num_speculative_tokens": len(places)},
        )


@RESULT_FORMATS.register("guidellm")
class GuideLlm(ResultFormat):
    """GuideLLM's report of a run, which has latencies but not acceptance."""

    title: ClassVar[str] = "GuideLLM's JSON"

    def recognises(self, file: ResultFile) -> bool:
        return file.has("benchmarks") and isinstance(file.document["benchmarks"], list)

    def read(self, file: ResultFile) -> MeasuredResult:
        raise file.refuse(
            "GuideLLM's JSON does not contain acceptance",
            "pass acceptance.csv, which speculators' evaluation writes to the same folder",
            id="no-acceptance",
        )
