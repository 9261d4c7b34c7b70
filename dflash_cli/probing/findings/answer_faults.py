"""Faults that the answers of a run show by their tokens alone: one token repeated, and lengths other than asked."""

from collections import Counter
from collections.abc import Iterator, Sequence

from dflash_cli.generation.answers import Answer
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ReadLength, ServerRun
from dflash_runtime.phrases import plural

MIN_TOKENS, SAME, MOST = 32, 0.9, 0.5
"""An answer of MIN_TOKENS repeats one token if it makes up SAME of it. MOST answers that do so are a fault."""
MIN_CUT = 3
MIN_IDS, MIN_WHOLE, MIN_SHORTENED = 3, 3, 2
"""Answers with one id in two runs, prompts read as a whole and prompts read in part that are a fault."""


def find_answer_faults(run: ServerRun) -> Iterator[ServedFinding]:
    """Findings about the answers."""
    yield from _repeats(run)
    yield from _cut_short(run)
    yield from _past_limit(run)
    yield from find_cut_prompts(run.read_lengths)


def find_stored_answers(runs: Sequence[ServerRun]) -> Iterator[ServedFinding]:
    """A finding if a later run has answers with the ids of the first run. An engine gives each answer its own id."""
    for run in runs[1:]:
        pairs = [(runs[0].ids[prompt], id) for prompt, id in run.ids.items() if prompt in runs[0].ids]
        alike = sum(first == id for first, id in pairs)
        if alike >= MIN_IDS and 2 * alike > len(pairs) and len(set(runs[0].ids.values())) == len(runs[0].ids):
            yield ServedFinding(
                id="answers-from-a-store",
                severity="warning",
                seen=f"{alike} of {plural(len(pairs), 'answer')} {run.name} have the ids of the answers {runs[0].name}",
                follows="something before the engine keeps answers and gives them again to the same request. Figures "
                f"{run.name} are no figures of the engine",
                next="probe the engine at its own address, or switch off the store of answers in the gateway",
            )
            return


def find_cut_prompts(found: Sequence[ReadLength]) -> Iterator[ServedFinding]:
    """A finding if long prompts are read in part, and shorter ones as a whole, so that the server counts right."""
    whole = {item.sent for item in found if item.sent == item.read}
    cut = [item for item in found if item.read < item.sent]
    if len(whole) >= MIN_WHOLE and len(cut) >= MIN_SHORTENED and min(item.read for item in cut) >= max(whole):
        most = max(item.read for item in cut)
        yield ServedFinding(
            id="prompts-cut",
            severity="error",
            seen=f"the server read at most {most} tokens of {plural(len(cut), 'prompt')} of up to "
            f"{max(item.sent for item in cut)} tokens, and prompts of up to {max(whole)} tokens as a whole",
            follows="longer prompts are cut without an error, so answers do not see the rest. A draft's cache may "
            "leave too little memory for the target's",
            next="look for a setting that truncates prompts, and for the size of the cache in the server's log",
        )


def _repeats(run: ServerRun) -> Iterator[ServedFinding]:
    long = [answer for answer in run.answers if len(answer.output.token_ids) >= MIN_TOKENS]
    tops = [Counter(answer.output.token_ids).most_common(1)[0] for answer in long]
    alike = [token for answer, (token, count) in zip(long, tops, strict=True) if count >= SAME * _length(answer)]
    if len(alike) > max(1, MOST * len(long)):
        yield ServedFinding(
            id="answers-repeat-one-token",
            severity="warning",
            seen=f"{len(alike)} of {plural(len(long), 'answer')} repeat one token, such as {alike[0]}",
            follows="acceptance may be simulated, or the target's numbers overflow. The acceptance "
            "of such answers says nothing",
            next="look for options and environment variables that simulate acceptance, and ask without the draft",
        )


def _cut_short(run: ServerRun) -> Iterator[ServedFinding]:
    """Answers that end at one length below the limit. A full context would end them at different lengths."""
    limit = run.asked.max_new_tokens
    cut = [answer for answer in run.answers if answer.output.finish_reason == "length" and _length(answer) < limit]
    lengths = {_length(answer) for answer in cut}
    if len(cut) >= MIN_CUT and len(lengths) == 1 and len({len(item.output.prompt_token_ids) for item in cut}) > 1:
        yield ServedFinding(
            id="answers-cut-short",
            severity="warning",
            seen=f"{plural(len(cut), 'answer')} end at {min(lengths)} tokens by a length limit, but {limit} were asked",
            follows="the server limits the length of answers",
            next="look for a limit of new tokens in the model's generation settings and in the server's options",
        )


def _past_limit(run: ServerRun) -> Iterator[ServedFinding]:
    limit = run.asked.max_new_tokens
    most = max(map(_length, run.answers), default=0)
    if most > limit:
        yield ServedFinding(
            id="answers-past-limit",
            severity="error",
            seen=f"{plural(sum(_length(item) > limit for item in run.answers), 'answer')} have more than the {limit} "
            f"tokens asked for, up to {most}",
            follows="the server commits accepted tokens past the end of an answer",
            next="start the server without the draft and compare the lengths; report it to the engine",
        )


def _length(answer: Answer) -> int:
    return len(answer.output.token_ids)
