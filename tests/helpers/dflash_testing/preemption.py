"""Preemption at a chosen step."""

from collections.abc import Sequence

from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams


def preempt_youngest(llm: LLM) -> None:
    """Preempt the youngest request, as the scheduler does when pages run out, after committing all steps in flight."""
    while llm.engine._in_flight:
        llm.engine._commit_oldest()
    running = llm.engine.scheduler._running
    if running and running[-1].num_preemptions < 3:  # a request that is always preempted never ends
        llm.engine.scheduler._preempt(running[-1])


def run_preempted(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], *, every: int = 0
) -> list[Request]:
    """Run requests to their ends, step by step, and preempt the youngest request after each `every` steps."""
    requests = [
        Request(index=place, prompt_token_ids=tuple(prompt), params=item)
        for place, (prompt, item) in enumerate(zip(prompts, params, strict=True))
    ]
    for request in requests:
        llm.engine.add(request)
    num_steps = 0
    while llm.engine.scheduler.has_work:
        llm.engine.step()
        num_steps += 1
        if every and num_steps % every == 0:
            preempt_youngest(llm)
    llm.engine.scheduler.check_integrity()
    return requests
