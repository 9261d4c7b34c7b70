"""Decode steps and prefills of our own engine through the real loop, with scheduling, launches and commits."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.setup.settings import rows_of_a_step
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.warm_up import step_modes
from timing.accounting import StepAccount, profile_steps
from timing.forced import force_acceptance
from timing.gauges import Span
from timing.pairs import RandomPair, random_prompt
from timing.shapes import BLOCK, Shape

WARM_STEPS = 8
PROFILED_STEPS = 10
ROUNDS = 5
DISTURBED = 1.5
"""A round that takes this many times the median was disturbed."""

LEAST_ROOM = 13
"""Least number of tokens per step that a cell has room for: twice the usual forced acceptance."""

FILL_ROWS = 8192
"""Prompt rows per step while a cell is filled, which is not timed."""

AT_ONCE, EXACT = "dflash-at-once", "dflash-exact"
RECURRENT_ROWS = {AT_ONCE: "at-once", EXACT: "exact"}
"""The arm in which recurrent layers run the rows of a block at once."""

PAGE_SIZE = 16
ADAPTIVE_WARM_STEPS = 64
"""Untimed steps of the adaptive arm, in which it learns acceptance and tries other widths."""


def why_not_adaptive(device: torch.device) -> str | None:
    """Why the adaptive arm cannot run on a device; None if it can."""
    return None if device.type == "cuda" else "widths adapt only if steps are CUDA graphs"


@dataclass(frozen=True)
class Cell:
    """One measurement of decode steps. `acceptance` is the forced mean, or None for real acceptance.

    A step verifies `verify_width` rows of a block, or trees of `num_nodes` drafted tokens if that is above 0.
    """

    arm: str
    batch: int
    context: int
    steps: int
    acceptance: float | None = None
    has_graphs: bool = True
    verify_width: int | None = None
    num_nodes: int = 0

    @property
    def is_drafting(self) -> bool:
        return not self.arm.startswith("plain")

    @property
    def warm_steps(self) -> int:
        return ADAPTIVE_WARM_STEPS if self.arm == "adaptive" else WARM_STEPS

    @property
    def num_new_tokens(self) -> int:
        """Tokens that a request may commit: twice the expected number, and equal for every arm.

        Attention splits its work by the longest possible text, so an arm with less room would be faster.
        """
        num_steps = self.steps + ADAPTIVE_WARM_STEPS + PROFILED_STEPS + 8 + -(-self.batch * self.context // FILL_ROWS)
        return int(num_steps * min(BLOCK, max(LEAST_ROOM, 2 * (self.acceptance or 1)))) + 8 * BLOCK

    def engine_pair(self, random: RandomPair, **settings: Any) -> LoadedPair:
        """The pair of the engine that runs these steps, with `settings` in its config."""
        return engine_pair(random, self.arm, self.acceptance, self.num_nodes, **settings)

    @property
    def max_model_len(self) -> int:
        return self.context + self.num_new_tokens + 4 * BLOCK


@dataclass(frozen=True)
class StepTimes:
    """Times of the steps of a cell. `acceptance` and `verify_width` are means over drafting steps, or None.

    span  wall-clock times of the begin and the end of all rounds
    """

    ms: float
    rounds: list[float]
    span: Span
    tokens_per_second: float
    acceptance: float | None
    verify_width: float | None
    mean_context: float
    account: StepAccount | None


def measure_steps(random: RandomPair, cell: Cell, *, has_profile: bool) -> StepTimes:
    """Fill an engine, time its steps, and run more steps under the profiler."""
    llm = ready_engine(random, cell)
    try:
        requests = llm.engine.scheduler.live
        before, steps_before = num_tokens(requests), [len(request.steps) for request in requests]
        began = time.time()
        rounds, counts = time_rounds(llm, requests, cell.steps)
        span = (began, time.time())
        committed = num_tokens(requests) - before
        drafted = [step for request, num in zip(requests, steps_before, strict=True) for step in request.steps[num:]]
        times = StepTimes(
            ms=statistics.median(rounds),
            rounds=rounds,
            span=span,
            tokens_per_second=tokens_per_second(rounds, counts, cell.steps // ROUNDS),
            acceptance=statistics.fmean(step.num_accepted + 1 for step in drafted) if drafted else None,
            verify_width=statistics.fmean(len(step.draft_ids) + 1 for step in drafted) if drafted else None,
            mean_context=cell.context + (before + committed / 2) / len(requests),
            account=profile_steps(llm.engine.step, PROFILED_STEPS) if has_profile else None,
        )
        ended = [request for request in requests if request.is_finished]
        if ended:
            raise RuntimeError(f"{len(ended)} of {len(requests)} requests ended before the last step: {ended[0].error}")
    finally:
        llm.close()
    return times


def engine_pair(
    random: RandomPair, arm: str, acceptance: float | None, num_nodes: int = 0, **settings: Any
) -> LoadedPair:
    """The pair of an arm, with `settings` in its engine config. It verifies trees if `num_nodes` is above 0."""
    pair, is_drafting = random.variants.get(arm, random.pair), not arm.startswith("plain")
    pair = pair if is_drafting else pair.without_draft()
    pair = pair.with_tree(num_nodes) if num_nodes else pair
    if acceptance is not None and is_drafting:
        pair = force_acceptance(pair, acceptance)
    config = replace(pair.config, **settings, adaptive_width=arm == "adaptive")
    limits = replace(
        pair.limits,
        max_num_requests=config.max_num_requests,
        max_batched_tokens=rows_of_a_step(config, pair.placement.kernels),
        max_model_len=config.max_model_len or pair.limits.max_model_len,
    )
    return replace(pair, config=config, limits=limits)


def ready_engine(random: RandomPair, cell: Cell) -> LLM:
    """An engine that decodes: prompts are prefilled, kernels compiled and graphs captured."""
    pages = cell.batch * -(-cell.max_model_len // PAGE_SIZE) + 1
    pair = cell.engine_pair(
        random, max_num_requests=cell.batch, num_pages=pages, prefix_cache=False,
        recurrent_rows=RECURRENT_ROWS.get(cell.arm, "auto"), graphs=cell.has_graphs,
        max_model_len=cell.max_model_len, max_batched_tokens=FILL_ROWS,
    )  # fmt: skip
    llm = LLM(pair)
    requests = make_requests(
        random.shape, [cell.context] * cell.batch, cell.num_new_tokens, verify_width=cell.verify_width
    )
    capture_widths(llm, requests)
    for request in requests:
        llm.engine.add(request)
    while not all(request.output_token_ids for request in requests):
        llm.engine.step()
        _check(requests)
    for _ in range(cell.warm_steps):
        llm.engine.step()
    _check(requests)
    return llm


def capture_widths(llm: LLM, requests: Sequence[Request]) -> None:
    """Capture the steps of all widths for this number of requests, if they are not captured yet.

    An engine's warm-up does this for every number of requests, so that the first trial of a width is not slower.
    """
    graphs, params = llm.engine.runner.graphs, [requests[0].params]
    if graphs is None:
        return
    for bucket, mode in graphs.missing(lambda bucket: step_modes(llm.engine, params, bucket)):
        if bucket >= len(requests) and not mode.num_prompt_rows:
            graphs.capture(bucket, mode)


def make_requests(
    shape: Shape, lengths: Sequence[int], max_new_tokens: int, seed: int = 0, verify_width: int | None = None
) -> list[Request]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, verify_width=verify_width)
    prompts = (random_prompt(shape, length, generator) for length in lengths)
    return [Request(index=index, prompt_token_ids=prompt, params=params) for index, prompt in enumerate(prompts)]


def prefill_ms(
    random: RandomPair, lengths: Sequence[int], arm: str, *, repeats: int = 3, has_profile: bool = False
) -> tuple[list[float], list[Span], StepAccount | None]:
    """Milliseconds of each repeat from adding prompts until all have their first token, in the default engine.

    With the wall-clock times of each repeat, and the profile of one more.
    """
    pages = sum(-(-(length + 8 * BLOCK) // PAGE_SIZE) for length in lengths) + 1
    pair = engine_pair(
        random, arm, None, max_num_requests=len(lengths), num_pages=pages,
        prefix_cache=False, max_model_len=max(lengths) + 8 * BLOCK,
    )  # fmt: skip
    llm, seeds = LLM(pair), count()

    def prefill() -> tuple[float, Span]:
        requests = make_requests(random.shape, lengths, max_new_tokens=4 * BLOCK, seed=next(seeds))
        wait(llm.device)
        began, started = time.time(), time.perf_counter()
        for request in requests:
            llm.engine.add(request)
        while not all(request.output_token_ids for request in requests):
            llm.engine.step()
            _check(requests)
        elapsed, ended = time.perf_counter() - started, time.time()
        wait(llm.device)
        llm.close()
        return elapsed * 1000, (began, ended)

    prefill()
    times, spans = zip(*(prefill() for _ in range(repeats)), strict=True)
    return list(times), list(spans), profile_steps(prefill, 1) if has_profile else None


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def tokens_per_second(rounds: Sequence[float], counts: Sequence[int], steps: int) -> float:
    """Tokens per second, from milliseconds per step and tokens of each round. Disturbed rounds are left out."""
    limit = DISTURBED * statistics.median(rounds)
    kept = [(ms * steps, count) for ms, count in zip(rounds, counts, strict=True) if ms <= limit]
    return 1000 * sum(count for _, count in kept) / sum(ms for ms, _ in kept)


def time_rounds(llm: LLM, requests: Sequence[Request], steps: int) -> tuple[list[float], list[int]]:
    """Milliseconds per step and tokens of each round."""
    times, counts = [], []
    for _ in range(ROUNDS):
        wait(llm.device)
        before, begin = num_tokens(requests), time.perf_counter()
        for _ in range(steps // ROUNDS):
            llm.engine.step()
        wait(llm.device)
        times.append((time.perf_counter() - begin) * 1000 / (steps // ROUNDS))
        counts.append(num_tokens(requests) - before)
    return times, counts


def _check(requests: Sequence[Request]) -> None:
    failed = next((request.error for request in requests if request.error is not None), None)
    if failed is not None:
        raise failed


def num_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.output_token_ids) for request in requests)
