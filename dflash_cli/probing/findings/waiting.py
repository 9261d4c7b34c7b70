"""Requests that wait for each other: a server that runs one at a time, or a queue that takes much of their time.

A server that shares its time between requests ends all of them late. A server that runs one request at a time ends the
first one as early as alone, and each further one a whole answer later. Long prompts are read one after another by sound
servers, too, so that only runs with more tokens in answers than in prompts are judged by their times.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.run_load import RunLoad, TimedAnswer
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_runtime.phrases import plural

MIN_AT_ONCE, MIN_ALONE_S = 3, 0.01
"""Fewer requests at the same time, and answers that take less time alone, are not judged by their times."""
GAIN = 1.3
"""A server that runs several requests at a time gives GAIN times the tokens per second of one request, or more."""
EARLY, LATE, FITTING = 0.6, 1.5, 0.75
"""This share of the answers must end between EARLY and LATE times their time alone after the answer before."""
QUEUED, MIN_QUEUED_S = 0.4, 0.02
"""Share of the answers' time, and seconds per answer, in the server's own queue from which requests wait in it."""


@rule("waiting")
def find_waiting(evidence: Evidence) -> Iterator[ServedFinding]:
    """At most one finding about requests that wait for each other."""
    facts, runs = evidence.facts, evidence.runs
    if facts.max_concurrency == 1:
        yield _in_turn("info", "the server's settings allow 1 request at a time", "its settings say so")
        return
    for run in runs:
        if run.concurrency == 1 or run.includes_others:
            continue
        if _runs_in_turn(runs[0], run):
            reason = "its own queue holds the others" if run.load.waiting else (
                "a limit, a lock or a gateway may be the reason; which one is not known"
            )  # fmt: skip
            yield _in_turn("warning", f"{_rates(runs[0], run)}{_gauges(run.load)}", reason)
            return
        share = _queued(run.load)
        if share is not None:
            yield ServedFinding(
                id="requests-queue",
                severity="warning",
                seen=f"{run.name}: requests are in the server's queue for {100 * share:.0f}% of their time, "
                f"{run.load.queue_s or 0:.2f} s in all{_gauges(run.load)}",
                follows="the server runs fewer requests at a time than were asked. A draft's weights and cache leave "
                "less memory for requests; whether that or a setting is the reason is not known",
                next="look in the server's log for the number of requests that its cache holds, and for a limit of "
                "running requests in its options",
            )
            return


def _in_turn(severity: str, seen: str, reason: str) -> ServedFinding:
    return ServedFinding(
        id="requests-run-in-turn",
        severity="info" if severity == "info" else "warning",
        seen=seen,
        follows=f"the server runs one request at a time: {reason}. With more clients each waits for all others",
        next="look for a limit of requests: --max-num-seqs (vLLM), --max-running-requests (SGLang), --parallel "
        "(llama.cpp), a small cache, or a gateway",
    )


def _runs_in_turn(first: ServerRun, run: ServerRun) -> bool:
    """Whether a run gains no tokens per second, by its times and by the server's gauges or the ends of its answers."""
    alone = _alone(first)
    if run.concurrency < MIN_AT_ONCE or not alone or not run.load.answers or median(alone.values()) < MIN_ALONE_S:
        return False
    has_one = run.load.running == 1 and (run.load.waiting or 0) >= run.concurrency // 2
    return (has_one and _queued(run.load) is not None) or (
        _gain(first, run) <= GAIN and (has_one or _ends_in_turn(alone, run.load.answers))
    )


def _ends_in_turn(alone: Mapping[tuple[int, ...], float], answers: Sequence[TimedAnswer]) -> bool:
    """Whether the first answer is as early as alone, and each further one ends its own time alone after the last."""
    num_prompt = sum(len(item.prompt_ids) for item in answers)
    if num_prompt > sum(item.num_tokens for item in answers) or any(item.prompt_ids not in alone for item in answers):
        return False
    usual, before, num_fit, start = median(alone.values()), -math.inf, 0, min(item.started_s for item in answers)
    for item in answers:
        gap = item.ended_s - max(before, item.started_s)
        num_fit += any(EARLY * own <= gap <= LATE * own for own in (alone[item.prompt_ids], usual))
        before = item.ended_s
    is_early = answers[0].ended_s - start <= LATE * max(alone[answers[0].prompt_ids], usual)
    return is_early and num_fit >= FITTING * len(answers)


def _alone(first: ServerRun) -> dict[tuple[int, ...], float]:
    """Seconds of each answer with one request at a time; empty if the first run had more."""
    return {item.prompt_ids: item.seconds for item in first.load.answers} if first.concurrency == 1 else {}


def _gain(first: ServerRun, run: ServerRun) -> float:
    """Tokens per second of a run, as a multiple of the same with one request at a time: in all, or of the median."""
    alone = first.load.answers
    usual = median(item.num_tokens / max(item.seconds, 1e-9) for item in alone)
    return _rate(run.load.answers) / max(_rate_alone(alone), usual)


def _rate(answers: Sequence[TimedAnswer]) -> float:
    """Tokens per second from the first request to the last answer."""
    seconds = max(item.ended_s for item in answers) - min(item.started_s for item in answers)
    return sum(item.num_tokens for item in answers) / max(seconds, 1e-9)


def _rate_alone(answers: Sequence[TimedAnswer]) -> float:
    """Tokens per second while an answer runs."""
    return sum(item.num_tokens for item in answers) / max(sum(item.seconds for item in answers), 1e-9)


def _rates(first: ServerRun, run: ServerRun) -> str:
    answers = run.load.answers
    start, whole = min(item.started_s for item in answers), max(item.ended_s for item in answers)
    return (
        f"{_rate(answers):.0f} tokens per second {run.name}, {_rate_alone(first.load.answers):.0f} with one request; "
        f"{plural(len(answers), 'answer')} end one after another in {whole - start:.3f} s, and take "
        f"{median(item.seconds for item in first.load.answers):.3f} s alone"
    )


def _gauges(load: RunLoad) -> str:
    """`; its metrics show at most 1 running and 7 waiting`, and the mean time in its queue."""
    shown = [f"{number} {name}" for name, number in (("running", load.running), ("waiting", load.waiting)) if number]
    text = f"; its metrics show at most {' and '.join(shown)}" if shown else ""
    if load.queue_s and load.answers:
        text += f", {load.queue_s / len(load.answers):.3f} s in its queue per request"
    return text


def _queued(load: RunLoad) -> float | None:
    """Share of the answers' time in the server's queue, if that is much."""
    seconds = sum(item.seconds for item in load.answers)
    if load.queue_s is None or not seconds or load.queue_s < MIN_QUEUED_S * len(load.answers):
        return None
    share = load.queue_s / seconds
    return share if QUEUED <= share <= 1.0 else None
