"""Run in a new process with vLLM: read a job from the first file, write JSON lines to the second.

A job has the directories of both checkpoints, engine settings, and cells: decode steps, prefills, or a load. Rows have
the wall-clock times of each measurement, so that the caller can average the power in between. The script imports
nothing of this project, so its environment may differ.
"""

import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SHORT = 16
STEPS = "vllm:iteration_tokens_total"
"""Histogram with one observation per step of the engine."""


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
        """Values of counters, and numbers of observations of histograms."""
        items = {item.name: getattr(item, "value", getattr(item, "count", None)) for item in self.llm.get_metrics()}
        return {name: value for name, value in items.items() if value is not None}

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        """Random token ids from the middle of the vocabulary."""
        low, high = self.vocab // 100, self.vocab * 98 // 100
        return [[random.randrange(low, high) for _ in range(length)] for length in lengths]


@dataclass(frozen=True)
class Answers:
    """Answers of equal length to prompts that arrive together.

    seconds   from the first token to the last, summed over the answers
    drafts    draft steps, summed over the answers, and the number of accepted draft tokens
    span      wall-clock times between which all answers grow
    """

    seconds: float
    drafts: float
    accepted: float
    span: tuple[float, float]


def answer(engine: Engine, cell: Row, length: int) -> Answers:
    """Run a batch of random prompts and read the times of their tokens."""
    before = engine.counters()
    _, outputs, _ = engine.run(engine.prompts([cell["context"]] * cell["batch"]), [length] * cell["batch"])
    drafts, accepted = drafted(before, engine.counters())
    begins, ends = zip(*((item.metrics.first_token_ts, item.metrics.last_token_ts) for item in outputs), strict=True)
    wall = time.time() - time.monotonic()  # vLLM stamps tokens with the monotonic clock
    return Answers(sum(ends) - sum(begins), drafts, accepted, (max(begins) + wall, min(ends) + wall))


def measure_steps(engine: Engine, cell: Row, speculative: Row | None) -> Row:
    """Step times from the difference of long and short answers, medians of three runs each.

    With a draft, answers of equal length take different numbers of steps. The time of each answer counts, and so a step
    counts once for every request in it: the last steps, in which few requests are left, count little.
    """
    batch, longer = cell["batch"], SHORT + cell["num_tokens"]
    answer(engine, cell, longer)  # clocks settle, and adaptive verification learns acceptance
    runs = [[answer(engine, cell, length) for _ in range(3)] for length in (SHORT, longer)]
    short, long = (sorted(found, key=lambda item: item.seconds)[1] for found in runs)
    seconds = long.seconds - short.seconds
    num_drafts, num_accepted = long.drafts - short.drafts, long.accepted - short.accepted
    num_steps = num_drafts if speculative is not None else float(batch * cell["num_tokens"])
    return {
        "ms": 1000 * seconds / max(num_steps, 1),
        "tokens_per_second": batch**2 * cell["num_tokens"] / seconds,
        "acceptance_achieved": 1 + num_accepted / num_drafts if num_drafts else None,
        "spans": [item.span for item in runs[1]],
    }


def measure_prefill(engine: Engine, cell: Row) -> Row:
    times, spans = [], []
    for _ in range(4):
        prompts = engine.prompts(cell["lengths"])
        seconds, _, clock = engine.run(prompts, [1] * len(prompts))
        times.append(1000 * seconds)
        spans.append((clock, clock + seconds))
    return {"ms": statistics.median(times[1:]), "rounds": times[1:], "spans": spans[1:]}


def measure_load(engine: Engine, cell: Row) -> Row:
    """Run the load of the other arms, after their warm-up."""
    engine.run(cell["warm_prompts"], cell["warm_output_lengths"])
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
        "num_steps": round(after[STEPS] - before.get(STEPS, 0)) if STEPS in after else None,
        "spans": [(clock, clock + seconds)],
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
                    found = measure_steps(engine, cell, job["speculative"])
                else:
                    found = measures[cell["kind"]](engine, cell)
            except Exception as error:
                found = {"error": next(iter(str(error).splitlines()), type(error).__name__)}
            facts = {"kind": cell["kind"], "vllm": vllm.__version__, "start_s": engine.start_s}
            stream.write(json.dumps(facts | found) + "\n")
            stream.flush()


if __name__ == "__main__":
    main()
