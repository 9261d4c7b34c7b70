"""Ask greedily while sampled requests run: do the answers stay?

A batch of both has one draft and one verification. A server that reads the sampled request's candidates for a greedy
one gives wrong tokens, and only there. Runs with greedy requests alone do not show it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Event, Thread

from dflash_cli.probing.asking.question import QUESTIONS, NotJudged, Outcome, QuestionSession
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.counter_watch import await_counters
from dflash_cli.probing.served.token_equality import TokenEquality, TokenText, compare_texts
from dflash_cli.probing.servers.inference_server import Asked
from dflash_runtime.errors import DFlashError
from dflash_runtime.phrases import plural

NUM_ANSWERS, NUM_THREADS, MAX_SAMPLED, TEMPERATURE = 4, 2, 4, 1.0
"""MAX_SAMPLED is for each thread and for each comparison."""


@QUESTIONS.register("sampled-neighbours")
def ask(session: QuestionSession) -> Outcome:
    """A finding if greedy answers change while sampled requests run, twice, and not alone."""
    texts = session.greedy_texts(NUM_ANSWERS)
    if session.facts.max_concurrency == 1:
        raise NotJudged("the server runs one request at a time")
    found = _compare(session, texts)
    seen = f"{found.num_same} of {plural(len(texts), 'greedy answer')} the same beside sampled requests"
    changed = [texts[int(item.name)] for item in found.unexplained]
    is_fault = found.shows_fault(is_quantised=session.facts.is_quantised) and all(
        session.ask(text.prompt_ids, len(text.token_ids)).served.token_ids == text.token_ids for text in changed
    )
    if not is_fault or not _compare(session, changed).unexplained:
        return Outcome(seen=seen)
    most = max(item.gap_nats or 0 for item in found.unexplained)
    finding = ServedFinding(
        id="answers-change-beside-sampled",
        severity="error",
        seen=f"{seen}, others differ by up to {most:.2f} nats; alone they are the same",
        follows="sampled requests of a batch change the greedy answers in it. Whether the draft is the reason is not "
        "known",
        next="start the server without the draft and repeat; report it to the engine",
    )
    return Outcome(seen=seen, findings=[finding])


def _compare(session: QuestionSession, texts: Sequence[TokenText]) -> TokenEquality:
    """Measured answers against answers beside sampled requests. A name is the answer's place in `texts`."""
    measured, beside = {}, {}
    with _sampled_requests(session):
        for place, text in enumerate(texts):
            served = session.server.answer(text.prompt_ids, Asked(max_new_tokens=len(text.token_ids)))
            session.charge(len(text.prompt_ids) + len(served.token_ids))
            measured["", place] = replace(text, name=str(place))
            is_cut = served.finish_reason == "length"
            beside["", place] = replace(text, name=str(place), token_ids=served.token_ids, is_cut=is_cut)
    return compare_texts(
        measured,
        beside,
        names=(session.first.name, "beside sampled requests"),
        next_logprobs=session.likeliest,
        near_tie_nats=session.near_tie_nats,
    )


@contextmanager
def _sampled_requests(session: QuestionSession) -> Iterator[None]:
    """Sampled requests run meanwhile. Counters have come to rest afterwards, because later questions read them."""
    before, num_earlier, ended = session.counters(), session.num_requests, Event()
    tokens: list[int] = []

    def run(place: int) -> None:
        with suppress(DFlashError):
            for number in range(MAX_SAMPLED):
                if ended.is_set():
                    return
                prompt_ids = session.prompts[-1 - (NUM_THREADS * number + place) % len(session.prompts)]
                size = session.asking.asked.max_new_tokens
                asked = Asked(max_new_tokens=size, temperature=TEMPERATURE, seed=number + 1)
                tokens.append(len(session.server.answer(prompt_ids, asked).token_ids))
                session.charge(len(prompt_ids) + tokens[-1])

    threads = [Thread(target=run, args=(place,), daemon=True) for place in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        if before is not None:
            num_requests = session.num_requests - num_earlier
            await_counters(session.server, before, num_requests=num_requests, num_tokens=sum(tokens))
