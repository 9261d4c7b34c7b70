"""Measure whether a server drafts, its acceptance length against a yardstick, and the cause if it is low."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dflash_cli.acceptance.journal import check_journal
from dflash_cli.comparing.measured_result import MeasuredResult, read_result
from dflash_cli.generation.answers import Event
from dflash_cli.generation.prompts import Conversation
from dflash_cli.probing.asking.chat_findings import find_cut_streams
from dflash_cli.probing.asking.lost_answers import find_lost_answers
from dflash_cli.probing.asking.question import QuestionReport, QuestionSession
from dflash_cli.probing.asking.question_round import ask_questions
from dflash_cli.probing.counters.process_identity import NUM_LOOKS
from dflash_cli.probing.findings.attribution import attribute
from dflash_cli.probing.findings.evidence import Evidence, find_all
from dflash_cli.probing.findings.explained_findings import UNREPEATABLE, drop_explained
from dflash_cli.probing.findings.replicas import find_identity
from dflash_cli.probing.findings.served_finding import ServedFinding, sort_findings
from dflash_cli.probing.probe_options import ProbePlan
from dflash_cli.probing.probe_result import OtherServer, Probed
from dflash_cli.probing.run_comparison import compare_lengths, compare_tokens, engaged_results
from dflash_cli.probing.runs.run_measurement import run_server
from dflash_cli.probing.runs.server_run import ServerRequest, ServerRun
from dflash_cli.probing.servers.http_client import ServerUnreachable
from dflash_cli.probing.servers.inference_server import InferenceServer
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.errors import RequestError, UnsupportedError, UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import plural

RUNS_SHARE, QUESTIONS_SHARE = 0.95, 0.5
"""Prompts and questions get the first share of the time, comparing answers the rest. Questions get the second share,
and a run with one request at a time gets 1."""
TRIAL_LEN = 16
"""Tokens of the one answer before the measurement."""
NOT_BY_LOAD = {"acceptance-falls-with-time", "repeat-lowers-acceptance"}
"""Findings which say that the load is not the reason of a fall."""
BESIDE = "beside"
"""The name of the run of the other server."""
Observe = Callable[[str], Callable[[Event], None]]


def probe(request: ProbePlan, observe: Observe | None = None) -> Probed:
    """Probe the server and the yardsticks. `observe` gets the name of each run and returns its observer.

    Raises:
        UnsupportedError: the server does not report acceptance.
        UsageError: the yardstick shares no prompt with the request.
        ServerUnreachable: the server stops answering.
    """
    own = None if request.options.result is None else read_result(request.options.result)
    _check_prompts(own, request)
    looks = [_look_at(request.server) for _ in range(NUM_LOOKS)]
    num_before = len(request.server.readings)
    facts = _try_out(request.server, request.asking, looks)
    facts = replace(facts, end_ids=tuple(sorted({*facts.end_ids, *request.end_ids})))
    others = None if request.beside is None else _try_out(request.beside, request.asking, [request.beside.describe()])
    _check_journals(request, facts, others)
    runs, beside = _run_all(request, facts, others, observe)
    identity = find_identity(looks, request.server.readings, num_before)
    questions = _ask_questions(request, facts, runs, identity)
    identity = identity or find_identity(looks, request.server.readings, num_before)
    loads, yardsticks = compare_lengths(
        runs, [*([own] if own else []), *engaged_results([beside])], request.asking.confidence
    )
    alike, unlike = compare_tokens(request, runs, beside)
    # These show the same with one request at a time, so the load is not the reason.
    found_later = {item.id for question in questions for item in question.findings}
    evidence = Evidence(
        facts=facts,
        runs=runs,
        loads=[] if found_later & NOT_BY_LOAD else loads,
        yardsticks=yardsticks,
        equalities=[] if found_later & UNREPEATABLE else alike,
        yardstick_equalities=unlike,
        known_faults=request.known_faults,
        minimum=request.options.min_acceptance,
        drafts_every_step=request.server.drafts_every_step,
        concurrencies=request.options.concurrency,
        identity=identity,
    )
    return Probed(
        url=request.server.client.url,
        server=facts,
        definition=request.server.definition,
        runs=tuple(runs),
        prompts=request.source,
        attribution=attribute(evidence),
        beside=OtherServer(server=beside.facts, run=beside) if beside is not None else None,
        loads=tuple(loads),
        yardsticks=tuple(yardsticks),
        equalities=(*alike, *unlike, *(item.equality for item in questions if item.equality is not None)),
        questions=tuple(questions),
        findings=_findings(request, evidence, questions),
        known_faults=tuple(request.known_faults),
        notes=tuple(_notes(request, facts, runs)),
    )


def _run_all(
    request: ProbePlan, facts: ServerFacts, others: ServerFacts | None, observe: Observe | None
) -> tuple[list[ServerRun], ServerRun | None]:
    """A run for each number of concurrent requests, and one run of the other server, if it is asked."""
    numbers = _in_reach(request.options.concurrency, facts)
    number_beside = [] if others is None else _in_reach(request.options.concurrency, others)[:1]
    ends = _share_time(request, [*numbers, *number_beside])
    runs = [
        _run(request, request.server, facts, f"{number} at a time", number, end, observe)
        for number, end in zip(numbers, ends, strict=False)
    ]
    runs = [run for run in runs if run.answers or run.failed] or runs[:1]
    _check_answered(request.server, runs[0])
    if request.beside is None or others is None:
        return runs, None
    return runs, _run(request, request.beside, others, BESIDE, number_beside[0], ends[-1], observe)


def _look_at(server: InferenceServer) -> ServerFacts:
    """The server's description of itself, with one reading of its metrics."""
    num_readings, facts = len(server.readings), server.describe()
    if len(server.readings) == num_readings:
        server.metrics()
    return facts


