"""Tokens behind the token that ends an answer: the rest of an accepted block that the server does not cut off."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_cli.probing.servers.inference_server import ServerFacts
from dflash_runtime.metrics import MAX_DRAFT_TOKENS
from dflash_runtime.phrases import plural

MIN_STOPPED, MIN_PAST, MIN_LAST = 6, 3, 2
"""If the server does not tell its end token: ended answers, answers with tokens behind the token, and answers that end
with it."""


@dataclass(frozen=True, slots=True)
class EndedAnswer:
    """The tokens of an answer, and whether it ended before its limit."""

    token_ids: tuple[int, ...]
    is_stopped: bool

    def num_past(self, end_ids: frozenset[int]) -> int:
        """Tokens behind the first end token."""
        place = next((place for place, token in enumerate(self.token_ids) if token in end_ids), len(self.token_ids))
        return max(0, len(self.token_ids) - 1 - place)


def find_past_end(facts: ServerFacts, runs: Sequence[ServerRun]) -> Iterator[ServedFinding]:
    """A finding if answers go on behind the token that ends them. Answers that ignore it may hold it anywhere."""
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
