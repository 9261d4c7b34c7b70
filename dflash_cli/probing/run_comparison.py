"""Compare a server's runs with each other, with a local result and with another server's run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import Comparison, compare_results
from dflash_cli.probing.probe_options import ProbePlan
from dflash_cli.probing.runs.server_run import ServerRun
from dflash_cli.probing.served.token_equality import (
    TokenEquality,
    TokenText,
    Turn,
    compare_texts,
    texts_of_answers,
    texts_of_file,
)
from dflash_cli.probing.servers.inference_server import InferenceServer
from dflash_runtime.errors import DFlashError


def engaged_results(runs: Sequence[ServerRun | None]) -> list[MeasuredResult]:
    """The results of the runs with a drafted token."""
    return [run.as_result() for run in runs if run is not None and run.is_engaged]


def compare_lengths(
    runs: Sequence[ServerRun], others: Sequence[MeasuredResult], confidence: float
) -> tuple[list[Comparison], list[Comparison]]:
    """The later runs and the yardsticks, each compared with the first run on the prompts they share."""
    if not runs[0].is_engaged:
        return [], []
    base, *later = engaged_results([run for run in runs if run is runs[0] or run.is_comparable(runs[0])])
    found = [_pair(base, item, confidence) for item in (*later, *others)]
    return found[: len(later)], found[len(later) :]


def _pair(base: MeasuredResult, other: MeasuredResult, confidence: float) -> Comparison:
    shared = {item.digest for item in base.conversations} & {item.digest for item in other.conversations}
    sides = [
        replace(item, conversations=tuple(row for row in item.conversations if row.digest in shared))
        if shared
        else item
        for item in (base, other)
    ]
    return compare_results(sides, confidence=confidence, paired=bool(shared))[0]


def compare_tokens(
    request: ProbePlan, runs: Sequence[ServerRun], beside: ServerRun | None
) -> tuple[list[TokenEquality], list[TokenEquality]]:
    """Greedy answers of the first run compared with the later runs, and with the yardsticks."""
    if request.asking.asked.temperature > 0:
        return [], []
    texts = texts_of_answers(runs[0].answers)

    def against(other: Mapping[Turn, TokenText], name: str) -> TokenEquality:
        return compare_texts(
            texts,
            other,
            names=(runs[0].name, name),
            next_logprobs=_asking(request.server),
            near_tie_nats=request.options.near_tie,
        )

    alike = [against(texts_of_answers(run.answers), run.name) for run in runs[1:]]
    own = texts_of_file(request.options.result) if request.options.result is not None else {}
    unlike = [against(own, request.options.result.name)] if own and request.options.result is not None else []
    if beside is not None:
        unlike.append(against(texts_of_answers(beside.answers), beside.name))
    return alike, unlike


def _asking(server: InferenceServer) -> Callable[[Sequence[int]], Mapping[int, float]]:
    """A function for the server's log-probabilities. It returns nothing if the server does not report them."""

    def ask(text_ids: Sequence[int]) -> Mapping[int, float]:
        try:
            return server.next_logprobs(text_ids)
        except DFlashError:
            return {}

    return ask
