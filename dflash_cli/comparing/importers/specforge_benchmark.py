"""Results of `specforge benchmark --output-json`: totals of one data set."""

from typing import ClassVar

from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat

FIELDS = {"backend", "dataset", "average_acceptance_length", "spec_verify_count"}


@RESULT_FORMATS.register("specforge")
class SpecForgeBenchmark(ResultFormat):
    """Source: `specforge/benchmarks/sglang.py` of SpecForge, 2026-08-08."""

    title: ClassVar[str] = "specforge benchmark"

    def recognises(self, file: ResultFile) -> bool:
        return isinstance(file.document, dict) and file.document.keys() >= FIELDS

    def read(self, file: ResultFile) -> MeasuredResult:
        length = file.document["average_acceptance_length"]
        if length is None:
            raise file.refuse(
                "SGLang reported no acceptance to specforge benchmark",
                "check that the server was started with a draft",
                id="no-acceptance",
            )
        return MeasuredResult(
            name=str(file.path),
            source=self.title,
            acceptance_len=length,
            why_no_rows="specforge benchmark writes a mean over prompts, not rows of them",
            definition="sglang",
            facts={"dataset": file.document["dataset"]},
        )
