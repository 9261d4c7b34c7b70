"""Faults that answers show by their tokens, lengths and ids alone, such as tokens behind an end token."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_cli.generation.answers import Answer
from dflash_cli.probing.findings.evidence import Evidence, rule
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ReadLength
from dflash_runtime.metrics import MAX_DRAFT_TOKENS
from dflash_runtime.phrases import plural

MIN_TOKENS, SAME, MOST = 32, 0.9, 0.5
"""An answer of MIN_TOKENS repeats one token if it makes up SAME of it. MOST answers that do so are a fault."""
MIN_CUT = 3
MIN_IDS, MIN_WHOLE, MIN_SHORTENED = 3, 3, 2
"""Answers with one id in two runs, prompts read as a whole and prompts read in part that are a fault."""
MIN_STOPPED, MIN_PAST, MIN_LAST = 6, 3, 2
"""If the server does not tell its end token: ended answers, answers with tokens behind the token, and answers that end
with it."""


@rule("answers")
def find_repeats_of_one_token(evidence: Evidence) -> Iterator[ServedFinding]:
    """Answers that are mostly one token."""
    long = [answer for answer in evidence.runs[0].answers if len(answer.output.token_ids) >= MIN_TOKENS]
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


@rule("answers")
def find_cut_answers(evidence: Evidence) -> Iterator[ServedFinding]:
    """Answers that end at one length below the limit. A full context would end them at different lengths."""
    run = evidence.runs[0]
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


@rule("answers")
def find_past_limit(evidence: Evidence) -> Iterator[ServedFinding]:
    """Answers with more tokens than asked for."""
    run = evidence.runs[0]
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


@rule("answers")
def find_cut_measured_prompts(evidence: Evidence) -> Iterator[ServedFinding]:
    """Measured prompts that the server reads in part."""
    yield from find_cut_prompts(evidence.runs[0].read_lengths)


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


@rule("answers")
def find_stored_answers(evidence: Evidence) -> Iterator[ServedFinding]:
    """A finding if a later run has answers with the ids of the first run. An engine gives each answer its own id."""
    runs = evidence.runs
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


@rule("answers")
def find_past_end(evidence: Evidence) -> Iterator[ServedFinding]:
    """A finding if answers go on behind the token that ends them. Answers that ignore it may hold it anywhere."""
    facts, runs = evidence.facts, evidence.runs
    if runs[0].asked.ignore_eos:
        return
    answers = [
        EndedAnswer(item.output.token_ids, item.output.finish_reason == "stop") for run in runs for item in run.answers
    ]
    told = frozenset(facts.end_ids).union(*(run.end_ids for run in runs))
    width = facts.num_draft_tokens or MAX_DRAFT_TOKENS
    end_ids = told or _seen_ends(answers, width)
    past = [number for item in answers if (number := item.num_past(end_ids))]
    if past:
        source = "that the server or the model names" if told else "that ends other answers and begins none"
        yield ServedFinding(
            id="answers-past-end",
            severity="error",
            seen=f"{len(past)} of {plural(len(answers), 'answer')} have up to {plural(max(past), 'token')} behind the "
            f"end token {', '.join(map(str, sorted(end_ids)))}, {source}",
            follows="the rest of an accepted block behind the end token is given to the user: the server looks for the "
            "end after the whole step, or cuts at another place",
            next="ask the same without the draft, and report it to the engine; until then cut answers at the end token",
        )


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """The tokens of an answer, and whether it ended before its limit."""

    token_ids: tuple[int, ...]
    is_stopped: bool

    def num_past(self, end_ids: frozenset[int]) -> int:
        """Tokens behind the first end token."""
        place = next((place for place, token in enumerate(self.token_ids) if token in end_ids), len(self.token_ids))
        return max(0, len(self.token_ids) - 1 - place)


def _seen_ends(answers: Sequence[EndedAnswer], width: int) -> frozenset[int]:
    """The token that is within a step of the end in each ended answer, for the first time, and in no other answer."""
    stopped = [item.token_ids for item in answers if item.is_stopped and item.token_ids]
    last = Counter(ids[-1] for ids in stopped)
    others = {token for item in answers if not item.is_stopped for token in item.token_ids}
    for token, count in last.most_common(1):
        behind = [len(ids) - 1 - ids.index(token) if token in ids else width + 1 for ids in stopped]
        is_end = count >= MIN_LAST and len(stopped) >= MIN_STOPPED and max(behind) <= width
        if is_end and token not in others and sum(map(bool, behind)) >= MIN_PAST:
            return frozenset([token])
    return frozenset()


def _length(answer: Answer) -> int:
    return len(answer.output.token_ids)
