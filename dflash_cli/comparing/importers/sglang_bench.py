"""Results of SGLang's `bench_serving`: one line of JSON for each run, with the server's mean acceptance length."""

from collections.abc import Mapping
from typing import Any, ClassVar

from dflash_cli.comparing.measured_result import RESULT_FORMATS, MeasuredResult, ResultFile, ResultFormat
from dflash_runtime.json_values import as_object, is_int

FIELDS = {"backend", "dataset_name", "accept_length", "total_output_tokens"}


@RESULT_FORMATS.register("sglang-bench")
class SglangBench(ResultFormat):
    """The length includes the target's own token: the server counts accepted drafts plus one for each verify step.

    The counters start with the server, or with its last cache flush, so that warm-ups and earlier requests count too.
    With data parallelism they are one rank's. vLLM and other servers have no such counter.

    Source: python/sglang/benchmark/serving.py at 00f9ec47; `spec_total_num_accept_tokens` of SGLang's metrics reporter.
    """

    title: ClassVar[str] = "SGLang bench_serving"

    def recognises(self, file: ResultFile) -> bool:
        return bool(file.rows) and file.rows[0].keys() >= FIELDS

    def read(self, file: ResultFile) -> MeasuredResult:
        if len(file.rows) != 1:
            hint = "give each run its own --output-file, and restart the server or pass --flush-cache before each run"
            raise file.refuse(f"found {len(file.rows)} runs, expected one", hint, id="several-runs")
        (row,) = file.rows
        if row["accept_length"] is None:
            raise file.refuse(
                f"bench_serving found no acceptance on its server, of backend {row['backend']}",
                "start an SGLang server with a draft, and use --backend sglang, sglang-oai or sglang-oai-chat",
                id="no-acceptance",
            )
        return self.of_length(
            file,
            row["accept_length"],
            why_no_rows="bench_serving writes a mean of the server, not rows of prompts",
            definition="1 + accepted / steps since the server's start or last flush, other requests included (SGLang)",
            facts={"dataset": row["dataset_name"], **_server_facts(as_object(row.get("server_info")))},
        )


def _server_facts(server: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the server's settings. SGLang counts the anchor as a draft token.

    K is left out for a tree of drafts, and if the server adapts it.
    """
    found = {"target": server.get("model_path"), "serving_engine": "sglang"}
    num_rows = server.get("speculative_num_draft_tokens")
    is_fixed = server.get("speculative_eagle_topk") in (None, 1) and not server.get("speculative_adaptive")
    if is_int(num_rows) and is_fixed:
        found["num_speculative_tokens"] = num_rows - 1
    return {name: value for name, value in found.items() if value is not None}