def _check_answered(server: InferenceServer, run: ServerRun) -> None:
    """Refuse a first run in which the server refused each request.

    Raises:
        ServerUnreachable: with the statuses.
    """
    if run.refusals and not run.answers:
        statuses = ", ".join(map(str, run.refusals))
        hint = "give a smaller --concurrency, or look in the server's log"
        raise ServerUnreachable(
            f"answered {statuses} to each prompt", id="no-answer", path=server.client.url, hint=hint
        )


def _share_time(request: ProbePlan, numbers: Sequence[int]) -> list[float]:
    """When each run must end, in seconds of `time.monotonic`. Questions get the rest of the time.

    A run with N requests at a time gets an Nth of the time of a run with one.
    """
    now, shares = time.monotonic(), [1 / number for number in numbers]
    whole = RUNS_SHARE * (request.ends_at - now) / (sum(shares) + (QUESTIONS_SHARE if request.options.questions else 0))
    return [now + whole * sum(shares[: place + 1]) for place in range(len(shares))]


def _ask_questions(
    request: ProbePlan, facts: ServerFacts, runs: Sequence[ServerRun], identity: Sequence[ServedFinding]
) -> list[QuestionReport]:
    if not request.options.questions or not runs[0].answers:
        return []
    session = QuestionSession(
        server=request.server,
        facts=facts,
        asking=request.asking,
        first=runs[0],
        near_tie_nats=request.options.near_tie,
        is_safe=not identity,
    )
    return ask_questions(session)


def _findings(request: ProbePlan, evidence: Evidence, questions: Sequence[QuestionReport]) -> tuple[ServedFinding, ...]:
    """All findings that no other finding explains."""
    asked = [item for question in questions for item in question.findings]
    chats = request.server.chats
    found = [*find_all(evidence), *asked, *find_cut_streams(chats), *find_lost_answers(chats)]
    return sort_findings(drop_explained(found))


def rows_path(path: Path | None, concurrency: int, *, is_beside: bool = False) -> Path | None:
    """`rows.8.jsonl` for `rows.jsonl`: each run has its own file, which `dflash compare` reads."""
    middle = f"{BESIDE}.{concurrency}" if is_beside else str(concurrency)
    return None if path is None else path.with_name(f"{path.stem}.{middle}{path.suffix}")


