"""Ask greedily without naming a penalty: do the server's own sampling settings change answers, or the drafting?

A model's generation settings or a server's options may bring a penalty on tokens that the text already has. An answer
at temperature 0 then avoids the likeliest token. The measured requests name neutral settings; requests of users do not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dflash_cli.probing.asking.kind_findings import find_undrafted
from dflash_cli.probing.asking.question import QUESTIONS, CountedAnswer, Outcome, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.served.token_equality import TokenDifference, TokenEquality, TokenText, compare_texts
from dflash_cli.probing.servers.inference_server import Variant
from dflash_runtime.phrases import plural

NUM_ANSWERS = 4
DEFAULTS = Variant(leaves_defaults=True)


@QUESTIONS.register("default-settings")
def ask(session: QuestionSession) -> Outcome:
    """A finding if the server's own settings change greedy answers."""
    texts = session.greedy_texts(NUM_ANSWERS)
    found = [session.ask(text.prompt_ids, session.asking.asked.max_new_tokens, DEFAULTS) for text in texts]
    equality = _compare(session, texts, found)
    return Outcome(
        seen=f"{equality.num_same} of {plural(len(texts), 'answer')} the same with the server's own settings",
        findings=[
            *_changed(session, equality, texts),
            *find_undrafted(session, found, "default-settings", "greedy answers with the server's own settings"),
        ],
    )


def _compare(session: QuestionSession, texts: Sequence[TokenText], found: Sequence[CountedAnswer]) -> TokenEquality:
    """Neutral answers against answers with the server's own settings. A name is the answer's place in `texts`."""
    neutral = {("", place): replace(text, name=str(place)) for place, text in enumerate(texts)}
    own = {
        ("", place): replace(text, token_ids=item.served.token_ids, is_cut=item.served.finish_reason == "length")
        for place, (text, item) in enumerate(zip(texts, found, strict=True))
    }
    return compare_texts(
        neutral,
        own,
        names=(session.first.name, "the server's own settings"),
        next_logprobs=session.likeliest,
        near_tie_nats=session.near_tie_nats,
    )


def _changed(session: QuestionSession, equality: TokenEquality, texts: Sequence[TokenText]) -> Iterator[ServedFinding]:
    """Only differences count that a second neutral answer does not have, so that the settings are the reason."""
    kept = [item for item in equality.unexplained if _stays(session, texts[int(item.name)], item.position)]
    real = replace(equality, differences=tuple(kept))
    if not real.shows_fault(is_quantised=session.facts.is_quantised):
        return
    most = max(item.gap_nats or 0 for item in kept)
    seen = (
        f"{len(kept)} of {plural(len(texts), 'greedy answer')} change by up to {most:.2f} nats if a request names no "
    )
    seen += "penalty"
    num_avoided = sum(_avoids(item, texts[int(item.name)]) for item in kept)
    if num_avoided == len(kept):
        seen += "; each avoids a likelier token that the text already has"
    shown = session.facts.own_penalties
    seen += f"; the server shows {shown} as its own settings" if shown else ""
    yield ServedFinding(
        id="default-settings-change-answers",
        severity="warning",
        seen=seen,
        follows="the server applies a penalty on repeated tokens by default"
        if num_avoided == len(kept)
        else "the server applies sampling settings of its own by default; which ones is not known",
        next="look for a penalty in the model's generation_config.json and in the server's options; the draft proposes "
        "tokens without it, and they are rejected",
    )


def _stays(session: QuestionSession, text: TokenText, position: int) -> bool:
    """Whether a second neutral answer has the measured tokens up to a position."""
    again = session.ask(text.prompt_ids, position + 1)
    return again.served.token_ids == text.token_ids[: position + 1]


def _avoids(item: TokenDifference, text: TokenText) -> bool:
    """Whether the neutral token was in the text, and the token of the other answer was not."""
    before = {*text.prompt_ids, *text.token_ids[: item.position]}
    return item.tokens[0] in before and item.tokens[1] not in before
