"""Results of `specforge benchmark --output-json`: totals of one data set."""

from typing import ClassVar

from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat

FIELDS = ("backend", "dataset", "average_acceptance_length", "spec_verify_count")


@RESULT_FORMATS.register("specforge")
class SpecForgeBenchmark(ResultFormat):
    """The mean over prompts of SGLang's `spec_accept_length`: answer tokens / steps, first token included.

    A prompt without verify steps counts as 0 there. Source: specforge/benchmarks/sglang.py of SpecForge at a6b6b023;
    `_calculate_spec_decoding_metrics` of SGLang's tokenizer manager.
    """

    title: ClassVar[str] = "specforge benchmark"

    def recognises(self, file: ResultFile) -> bool:
        return file.has(*FIELDS)

    def read(self, file: ResultFile) -> MeasuredResult:
        length = file.document["average_acceptance_length"]
        if length is None or not file.document["spec_verify_count"]:
            raise file.refuse(
                "SGLang reported no acceptance to specforge benchmark",
                "check that the server was started with a draft",
                id="no-acceptance",
            )
        return self.of_length(
            file,
            length,
            why_no_rows="specforge benchmark writes a mean over prompts, not rows of prompts",
            definition="sglang",
            facts={"dataset": file.document["dataset"]},
        )
