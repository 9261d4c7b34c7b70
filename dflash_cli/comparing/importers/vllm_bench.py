"""Results of `vllm bench serve --save-result`: differences of the server's counters over the run."""

from typing import ClassVar

from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_runtime.json_values import as_number
from dflash_runtime.metrics import AcceptanceCounts


@RESULT_FORMATS.register("vllm-bench")
class VllmBench(ResultFormat):
    """Source: `vllm/benchmarks/serve.py` of vLLM 0.33."""

    title: ClassVar[str] = "vllm bench serve"

    def recognises(self, file: ResultFile) -> bool:
        return file.has("request_throughput", "model_id")

    def read(self, file: ResultFile) -> MeasuredResult:
        document = file.document
        if "spec_decode_acceptance_length" not in document:
            raise file.refuse(
                "vllm bench serve found no speculative counters",
                "check that the server was started with a draft, and with /metrics enabled",
                id="no-acceptance",
            )
        num_drafts = as_number(document["spec_decode_num_drafts"])
        if not num_drafts:
            raise file.refuse(
                "the server drafted nothing during vllm bench serve",
                "look in the server's log for the reason; dflash probe URL tests a running server",
                id="no-steps",
            )
        rates = [as_number(rate) for rate in document["spec_decode_per_position_acceptance_rates"]]
        return self.of_length(
            file,
            document["spec_decode_acceptance_length"],
            why_no_rows="vllm bench serve writes totals of the server, not rows of prompts",
            counts=AcceptanceCounts(
                num_speculative_tokens=len(rates),
                num_drafts=round(num_drafts),
                num_accepted_tokens=document["spec_decode_accepted_tokens"],
                per_pos_accepted=[round(rate * num_drafts) for rate in rates],
            ),
            facts={"target": document["model_id"], "num_speculative_tokens": len(rates)},
        )
