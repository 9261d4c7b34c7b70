"""Results of SpecForge's `benchmarks/bench_eagle3.py`: data sets and server settings, each with its runs."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat

FIELDS = {"batch_size", "topk", "num_draft_tokens", "metrics"}


@RESULT_FORMATS.register("specforge-sweep")
class SpecForgeSweep(ResultFormat):
    """Answer tokens / verify steps, pooled over prompts. The token that the prefill returns counts as an answer token.

    The writer states 1.0 if the server counted no verify steps. num_draft_tokens counts the anchor, as in SGLang.

    Source: benchmarks/bench_eagle3.py and benchmarks/benchmarker/utils.py of SpecForge at a6b6b023.
    """

    title: ClassVar[str] = "SpecForge bench_eagle3.py"

    def recognises(self, file: ResultFile) -> bool:
        return file.has("model") and any(_entries(file.document).values())

    def read(self, file: ResultFile) -> MeasuredResult:
        found = [
            (dataset, entry, metrics)
            for dataset, entries in _entries(file.document).items()
            for entry in entries
            for metrics in entry["metrics"]
        ]
        if not found:
            raise file.refuse("found no runs, expected one", id="no-acceptance")
        if len(found) != 1:
            named = ", ".join(dict.fromkeys(dataset for dataset, _, _ in found))
            hint = "write each data set and each setting of the server to a file of its own"
            raise file.refuse(f"found {len(found)} runs ({named}), expected one", hint, id="several-runs")
        ((dataset, entry, metrics),) = found
        if metrics["accept_length"] == 1.0:
            raise file.refuse(
                "accept_length is 1.0, which bench_eagle3.py also writes for a server without a draft",
                "check that the server was started with a draft",
                id="no-acceptance",
            )
        facts = {"dataset": dataset, "draft": file.document["model"], "serving_engine": "sglang"}
        if entry["num_draft_tokens"] and entry["topk"] in (None, 1):
            facts["num_speculative_tokens"] = entry["num_draft_tokens"] - 1
        return self.of_length(
            file,
            metrics["accept_length"],
            why_no_rows="bench_eagle3.py writes totals of a data set, not rows of prompts",
            has_first_token=True,
            definition="answer tokens / steps, pooled over steps, first token included (SpecForge)",
            facts=facts,
        )


def _entries(document: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the entries of each data set: the lists of objects with the fields of a run."""
    return {
        name: value
        for name, value in document.items()
        if isinstance(value, list) and value and all(isinstance(item, dict) and item.keys() >= FIELDS for item in value)
    }
