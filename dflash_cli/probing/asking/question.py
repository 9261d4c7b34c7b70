"""The interface of a question: a few requests beside the measured ones, and the findings that their answers support.

Each question is one file in `questions/` with a function decorated `@QUESTIONS.register(name)`. A question that the
server refuses, or that finds no time, is not judged. It then yields no finding.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from dflash_cli.probing.counters.counter_agreement import Answered, is_of_others, odd_counter
from dflash_cli.probing.counters.server_counters import ServerCounters
from dflash_cli.probing.findings.served_finding import ServedFinding
from dflash_cli.probing.runs.counter_watch import await_counters, has_come
from dflash_cli.probing.runs.server_run import ServerRequest, ServerRun
from dflash_cli.probing.served.chat_answers import ServedToolCall
from dflash_cli.probing.served.served_answer import ServedAnswer
from dflash_cli.probing.served.token_equality import (
    TokenDifference,
    TokenEquality,
    TokenText,
    find_worst,
    texts_of_answers,
)
from dflash_cli.probing.servers.http_client import TimeIsUp
from dflash_cli.probing.servers.inference_server import MEASURED, Asked, InferenceServer, Variant
from dflash_cli.probing.servers.server_facts import ServerFacts
from dflash_runtime.errors import DFlashError
from dflash_runtime.registry import Registry

CONTROL_LEN = 32
LAST = "first-prompts-again"
"""The name of the question that comes after all others."""


class NotJudged(Exception):
    """The server cannot answer the question. The text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionReport:
    """A question of the probe, with its cost and its outcome."""

    name: str
    is_judged: bool
    seen: Annotated[str, "the figures, or why the question was not judged"]
    num_requests: int
    num_tokens: Annotated[int, "tokens of prompts and answers"]
    seconds: float
    equality: TokenEquality | None = None
    findings: tuple[ServedFinding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The figures of a question that was judged, in words, and its findings."""

    seen: str
    findings: Sequence[ServedFinding] = ()
    equality: TokenEquality | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedAnswer:
    """An answer with its figures. A figure is None if neither the answer nor the counters show it.

    Steps of answers that other clients' requests ran beside are not taken from counters.
    """

    served: ServedAnswer
    num_steps: int | None
    num_accepted: int | None
    num_cached: int | None
    seconds: float

    @property
    def num_tokens(self) -> int:
        return len(self.served.token_ids)


@dataclass(frozen=True, slots=True)
class CountedCall:
    """A tool call, and the number of its verify steps if the counters show it."""

    call: ServedToolCall
    num_steps: int | None
    seconds: float


@dataclass(slots=True, kw_only=True)
class QuestionSession:
    """The server that is asked, its first run, and the cost of the question so far.

    is_safe  whether counters are of this probe's requests alone
    """

    server: InferenceServer
    facts: ServerFacts
    asking: ServerRequest
    first: ServerRun
    near_tie_nats: float
    is_safe: bool = True
    is_gone: bool = field(default=False, init=False)
    """Whether a plain request got no answer."""
    num_requests: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    last_len: int = field(default=0, init=False)
    """Tokens of the question's last prompt of `ask`, whether or not it got an answer."""

    def greedy_texts(self, most: int) -> list[TokenText]:
        """The first answers of the first run.

        Raises:
            NotJudged: answers are sampled or missing.
        """
        if self.asking.asked.temperature > 0:
            raise NotJudged("answers are sampled; only greedy answers can be compared")
        texts = list(texts_of_answers(self.first.answers).values())[:most]
        if not texts:
            raise NotJudged("no prompt was answered")
        return texts

    def ask(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        variant: Variant = MEASURED,
        temperature: float = 0.0,
        seed: int = 0,
    ) -> CountedAnswer:
        """The answer to a prompt, by default greedy. Raises the errors of `InferenceServer.answer`."""
        before, self.last_len = self.counters(), len(prompt_ids)
        started = time.perf_counter()
        asked = Asked(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
        served = self.server.answer(prompt_ids, asked, variant)
        seconds = time.perf_counter() - started
        num_requests = self.server.num_requests_of(len(served.token_ids), variant)
        self.charge(len(prompt_ids) + len(served.token_ids), num_requests)
        return self._counted(served, self._rise(before, len(served.token_ids)), seconds)

    def call_tool(self, ask: Callable[[], ServedToolCall]) -> CountedCall:
        """A tool call with its figures."""
        before = self.counters()
        started = time.perf_counter()
        call = ask()
        seconds = time.perf_counter() - started
        self.charge(call.num_tokens or 0)
        risen = None if call.num_tokens is None else self._rise(before, call.num_tokens)
        return CountedCall(call, None if risen is None else risen.num_drafts, seconds)

    def drafts_usually(self) -> bool:
        """Whether the server drafts for a measured prompt at this moment, so that its draft has not ended meanwhile."""
        return bool(self.prompts and self.ask(self.prompts[0], CONTROL_LEN).num_steps)

    def charge(self, num_tokens: int, num_requests: int = 1) -> None:
        """Count the tokens and the requests of an answer."""
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def likeliest(self, text_ids: Sequence[int]) -> dict[int, float]:
        """The log-probabilities of the next token; empty if the server does not report them."""
        try:
            self.charge(len(text_ids) + 1)
            return dict(self.server.next_logprobs(text_ids))
        except TimeIsUp:
            raise
        except DFlashError:
            return {}

    def find_worst(self, text: TokenText) -> TokenDifference | None:
        """The least likely token of an answer by the target's own scores. Raises the errors of `score`."""
        scores = self.server.score(text.prompt_ids, text.token_ids)
        self.charge(len(text.prompt_ids) + len(text.token_ids) + 1)
        return find_worst(text, scores, self.near_tie_nats)

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """The measured prompts, each once."""
        return list(dict.fromkeys(answer.output.prompt_token_ids for answer in self.first.answers))

    def prompt_of(self, text: str) -> list[int]:
        """Token ids of a user's message, in the chat template if there is one."""
        tokenizer = self.asking.tokenizer
        if not tokenizer.has_template:
            return tokenizer.encode(text)
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        return tokenizer.render(messages, where="a question", options={"enable_thinking": False})

    def counters(self) -> ServerCounters | None:
        """The counters; None if they are not exact or not of this probe's requests alone."""
        found = self.server.counters() if self.first.has_counters and self.is_safe else None
        return found if found is None or found.is_exact else None

    def _rise(self, before: ServerCounters | None, num_tokens: int) -> ServerCounters | None:
        """The rise of the counters, or None unless one answer of `num_tokens` tokens explains it."""
        if before is None:
            return None
        now = await_counters(self.server, before, num_requests=1, num_tokens=num_tokens)
        risen = None if now is None else now.since(before)
        if risen is None or not risen.is_exact or not has_come(risen, num_requests=1, num_tokens=num_tokens):
            return None
        own = Answered(num_answers=1, num_tokens=num_tokens)
        return None if is_of_others(risen, own) or odd_counter(risen, own) == "steps" else risen

    def _counted(self, served: ServedAnswer, risen: ServerCounters | None, seconds: float) -> CountedAnswer:
        steps, accepted = served.num_steps, served.num_accepted
        if served.steps is not None:
            steps, accepted = len(served.steps.accepted), sum(served.steps.accepted)
        elif risen is not None and risen.num_drafts is not None:
            steps, accepted = risen.num_drafts, risen.num_accepted_drafts
        elif steps is None and self.first.reports_steps:
            steps, accepted = 0, 0
        cached = served.num_cached
        if cached is None and risen is not None:
            cached = risen.num_cached_tokens
        return CountedAnswer(served=served, num_steps=steps, num_accepted=accepted, num_cached=cached, seconds=seconds)


Ask = Callable[[QuestionSession], Outcome]
QUESTIONS: Registry[Ask] = Registry("question of a probe")


def pooled_length(answers: Sequence[CountedAnswer]) -> tuple[float | None, int]:
    """Tokens per step over answers, and the number of steps; None if an answer's steps are unknown, or 0."""
    steps = [item.num_steps for item in answers]
    accepted = [item.num_accepted for item in answers]
    if None in steps or None in accepted:
        return None, 0
    num_steps = sum(item or 0 for item in steps)
    return (1 + sum(item or 0 for item in accepted) / num_steps if num_steps else None), num_steps
