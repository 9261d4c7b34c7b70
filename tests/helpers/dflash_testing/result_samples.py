"""Results of other tools, in the layouts that their code writes. Each sample names its source."""

import json
from pathlib import Path
from typing import Any

from dflash_cli.comparing.measured_result import MeasuredResult, read_result

VLLM = {  # vllm 0.33, benchmarks/serve.py: `benchmark`, and `main` around it, without --save-detailed
    "date": "20261120-101112", "endpoint_type": "openai-chat", "backend": "openai-chat", "label": None,
    "model_id": "Qwen/Qwen3-8B", "tokenizer_id": "Qwen/Qwen3-8B", "num_prompts": 80, "request_rate": "inf",
    "burstiness": 1.0, "max_concurrency": 8, "duration": 41.5, "completed": 80, "failed": 0,
    "total_input_tokens": 9000, "total_output_tokens": 20000, "request_throughput": 1.93,
    "spec_decode_acceptance_rate": 30.0, "spec_decode_acceptance_length": 3.1, "spec_decode_num_drafts": 1000,
    "spec_decode_draft_tokens": 7000, "spec_decode_accepted_tokens": 2100,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.3, 0.2, 0.15, 0.1, 0.05],
    "mean_ttft_ms": 52.0, "median_tpot_ms": 8.1,
}  # fmt: skip
SPECFORGE = {  # SpecForge, specforge/benchmarks/sglang.py: asdict(BenchmarkResult)
    "average_acceptance_length": 4.21, "backend": "sglang", "dataset": "gsm8k", "latency_seconds": 12.5,
    "output_tokens": 8192, "samples": 64, "spec_verify_count": 1946, "throughput_tokens_per_second": 655.4,
}  # fmt: skip
SPECULATORS = """\
subset,num_drafts,num_draft_tokens,num_accepted_tokens,acceptance_length,acceptance_at_pos_0,acceptance_at_pos_1
HumanEval,100.0,200.0,120.0,2.2,0.8,0.4
qa,300.0,600.0,240.0,1.8,0.6,0.2
"""  # speculators, scripts/evaluate/perf_utils.py: acceptance_csv_columns, CsvWriter
GUIDELLM = {"benchmarks": [{"config": {"strategy": {"type_": "throughput"}}, "metrics": {}}]}
AIPERF: dict[str, Any] = {  # aiperf 0.13, profile_export_aiperf.json
    "schema_version": "1.1", "request_count": {"unit": "requests", "avg": 64.0},
    "total_spec_decode_steps": {"unit": "count", "avg": 100.0},
    "total_accepted_draft_tokens": {"unit": "tokens", "avg": 140.0},
    "pooled_spec_decode_acceptance_histogram": {"0": 40, "1": 20, "3": 40},
}  # fmt: skip


SGLANG: dict[str, Any] = {  # SGLang 00f9ec47, sglang/benchmark/serving.py: `benchmark`, without --output-details
    "tag": None, "backend": "sglang-oai", "dataset_name": "sharegpt", "request_rate": "inf", "max_concurrency": 8,
    "server_info": {
        "model_path": "org/target", "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8,
        "speculative_eagle_topk": None, "version": "0.5.23",
        "internal_states": [{"last_gen_throughput": 90.0, "avg_spec_accept_length": 3.2}],
    },
    "duration": 41.5, "completed": 80, "total_input_tokens": 9000, "total_output_tokens": 20000,
    "request_throughput": 1.93, "mean_ttft_ms": 52.0, "accept_length": 3.2, "max_concurrent_requests": 8,
}  # fmt: skip
MLX_RUN: dict[str, Any] = {  # dflash-mlx, benchmark/results/qwen3-5-9b-1024.json at 26cb2553: the figures of one run
    "ttft_ms": 529.25, "generation_tps": 125.9, "tokens_per_cycle": 9.061946902654867, "cycles": 113,
    "acceptance_ratio": 0.8896484375, "acceptance_first_20_avg": 7.4, "acceptance_last_20_avg": 11.5,
}  # fmt: skip
MLX: dict[str, Any] = {  # the same file, with a shorter prompt
    "hardware": {"chip": "Apple M5 Max", "mlx_version": "0.31.1"},
    "config": {
        "target_model": "Qwen/Qwen3.5-9B", "draft_model": "z-lab/Qwen3.5-9B-DFlash", "max_new_tokens": 1024,
        "block_tokens": 16, "prompt": "If f(1) = 1, find f.", "prompt_tokens": 92, "prompt_id": "f", "repeat": 3,
    },
    "runs": [{"run": number, "dflash": MLX_RUN, "speedup": 4.06} for number in (1, 2, 3)],
    "summary": {"acceptance_ratio_median": 0.8896484375},
}  # fmt: skip


