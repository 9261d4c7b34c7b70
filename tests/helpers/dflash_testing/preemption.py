"""Preemption at a chosen step."""

from dflash_runtime.llm import LLM


def preempt_youngest(llm: LLM) -> None:
    """Preempt the youngest request, as the scheduler does when pages run out, after committing all steps in flight."""
    while llm.engine._in_flight:
        llm.engine._commit_oldest()
    running = llm.engine.scheduler._running
    if running and running[-1].num_preemptions < 3:  # a request that is always preempted never ends
        llm.engine.scheduler._preempt(running[-1])
