"""Faults that a server's runs show: a draft that is off, partly on or capped, and acceptance that falls."""

from collections.abc import Iterator, Sequence

from dflash_cli.acceptance.intervals.statistics import value_text
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.probing.findings.answer_ends import find_past_end
from dflash_cli.probing.findings.answer_faults import find_answer_faults, find_stored_answers
from dflash_cli.probing.findings.attribution import is_lower_under_load
from dflash_cli.probing.findings.draft_fit import MIN_STEPS, find_draft_faults
from dflash_cli.probing.findings.replicas import foreign_traffic
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.findings.waiting import find_waiting
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_cli.probing.served.token_equality import TokenEquality
from dflash_cli.probing.servers.inference_server import InferenceServer, ServerFacts
from dflash_runtime.phrases import plural

PART, MIN_TOKENS, FEWER = 0.15, 64, 0.9
"""A share and a number of tokens without a draft that rounding of steps and ends of answers do not explain. A server
that stops drafting also counts fewer verify steps per token, below this share."""
WHOLE = 0.02
"""A mean this close to a whole number is a limit; a server that chooses widths by itself has others."""
EACH_STEP = 0.85
"""A surplus of accepted tokens, as a share of the steps, that the target's own token of each step explains."""
BONUS_COUNTED = """the target's own token of each step is counted as an accepted draft token, so the accepted tokens \
in all are too high, and so are dashboards that show them. Positions are right and are used where they are known"""
PART_COUNTED = """one of the counters lacks a part of the server, such as one of its engines; dashboards that show it \
are wrong. Figures by position are left out where they come from it"""


def find_in_runs(
    server: InferenceServer,
    facts: ServerFacts,
    runs: Sequence[ServerRun],
    loads: Sequence[Comparison],
    equalities: Sequence[TokenEquality],
) -> Iterator[ServedFinding]:
    """Findings from the runs, and from lengths and answers of later runs compared with the first run's."""
    yield from _not_engaged(facts, runs)
    off = list(_partly_engaged(server, facts, runs))
    yield from off
    yield from _capped(facts, runs[0])
    yield from _shapes(runs[0])
    yield from find_draft_faults(facts, runs)
    yield from find_answer_faults(runs[0])
    yield from find_stored_answers(runs)
    yield from find_past_end(facts, runs)
    if not off:
        yield from _lower_under_load(loads, equalities)
    yield from _unequal(facts, equalities)
    yield from _counters(runs)
    yield from _contradicting(runs)
    yield from find_waiting(facts, runs)
    yield from _prefix_cache(facts)
    yield from _quantised(facts)
    yield from _lossy(facts)


def _not_engaged(facts: ServerFacts, runs: Sequence[ServerRun]) -> Iterator[ServedFinding]:
    if all(run.is_engaged is False for run in runs):
        tokens = sum(run.total.num_tokens for run in runs)
        configured = "a draft is configured, and " if facts.is_drafting else ""
        yield ServedFinding(
            id="draft-not-engaged",
            severity="error",
            seen=f"{configured}not one token was drafted in {plural(tokens, 'token')} of answers",
            follows="the server decodes plainly; the reason is not visible from outside",
            next="look in the server's log: a feature, a batch size or a failed load may turn speculation off",
        )


def _partly_engaged(server: InferenceServer, facts: ServerFacts, runs: Sequence[ServerRun]) -> Iterator[ServedFinding]:
    """Tokens that no step accounts for. Each step commits its accepted drafts and one token more."""
    before = 0.0
    for run in runs:
        share, num_tokens = _undrafted(server, run)
        is_off = run.is_engaged is False and runs[0].is_engaged is True
        has_fewer_steps = run is runs[0] or _steps_per_token(run) < FEWER * _steps_per_token(runs[0])
        if is_off or (share > PART and num_tokens >= MIN_TOKENS and has_fewer_steps):
            is_loaded = run is not runs[0] and before < PART / 2
            beside = f", {runs[0].name} {100 * before:.0f}%" if is_loaded else _which_undrafted(facts, run)
            yield ServedFinding(
                id="draft-off-under-load" if is_loaded else "partly-drafted",
                severity="warning",
                seen=f"{run.name}: {100 * (1 if is_off else share):.0f}% of the tokens come from steps without a "
                f"draft{beside}",
                follows="the server stops drafting with more requests at a time"
                if is_loaded
                else "the server drafts for part of the answers; the condition is not known",
                next="look for a limit of batch size, length or kind of request in the server's options and log",
            )
            return
        before = max(before, share)


def _steps_per_token(run: ServerRun) -> float:
    return run.total.counts.num_drafts / max(1, sum(len(answer.output.token_ids) for answer in run.answers))