def _check_journals(request: ProbePlan, facts: ServerFacts, others: ServerFacts | None) -> None:
    """Check the output files of all runs before the first run."""
    asking, numbers = request.asking, _in_reach(request.options.concurrency, facts)
    paths = [rows_path(asking.journal, number) for number in numbers]
    if others is not None:
        paths.append(rows_path(asking.journal, _in_reach(request.options.concurrency, others)[0], is_beside=True))
    for path in filter(None, paths):
        check_journal(path, resume=asking.resume, force=asking.force)


def _in_reach(concurrencies: Sequence[int], facts: ServerFacts) -> list[int]:
    """The concurrencies, each at most the number of requests that the server runs at the same time."""
    limit = facts.max_concurrency or max(concurrencies)
    return list(dict.fromkeys(min(number, limit) for number in concurrencies))


def _try_out(server: InferenceServer, asking: ServerRequest, looks: Sequence[ServerFacts]) -> ServerFacts:
    """The server's facts after one short answer, which warms the server up and shows whether it reports acceptance.

    Raises:
        UnsupportedError: the server does not report acceptance.
    """
    facts = next((item for item in looks if item.is_drafting), looks[-1])
    facts = replace(facts, recognised_by=server.recognised_by)
    steps, num_draft_tokens, method = None, None, None
    for row in asking.rows:
        try:
            prompt_ids = Conversation(row).next_prompt(asking.tokenizer, chat=asking.chat)
            served = server.answer(prompt_ids, replace(asking.asked, max_new_tokens=TRIAL_LEN))
        except RequestError:
            continue  # the run reports this prompt's error
        steps, num_draft_tokens = served.steps or served.num_drafted, served.num_draft_tokens
        method = served.method
        break
    if facts.is_drafting or steps is not None or method is not None:
        known = facts.num_draft_tokens or num_draft_tokens
        return replace(facts, is_drafting=True, num_draft_tokens=known, method=facts.method or method)
    if facts.is_drafting is False or server.counters() is None:
        release = f" {facts.release}" if facts.release else ""
        raise UnsupportedError(
            f"{server.title}{release} reports no speculative decoding: it runs without a draft, "
            "or does not show what it counts",
            id="no-speculation",
            path=server.client.url,
            hint=f"start it with {server.how_to_report}",
        )
    return facts


def _run(
    request: ProbePlan,
    server: InferenceServer,
    facts: ServerFacts,
    name: str,
    concurrency: int,
    ends_at: float,
    observe: Observe | None,
) -> ServerRun:
    asking = replace(
        request.asking,
        ends_at=ends_at,
        journal=rows_path(request.asking.journal, concurrency, is_beside=name == BESIDE),
    )
    watching = observe(name) if observe is not None else None
    return run_server(server, facts, asking, name=name, concurrency=concurrency, observe=watching)


def _check_prompts(own: MeasuredResult | None, request: ProbePlan) -> None:
    """Refuse a yardstick of other prompts before the first request."""
    if own is None or not own.conversations:
        return
    asked = {row.digest for row in request.asking.rows}
    if not asked & {item.digest for item in own.conversations}:
        raise UsageError(
            "has none of the prompts",
            id="other-prompts",
            path=own.name,
            field="--result",
            hint="give the same --prompts or --dataset as for that result, or the same --target if it used neither",
        )


def _notes(request: ProbePlan, facts: ServerFacts, runs: Sequence[ServerRun]) -> Iterator[Notice]:
    """Notes about the whole probe."""
    limit = facts.max_concurrency
    above = [str(number) for number in request.options.concurrency if limit and number > limit]
    if above:
        most = f"the server runs at most {plural(limit or 0, 'request')} at the same time"
        yield Notice(f"{limit} at a time instead of {', '.join(above)}: {most}", id="concurrency-limited")
    if any(run.is_engaged and run.origin != "answers" for run in runs):
        how = request.server.how_to_report_steps
        yield Notice(f"intervals need the steps of each answer: {how}", id="intervals-need-steps")
    if request.source.warning is not None:
        yield request.source.warning