def mlx_suite(*runs: dict[str, Any], **config: Any) -> dict[str, Any]:
    """results.json of dflash-mlx ec6bacd9 with a prompt for each run."""
    known = {"model": "m", "draft": "d", "max_tokens": 64, "block_tokens": 16, "copyspec_mode": "off", **config}
    prompts: list[dict[str, Any]] = [
        {"config": {**known, "prompt": f"p{index}", "prompt_id": f"id{index}"}, "runs": [{"run": 1, "dflash": run}]}
        for index, run in enumerate(runs)
    ]
    flat = [item | {"prompt_id": "x"} for report in prompts for item in report["runs"]]
    return {"hardware": {}, "config": known, "prompts": prompts, "runs": flat, "summary": {}}


SWEEP_RUN: dict[str, Any] = {
    "latency": 20.0, "output_throughput": 90.0, "accept_length": 4.1, "accuracy": 0.8, "num_questions": 80,
    "num_valid_predictions": 80, "categorical_performance": None,
}  # fmt: skip
SWEEP: dict[str, Any] = {  # SpecForge a6b6b023, benchmarks/bench_eagle3.py: one data set, one setting, one run
    "model": "org/draft",
    "gsm8k": [
        {"batch_size": 8, "steps": 7, "topk": 1, "num_draft_tokens": 8, "metrics": [SWEEP_RUN], "num_samples": 80}
    ],
}  # fmt: skip


def aiperf_record(name: str, turn: int, steps: dict[str, int], **changes: Any) -> dict[str, Any]:
    """A line of profile_export.jsonl of aiperf 0.13 at --export-level records."""
    num_steps = sum(steps.values())
    accepted = sum(int(count) * number for count, number in steps.items())
    return {
        "metadata": {
            "session_num": 1, "x_request_id": "7609a2e7", "conversation_id": name, "turn_index": turn,
            "request_start_ns": 1759813207532900363, "benchmark_phase": "profiling", "was_cancelled": False,
        },
        "metrics": {"input_sequence_length": {"value": 550 + turn, "unit": "tokens"}},
        "spec_decode_acceptance": {
            "engine": "vllm", "mean_acceptance_length": 1 + accepted / num_steps, "acceptance_histogram": steps,
            "draft_acceptance_rate": 0.4, "num_accepted_draft_tokens": accepted, "num_draft_tokens": 3 * num_steps,
            "num_spec_steps": num_steps, "num_spec_tokens": 3,
        },
        "error": None,
    } | changes  # fmt: skip


def specdec_bench(*lengths: float) -> list[dict[str, Any]]:
    """acceptance_rate.json of Model-Optimizer's examples/specdec_bench, metrics/acceptance_rate.py."""
    return [
        {
            "Request_AL": {str(index): {"0": length} for index, length in enumerate(lengths)},
            "Average_AL": sum(lengths) / len(lengths),
            "Acceptance_Length_Histogram": {"1": 30, "2": 20, "4": 10},
            "Conditional_Acceptance_Rate": {"1": 1.0, "2": 0.5, "4": 0.33},
            "Joint_Acceptance_Rate": {"1": 1.0, "2": 0.5, "4": 0.17},
        }
    ]


def read(folder: Path, content: Any, name: str = "result") -> MeasuredResult:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_result(path)


def lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
