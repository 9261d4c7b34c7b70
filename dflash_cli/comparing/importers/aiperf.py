"""AIPerf's results: a record per request (`profile_export.jsonl`), or totals (`profile_export_aiperf.json`)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_runtime.metrics import MAX_DRAFT_TOKENS, AcceptanceCounts

RECORD = "spec_decode_acceptance"
STEPS, ACCEPTED = "total_spec_decode_steps", "total_accepted_draft_tokens"


@RESULT_FORMATS.register("aiperf-records")
class AiperfRecords(ResultFormat):
    """A record for each request. The requests of one conversation are counted together.

    Conversations of two results are paired if they have the same name and prompt length.

    Histograms and counts leave out the bonus token. For TensorRT-LLM only steps that drafted are counted.

    Source: AIPerf 0.13, `SpecDecodeAcceptanceRecord` (src/aiperf/common/models/spec_decode_models.py at 0786f0ca),
    `MetricRecordMetadata` (record_models.py at 017c63d2), spec_decode/trtllm_adapter.py at 038b7df1.
    """

    title: ClassVar[str] = "AIPerf profile_export.jsonl"

    def recognises(self, file: ResultFile) -> bool:
        return bool(file.rows) and {"metadata", "metrics"} <= file.rows[0].keys()

    def read(self, file: ResultFile) -> MeasuredResult:
        rows = [row for row in file.rows if row.get(RECORD) and row["metadata"]["benchmark_phase"] == "profiling"]
        if not rows:
            raise file.refuse(
                "AIPerf recorded no acceptance by request",
                "start vLLM with --per-request-spec-decode-metrics summary, and profile with --export-level records",
                id="no-acceptance",
            )
        records = [row[RECORD] for row in rows]
        bounds = {record.get("num_spec_tokens") for record in records}
        longest = None if None in bounds else max(bounds)
        if not any(record["acceptance_histogram"] for record in records):
            raise file.refuse("no request has verify steps", id="no-steps")
        counts = _counts([record["acceptance_histogram"] for record in records], longest)
        is_named = all(row["metadata"].get("conversation_id") is not None for row in rows)
        return self.of_counts(
            file,
            counts,
            conversations=_conversations(rows) if is_named else (),
            why_no_rows=None if is_named else "AIPerf wrote no conversation_id, so prompts cannot be told apart",
            facts={
                **({"num_speculative_tokens": longest} if len(bounds) == 1 and longest else {}),
                "serving_engine": ", ".join(sorted({record["engine"] for record in records})),
            },
        )


@RESULT_FORMATS.register("aiperf")
class AiperfTotals(ResultFormat):
    """The summary of a run."""

    title: ClassVar[str] = "AIPerf profile_export_aiperf.json"

    def recognises(self, file: ResultFile) -> bool:
        return file.has(STEPS, ACCEPTED)

    def read(self, file: ResultFile) -> MeasuredResult:
        steps, accepted = (file.document[name]["avg"] for name in (STEPS, ACCEPTED))
        if steps == 0:
            raise file.refuse("the server drafted nothing during AIPerf's run", id="no-steps")
        histogram = file.document.get("pooled_spec_decode_acceptance_histogram")
        return self.of_length(
            file,
            1 + accepted / steps,
            why_no_rows="AIPerf's summary has totals only; give profile_export.jsonl of a run with "
            "--export-level records",
            counts=_counts([histogram], None) if histogram else None,
        )


def _counts(histograms: Sequence[Mapping[str, int]], num_drafted: int | None) -> AcceptanceCounts:
    """Return counts by position from the number of steps by accepted draft tokens. Empty buckets may be missing."""
    pooled: Counter[int] = Counter()
    for histogram in histograms:
        pooled.update({int(accepted): num_steps for accepted, num_steps in histogram.items()})
    if min(*pooled, *pooled.values()) < 0:
        raise ValueError(f"acceptance histogram: found {dict(pooled)}, expected numbers, 0 or more")
    longest = num_drafted or max(pooled)
    if max(pooled) > longest:
        raise ValueError(f"a step accepted {max(pooled)} draft tokens, and num_spec_tokens is {longest}")
    if not 0 <= longest <= MAX_DRAFT_TOKENS:
        raise ValueError(f"{longest} draft tokens, expected at most {MAX_DRAFT_TOKENS}")
    return AcceptanceCounts(
        num_speculative_tokens=longest,
        num_drafts=pooled.total(),
        num_accepted_tokens=sum(accepted * num_steps for accepted, num_steps in pooled.items()),
        per_pos_accepted=[
            sum(num_steps for accepted, num_steps in pooled.items() if accepted > place) for place in range(longest)
        ],
    )


def _conversations(rows: Sequence[Mapping[str, Any]]) -> tuple[ConversationCounts, ...]:
    """Return requests by conversation, in order of first appearance."""
    requests: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        requests.setdefault(str(row["metadata"]["conversation_id"]), []).append(row)
    return tuple(_conversation(name, turns) for name, turns in requests.items())


def _conversation(name: str, rows: Sequence[Mapping[str, Any]]) -> ConversationCounts:
    sizes = {
        row["metrics"]["input_sequence_length"]["value"]
        for row in rows
        if row["metadata"].get("turn_index") == 0 and "input_sequence_length" in row["metrics"]
    }
    num_steps = sum(row[RECORD]["num_spec_steps"] for row in rows)
    return ConversationCounts(
        digest=f"{name} {sorted(sizes)}",
        name=name,
        num_tokens=num_steps + sum(row[RECORD]["num_accepted_draft_tokens"] for row in rows),
        num_steps=num_steps,
    )
