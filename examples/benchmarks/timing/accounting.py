"""Account for a step's time: kernels by kind, idle time, and levels from the floor to the measured time."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

KINDS = {
    "sums over GPUs": r"nccl|all_reduce|all_gather",
    "recurrent layers": r"delta_|recent_conv|keep_rows|gated_norm|output_gate",
    "attention": r"attention|attend|flash|fmha|combine",
    "matrix products": r"gemm|gemv|nvjet|xmma|cutlass|cublas|splitk|matmul|linear|product|sum_parts|markov",
    "argmax and sampling": r"argmax|reduce_kernel|sampl|softmax|probs|tile_(sums|stats)|_tie|threshold|_cut_|coins"
    r"|top_tokens|group_keys|pair_scores|candidate_walk",
    "norms, rotation, activation, KV store": r"norm|rope|silu|kv_store|context_kv|block_conv",
}
"""Kind of kernel -> pattern of names. The first match decides; other kernels are bookkeeping."""

BOOKKEEPING = "bookkeeping"


@dataclass(frozen=True)
class Interval:
    """One kernel, copy or fill on the device; times in microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class StepAccount:
    """Averages of one step, from a profiler's pass over several."""

    busy_ms: float
    num_nodes: float
    kinds_us: Mapping[str, float]
    top: tuple[tuple[str, float, float], ...]
    """Name, microseconds and launches of the slowest kernels."""


def kind_of(name: str) -> str:
    """Kind of a kernel, from its name."""
    return next((kind for kind, words in KINDS.items() if re.search(words, name.lower())), BOOKKEEPING)


def own_us(intervals: Iterable[Interval]) -> Iterator[tuple[Interval, float]]:
    """Each interval with the microseconds after the end of all earlier intervals.

    A kernel that is launched early waits for the previous kernel, and the time of this wait belongs to the previous
    kernel. The sum is the time in which at least one kernel runs.
    """
    reached = float("-inf")
    for item in sorted(intervals, key=lambda item: item.end):
        yield item, item.end - max(item.begin, reached)
        reached = item.end


def account(intervals: list[Interval], num_steps: int, num_top: int = 22) -> StepAccount:
    """Average the intervals over steps."""
    kinds = dict.fromkeys([*KINDS, BOOKKEEPING], 0.0)
    names: dict[str, list[float]] = {}
    for item, us in own_us(intervals):
        kinds[kind_of(item.name)] += us / num_steps
        total = names.setdefault(item.name, [0.0, 0.0])
        total[0] += us / num_steps
        total[1] += 1 / num_steps
    top = sorted(((name, us, count) for name, (us, count) in names.items()), key=lambda row: -row[1])[:num_top]
    return StepAccount(
        busy_ms=sum(kinds.values()) / 1000,
        num_nodes=len(intervals) / num_steps,
        kinds_us=kinds,
        top=tuple(top),
    )


def profile_steps(step: Callable[[], object], num_steps: int) -> StepAccount:
    """Run steps under torch's profiler (CUDA only). Tracing slows steps, so step times are measured elsewhere."""
    step()
    torch.cuda.synchronize()
    # `acc_events`: without it, torch warns that the profiler drops the events of an earlier cycle. There is one cycle.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    events = [item for item in seen.events() or () if item.device_type.name == "CUDA"]
    if not events:
        raise RuntimeError("the profiler saw no kernels: CUPTI is missing, or another program is tracing")
    return account([Interval(item.name, item.time_range.start, item.time_range.end) for item in events], num_steps)


def waterfall(
    steps: Iterable[tuple[str, float | None]], account: StepAccount | None, measured_ms: float
) -> list[tuple[str, float]]:
    """Name and milliseconds of each level, from the floor to the measured time.

    `steps` are levels found without running the step: floors and the chain of products. None is left out.
    """
    levels = [(name, value) for name, value in steps if value is not None]
    if account is not None:
        products = account.kinds_us["matrix products"] / 1000
        attention = products + account.kinds_us["attention"] / 1000
        levels.append(("its own matrix products", products))
        levels.append(("+ attention", attention))
        levels.append(("+ small kernels", account.busy_ms))
        levels.append(("+ gaps: measured", measured_ms))
    else:
        levels.append(("measured", measured_ms))
    return levels