def _undrafted(server: InferenceServer, run: ServerRun) -> tuple[float, int]:
    """Share and number of the answers' tokens that come from steps without a draft; 0 if that is not known."""
    total = sum(max(0, len(answer.output.token_ids) - 1) for answer in run.answers)
    if run.is_engaged is not True or run.includes_others or not total:
        return 0.0, 0
    counted, found = run.counted, 0
    if run.lists_steps:
        found = _undrafted_of_answers(server, run)
    elif counted is not None and counted.num_drafts is not None and counted.num_accepted_drafts is not None:
        found = max(0, total - counted.num_drafts - counted.num_accepted_drafts)
        if not server.drafts_every_step:
            found = min(found, _undrafted_of_answers(server, run)) if run.origin == "answers" else 0
    return found / total, found


def _undrafted_of_answers(server: InferenceServer, run: ServerRun) -> int:
    """Tokens that no step of their answer accounts for. A server that may drop drafts must lack all of an answer."""
    each = [(len(answer.output.token_ids) - 1, answer.output.acceptance_lengths) for answer in run.answers]
    return sum(max(0, tokens - sum(steps)) for tokens, steps in each if server.drafts_every_step or not steps)


def _which_undrafted(facts: ServerFacts, run: ServerRun) -> str:
    """The slots that cannot draft, by the server's words; otherwise lengths of prompts, if these tell answers apart."""
    if facts.undrafted_slots:
        return f"; the server says that {facts.undrafted_slots} of its {facts.max_concurrency} slots cannot draft"
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for answer in run.answers:
        lengths[bool(answer.output.acceptance_lengths)].append(len(answer.output.prompt_token_ids))
    with_draft, without = lengths[True], lengths[False]
    if not with_draft or not without:
        return ""
    if min(without) > max(with_draft):
        return f", after prompts of {min(without)} tokens and more"
    return f", after prompts of {max(without)} tokens and fewer" if max(without) < min(with_draft) else ""


def _capped(facts: ServerFacts, run: ServerRun) -> Iterator[ServedFinding]:
    configured, widths = facts.num_draft_tokens, run.widths
    if not configured or widths is None or widths.num_steps < MIN_STEPS or run.includes_others:
        return
    limit = widths.widest if widths.widest is not None else round(widths.mean)
    is_limited = widths.widest is not None or abs(widths.mean - limit) < WHOLE
    if limit < configured and is_limited:
        yield ServedFinding(
            id="draft-capped",
            severity="warning",
            seen=f"no step drafts more than {limit} of {configured} configured tokens ({widths.num_steps} steps)",
            follows="the server limits the drafts, and the acceptance length is lower for it",
            next="look for a limit of draft tokens in the server's options, such as one by batch size",
        )


def _shapes(run: ServerRun) -> Iterator[ServedFinding]:
    ids = {"zeros": "acceptance-stops", "decay": "acceptance-falls-with-context", "cliff": "acceptance-cliff"}
    width = run.widths.widest or round(run.widths.mean) if run.widths is not None else None
    for shape in run.shapes:
        id = ids.get(shape.name.split()[0])
        if id is None or (id == "acceptance-stops" and shape.name.endswith(f" {width}")):
            continue  # no draft token beyond the limit can be accepted
        yield ServedFinding(
            id=id,
            severity="warning",
            seen=f"{shape.name}: {shape.evidence}",
            follows=f"the cause is not known; likely: {shape.causes}",
            next=shape.test,
        )


def _lower_under_load(loads: Sequence[Comparison], equalities: Sequence[TokenEquality]) -> Iterator[ServedFinding]:
    for item in loads:
        if is_lower_under_load(item, equalities):
            change = value_text(item.total.difference, item.total.interval, "+.3f")
            yield ServedFinding(
                id="acceptance-falls-with-load",
                severity="error",
                seen=f"{item.other.name}: {change} tokens per step against {item.base.name}, on the same prompts",
                follows="requests of a batch change each other's drafts; the cause is not known from outside",
                next="repeat with --concurrency 1,2,4,8 to find where it begins, and report it to the engine",
            )
            return


def _unequal(facts: ServerFacts, equalities: Sequence[TokenEquality]) -> Iterator[ServedFinding]:
    for item in equalities:
        if item.shows_fault(is_quantised=facts.is_quantised):
            most = max(difference.gap_nats or 0 for difference in item.unexplained)
            yield ServedFinding(
                id="answers-change-with-load",
                severity="error",
                seen=f"{item.num_unexplained} of {plural(item.num_compared, 'greedy answer')} differ between "
                f"{item.base} and {item.other} by up to {most:.2f} nats",
                follows="requests of a batch change each other's answers; rounding does not explain the gap",
                next="start the server without the draft and repeat; report it to the engine",
            )
            return


