"""Faults that the answers of a run show by their tokens alone: one token repeated, and lengths other than asked."""

from collections import Counter
from collections.abc import Iterator

from dflash_cli.generation.answers import Answer
from dflash_cli.probing.served_finding import ServedFinding
from dflash_cli.probing.server_run import ServerRun
from dflash_runtime.phrases import plural

MIN_TOKENS, SAME, MOST = 32, 0.9, 0.5
"""An answer of MIN_TOKENS repeats one token if it makes up SAME of it. MOST answers that do so are a fault."""
MIN_CUT = 3


def find_answer_faults(run: ServerRun) -> Iterator[ServedFinding]:
    """Findings about the answers."""
    yield from _repeats(run)
    yield from _cut_short(run)
    yield from _past_limit(run)


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
