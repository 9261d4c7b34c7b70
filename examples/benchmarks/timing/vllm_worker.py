"""Run in a new process with vLLM: read a job from the first file, write JSON lines to the second.

A job has the directories of both checkpoints, engine settings, and cells: decode steps, prefills, or a load. The script
imports nothing of this project, so its environment may differ.
"""

import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SHORT = 16


class Engine:
    """vLLM's offline engine with its counters."""

    def __init__(self, job: Row) -> None:
        from vllm import LLM

        self.vocab: int = job["vocab"]
        started = time.perf_counter()
        settings = {
            "model": job["target"], "skip_tokenizer_init": True, "dtype": "bfloat16",
            "max_model_len": job["max_model_len"], "gpu_memory_utilization": job["gpu_memory_utilization"],
            "max_num_seqs": job["max_num_requests"], "enable_prefix_caching": False, "disable_log_stats": False,
        }  # fmt: skip
        if job["has_recurrence"]:
            settings["gdn_prefill_backend"] = "triton"  # needs no package beside vLLM
        if job["speculative"] is not None:
            settings["speculative_config"] = job["speculative"]
        self.llm: Any = LLM(**settings)
        self.start_s = time.perf_counter() - started

    def run(self, prompts: list[list[int]], lengths: list[int]) -> tuple[float, list[Any], float]:
        """Run requests -> seconds, outputs, and the wall clock at the start."""
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False) for length in lengths
        ]
        rows = [{"prompt_token_ids": prompt} for prompt in prompts]
        clock, started = time.time(), time.perf_counter()
        outputs = self.llm.generate(rows, params, use_tqdm=False)
        return time.perf_counter() - started, outputs, clock

    def counters(self) -> dict[str, float]:
        return {item.name: item.value for item in self.llm.get_metrics() if hasattr(item, "value")}

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        """Random token ids from the middle of the vocabulary."""
        low, high = self.vocab // 100, self.vocab * 98 // 100
        return [[random.randrange(low, high) for _ in range(length)] for length in lengths]


def measure_steps(engine: Engine, cell: Row, is_drafting: bool) -> Row:
    """Step times from the difference of long and short answers, medians of three runs each."""
    batch, longer = cell["batch"], SHORT + cell["num_tokens"]
    runs: dict[int, list[tuple[float, float, float]]] = {SHORT: [], longer: []}
    engine.run(engine.prompts([cell["context"]] * batch), [SHORT] * batch)
    for length, found in runs.items():
        for _ in range(3):
            before = engine.counters()
            seconds, _, _ = engine.run(engine.prompts([cell["context"]] * batch), [length] * batch)
            found.append((seconds, *drafted(before, engine.counters())))
    short, long = (sorted(found)[1] for found in runs.values())
    seconds = long[0] - short[0]
    num_drafts, num_accepted = long[1] - short[1], long[2] - short[2]
    num_steps = num_drafts / batch if is_drafting else float(cell["num_tokens"])
    return {
        "ms": 1000 * seconds / max(num_steps, 1),
        "tokens_per_second": batch * cell["num_tokens"] / seconds,
        "acceptance_achieved": 1 + num_accepted / num_drafts if num_drafts else None,
    }


def measure_prefill(engine: Engine, cell: Row) -> Row:
    times = []
    for _ in range(4):
        prompts = engine.prompts(cell["lengths"])
        times.append(1000 * engine.run(prompts, [1] * len(prompts))[0])
    return {"ms": statistics.median(times[1:]), "rounds": times[1:]}


def measure_load(engine: Engine, cell: Row) -> Row:
    """Run the load of the other arms, after one short run."""
    few = cell["prompts"][: cell["num_warm"]]
    engine.run(few, [SHORT] * len(few))
    before = engine.counters()
    seconds, outputs, clock = engine.run(cell["prompts"], cell["output_lengths"])
    after = engine.counters()
    num_drafts, num_accepted = drafted(before, after)
    preemptions = after.get("vllm:num_preemptions", 0) - before.get("vllm:num_preemptions", 0)
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {
        "seconds": seconds,
        "num_tokens": num_tokens,
        "tokens_per_second": num_tokens / seconds,
        "first_token_s": first_tokens(outputs, clock),
        "acceptance_achieved": 1 + num_accepted / num_drafts if num_drafts else None,
        "num_preemptions": preemptions,
        "peak_memory_bytes": used_memory(),
    }


def drafted(before: dict[str, float], after: dict[str, float]) -> tuple[float, float]:
    """Draft steps and accepted tokens between two readings of the counters."""
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    drafts, accepted = (after.get(name, 0) - before.get(name, 0) for name in names)
    return drafts, accepted


def first_tokens(outputs: list[Any], clock: float) -> list[float]:
    """Seconds from the call to each request's first token. Empty if this vLLM does not report it."""
    stats: list[Any] = [getattr(output, "metrics", None) for output in outputs]
    if not all(getattr(item, "first_token_latency", None) for item in stats):
        return []
    return [float(item.arrival_time - clock + item.first_token_latency) for item in stats]


def used_memory() -> int | None:
    """Bytes in use on the device by all processes. vLLM reserves its share at start."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    random.seed(0)
    import vllm

    engine = Engine(job)
    measures = {"prefill": measure_prefill, "load": measure_load}
    with Path(sys.argv[2]).open("w", encoding="utf-8") as stream:
        for cell in job["cells"]:
            try:
                if cell["kind"] == "step":
                    found = measure_steps(engine, cell, job["speculative"] is not None)
                else:
                    found = measures[cell["kind"]](engine, cell)
            except Exception as error:
                found = {"error": next(iter(str(error).splitlines()), type(error).__name__)}
            facts = {"kind": cell["kind"], "vllm": vllm.__version__, "start_s": engine.start_s}
            stream.write(json.dumps(facts | found) + "\n")
            stream.flush()


if __name__ == "__main__":
    main()