def _counters(runs: Sequence[ServerRun]) -> Iterator[ServedFinding]:
    notes = {note.id: f"{run.name}: {note}" for run in runs for note in run.notes}
    for id in ("other-clients-counted", "steps-of-other-clients"):
        if id in notes:
            yield foreign_traffic(notes[id])
            return
    if "counter-miscounts" in notes:
        yield ServedFinding(
            id="counters-miscount",
            severity="warning",
            seen=notes["counter-miscounts"],
            follows="this counter is wrong, and the other counters agree with the answers, so no other client is the "
            "reason. Dashboards that show it, such as tokens per second, are wrong",
            next="add up the answers in place of this counter, and report it to the engine",
        )
    if "requests-not-counted" in notes:
        yield ServedFinding(
            id="counters-incomplete",
            severity="warning",
            seen=notes["requests-not-counted"],
            follows="the counters are late, or another server gives the answers; a restart would make counters fall",
            next="repeat the probe with --concurrency 1, which reads the counters after each answer; behind a "
            "balancer, probe each replica at its own address",
        )
    if "counters-rounded" in notes:
        yield ServedFinding(
            id="counters-rounded",
            severity="info",
            seen=notes["counters-rounded"],
            follows="figures come from the answers alone; a server that has run for long has too few digits",
            next="restart the server for exact counters, or add up answers in place of its metrics",
        )
    if "server-restarted" in notes:
        yield ServedFinding(
            id="counters-reset",
            severity="warning",
            seen=notes["server-restarted"],
            follows="the server or an engine of it started anew; counters from before and after do not add up",
            next="look in the server's log for a restart, and repeat the probe",
        )


def _contradicting(runs: Sequence[ServerRun]) -> Iterator[ServedFinding]:
    for run in runs:
        counted = run.counted
        found = None if counted is None else counted.contradiction
        told = _bonus_in_answers(run)
        if found is not None or told is not None:
            counts_bonus = told is not None or (counted is not None and counted.counts_bonus)
            yield ServedFinding(
                id="counters-contradict",
                severity="warning",
                seen=f"{run.name}: the server counted {found}" if found is not None else f"{run.name}: {told}",
                follows=BONUS_COUNTED if counts_bonus else PART_COUNTED,
                next="compare the samples of each label at /metrics, and report it to the engine",
            )
            return


def _bonus_in_answers(run: ServerRun) -> str | None:
    """The sums of answers, if accepted tokens and steps are more than the answers' tokens by about one per step."""
    accepted, steps = (sum(values) for values in zip(*run.sums.values(), strict=True)) if run.sums else (0, 0)
    drafted = [answer.output for answer in run.answers if answer.output.prompt_token_ids in run.sums]
    surplus = accepted + steps - sum(len(output.token_ids) - 1 for output in drafted)
    past_end = len(drafted) * (run.facts.num_draft_tokens or 0)
    if steps < MIN_STEPS or not past_end or surplus <= past_end or surplus < EACH_STEP * steps:
        return None
    tokens = sum(len(output.token_ids) for output in drafted)
    return f"answers tell {accepted} accepted tokens and at least {steps} steps for {tokens} tokens"


def _prefix_cache(facts: ServerFacts) -> Iterator[ServedFinding]:
    if facts.has_prefix_cache is False:
        yield ServedFinding(
            id="prefix-cache-off",
            severity="warning",
            seen="the server's settings say that the prefix cache is off",
            follows="each request computes its whole prompt; engines switch the cache off for some pairs of a hybrid "
            "target and a draft. Whether the draft or a user did so is not visible from outside",
            next="look for the prefix cache in the server's log, and compare with a start without the draft",
        )


def _quantised(facts: ServerFacts) -> Iterator[ServedFinding]:
    if facts.is_quantised:
        yield ServedFinding(
            id="quantised-kv",
            severity="info",
            seen=f"keys and values are stored as {facts.kv_dtype}",
            follows="taps and verification read rounded values; acceptance may be lower than unquantised",
            next="compare with a server that stores keys and values unquantised: --beside URL",
        )


def _lossy(facts: ServerFacts) -> Iterator[ServedFinding]:
    if facts.lossy is not None:
        yield ServedFinding(
            id="verification-lossy",
            severity="warning",
            seen=f"the server's settings: {facts.lossy}",
            follows="draft tokens are accepted that the target alone would not choose, so answers do not follow the "
            "target's distribution, and acceptance says nothing about the draft",
            next="start the server with thresholds of 1.0, an exact method and no simulated acceptance",
        )
