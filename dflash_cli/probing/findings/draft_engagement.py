"""Whether the server uses its draft: for no request, for a part of them, or with fewer draft tokens than configured."""

from collections.abc import Iterator

from dflash_cli.probing.findings.draft_fit import MIN_STEPS
from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.phrases import plural

PART, MIN_TOKENS, FEWER = 0.15, 64, 0.9
"""A share and a number of tokens without a draft that rounding of steps and ends of answers do not explain. A server
that stops drafting also counts fewer verify steps per token, below this share."""
WHOLE = 0.02
"""A mean this close to a whole number is a limit; a server that chooses widths by itself has others."""


@rule("drafting")
def find_not_engaged(evidence: Evidence) -> Iterator[ServedFinding]:
    """No run with a drafted token."""
    if all(run.is_engaged is False for run in evidence.runs):
        tokens = sum(run.total.num_tokens for run in evidence.runs)
        configured = "a draft is configured, and " if evidence.facts.is_drafting else ""
        yield ServedFinding(
            id="draft-not-engaged",
            severity="error",
            seen=f"{configured}not one token was drafted in {plural(tokens, 'token')} of answers",
            follows="the server decodes plainly; the reason is not visible from outside",
            next="look in the server's log: a feature, a batch size or a failed load may turn speculation off",
        )


@rule("drafting")
def find_partly_engaged(evidence: Evidence) -> Iterator[ServedFinding]:
    """Tokens that no step accounts for. Each step commits its accepted drafts and one token more."""
    before, runs = 0.0, evidence.runs
    for run in runs:
        share, num_tokens = _undrafted(run, drafts_always=evidence.drafts_every_step)
        is_off = run.is_engaged is False and runs[0].is_engaged is True
        has_fewer_steps = run is runs[0] or _steps_per_token(run) < FEWER * _steps_per_token(runs[0])
        if is_off or (share > PART and num_tokens >= MIN_TOKENS and has_fewer_steps):
            is_loaded = run is not runs[0] and before < PART / 2
            beside = f", {runs[0].name} {100 * before:.0f}%" if is_loaded else _which_undrafted(evidence.facts, run)
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


def _undrafted(run: ServerRun, *, drafts_always: bool) -> tuple[float, int]:
    """Share and number of the answers' tokens that come from steps without a draft; 0 if that is not known."""
    total = sum(max(0, len(answer.output.token_ids) - 1) for answer in run.answers)
    if run.is_engaged is not True or run.includes_others or not total:
        return 0.0, 0
    counted, found = run.counted, 0
    if run.lists_steps:
        found = _undrafted_of_answers(run, drafts_always=drafts_always)
    elif counted is not None and counted.num_drafts is not None and counted.num_accepted_drafts is not None:
        found = max(0, total - counted.num_drafts - counted.num_accepted_drafts)
        if not drafts_always:
            found = (
                min(found, _undrafted_of_answers(run, drafts_always=drafts_always)) if run.origin == "answers" else 0
            )
    return found / total, found


def _undrafted_of_answers(run: ServerRun, *, drafts_always: bool) -> int:
    """Tokens that no step of their answer accounts for. A server that may drop drafts must lack all of an answer."""
    each = [(len(answer.output.token_ids) - 1, answer.output.acceptance_lengths) for answer in run.answers]
    return sum(max(0, tokens - sum(steps)) for tokens, steps in each if drafts_always or not steps)


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


@rule("drafting")
def find_capped(evidence: Evidence) -> Iterator[ServedFinding]:
    """Steps of the first run that all draft fewer tokens than configured."""
    configured, run = evidence.facts.num_draft_tokens, evidence.runs[0]
    widths = run.widths
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
