"""Measure how fast a pair decodes, with and without its draft. Prints nothing.

Only decoding is timed, and only while every request of a batch runs: prefill ends before the timed round, and the round
ends with the first finished answer. A draft's gain depends on its acceptance, so prompts are real and decoding is
greedy. `step_parts.py` measures the shares of draft and target, over fewer steps.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.generation.loaded_pair import PairSession
from dflash_cli.generation.prompts import Conversation, PromptRow, naming_row
from dflash_cli.tuning.batch_speeds import (
    BatchSpeed,
    RivalSpeed,
    Speed,
    TreeSpeed,
    Window,
    step_times,
)
from dflash_cli.tuning.round_intervals import CONFIDENCE, half_width
from dflash_cli.tuning.step_parts import StepParts, silence_draft, silence_target
from dflash_cli.tuning.timed_steps import check_num_steps
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.scheduling.admission import check_prompt
from dflash_runtime.scheduling.request import Request
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_runtime.warm_up import step_modes

"""Fewest steps of a round."""

PART_TOKENS = 32
"""Tokens of an answer with either model left out. Each token after the first takes a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRequest:
    """Prompts as token ids, batch sizes, the number and length of rounds, and arms to compare with.

    Every round takes the next prompts and starts again after the last one.
    """

    prompts: Sequence[Sequence[int]]
    batches: Sequence[int]
    max_new_tokens: int
    num_rounds: int
    rivals: Annotated[Sequence[str], "names of lookups"] = ()
    trees: Annotated[Sequence[int], "numbers of drafted tokens"] = ()

    def rounds(self, batch: int) -> list[list[Sequence[int]]]:
        """Return the prompts of each round of a batch size."""
        turns = itertools.cycle(self.prompts)
        return [list(itertools.islice(turns, batch)) for _ in range(self.num_rounds)]

    def num_runs(self, pair: LoadedPair) -> int:
        """Return the number of rounds to run, including a warm-up round for each measurement."""
        return len(self.batches) * len(_arms(pair, self)) * (self.num_rounds + 1)


def smallest(config: EngineConfig) -> EngineConfig:
    """Return the config with a tiny KV cache, for a session in which each measurement allocates its own cache."""
    return replace(config, num_pages=2 + config.max_num_requests, max_num_requests=1)


def speed_request(
    session: PairSession,
    rows: Sequence[PromptRow],
    batches: Sequence[int],
    *,
    max_new_tokens: int,
    num_rounds: int,
    chat: bool,
    rivals: Sequence[str] = (),
    trees: Sequence[int] = (),
) -> SpeedRequest:
    """Return the request for these rows, with at most as many prompts as the rounds of the largest batch take.

    Raises:
        RequestError: the model does not take a row. The message names the row.
    """
    assert session.llm.num_draft_tokens, "a pair that drafts"
    assert min(batches) >= 1
    turns = rows[: max(batches) * num_rounds]
    prompts = [_prompt_of(session, row, chat=chat) for row in turns]
    return SpeedRequest(
        prompts=prompts, batches=tuple(dict.fromkeys(batches)), max_new_tokens=max_new_tokens,
        num_rounds=num_rounds, rivals=rivals, trees=sorted({*trees}),
    )  # fmt: skip


def _prompt_of(session: PairSession, row: PromptRow, *, chat: bool) -> Sequence[int]:
    limits = session.llm.limits
    with naming_row(row):
        prompt = Conversation(row).next_prompt(session.tokenizer, chat=chat)
        check_prompt(prompt, vocab_size=limits.vocab_size, max_model_len=limits.max_model_len)
    return prompt


def measure_speeds(
    pair: LoadedPair, request: SpeedRequest, observe: Callable[[int], None] = lambda num_done: None
) -> Iterator[BatchSpeed]:
    """Yield the speed at each batch size. `observe` gets the number of finished rounds.

    Raises:
        UsageError: answers are too short to measure.
        UnsupportedError: see `LoadedPair.with_tree`.
        RequestError: a prompt does not fit the model.
    """
    count, arms = counting(observe), _arms(pair, request)
    for batch in request.batches:
        found = _Found(batch, dict(zip(arms, measure_rounds([*arms.values()], request, batch, count), strict=True)))
        speeds, windows = found.speeds, found.windows
        intervals = {
            name: found.ratio(name, "plain")[1] for name in ("speculative", "adaptive", "budget") if name in speeds
        }
        yield BatchSpeed(
            batch=batch,
            plain=speeds["plain"],
            speculative=speeds["speculative"],
            speedup_interval=intervals["speculative"],
            adaptive=speeds.get("adaptive"),
            adaptive_speedup_interval=intervals.get("adaptive"),
            budget=speeds.get("budget"),
            budget_speedup_interval=intervals.get("budget"),
            parts=StepParts.of_steps(*(step_times(windows[name]) for name in ("speculative", "no draft", "no target"))),
            trees=tuple(found.tree(num_nodes) for num_nodes in request.trees),
            rivals=tuple(found.rival(name) for name in request.rivals),
        )


class _Found:
    """The timed rounds of each arm at one batch size, and its speed."""

    def __init__(self, batch: int, windows: Mapping[str, Sequence[Window]]) -> None:
        self.windows = windows
        self.speeds = {name: Speed.of(of_arm, batch) for name, of_arm in windows.items()}

    def ratio(self, name: str, other: str) -> tuple[float, Interval | None]:
        """Return how many times as fast as `other` an arm is, in tokens per second, with the interval over rounds."""
        one, two = self.speeds[name], self.speeds[other]
        interval = _ratio_interval(self.windows[name], self.windows[other], one, two)
        return one.tokens_per_second / two.tokens_per_second, interval

    def tree(self, num_nodes: int) -> TreeSpeed:
        name = _tree_name(num_nodes)
        (speedup, speedup_interval), (gain, gain_interval) = self.ratio(name, "plain"), self.ratio(name, "speculative")
        return TreeSpeed(
            num_nodes=num_nodes, speed=self.speeds[name], speedup=speedup, speedup_interval=speedup_interval,
            gain=gain, gain_interval=gain_interval,
        )  # fmt: skip

    def rival(self, name: str) -> RivalSpeed:
        (speedup, speedup_interval), (lead, lead_interval) = self.ratio(name, "plain"), self.ratio("speculative", name)
        return RivalSpeed(
            name=name, speed=self.speeds[name], speedup=speedup, speedup_interval=speedup_interval,
            lead=lead, lead_interval=lead_interval,
        )  # fmt: skip


def _tree_name(num_nodes: int) -> str:
    return f"tree {num_nodes}"


def _arms(pair: LoadedPair, request: SpeedRequest) -> "dict[str, Arm]":
    """Return the arms of a comparison: without and with the draft, in other ways, rivals, without each model."""
    return {
        "plain": Arm(pair.without_draft()),
        "speculative": Arm(pair),
        **{name: Arm(chosen) for name, chosen in _choosing(pair).items()},
        **{_tree_name(number): Arm(pair.with_tree(number)) for number in request.trees},
        **{name: Arm(pair.with_lookup(name)) for name in request.rivals},
        "no draft": Arm(silence_draft(pair), max_new_tokens=PART_TOKENS),
        "no target": Arm(silence_target(pair), max_new_tokens=PART_TOKENS),
    }


def _ratio_interval(windows: Sequence[Window], plain: Sequence[Window], one: Speed, other: Speed) -> Interval | None:
    """Return the interval of a speed-up over rounds. Each round times both arms on the same prompts."""
    rates = [[tokens / seconds for tokens, _, seconds in item] for item in (windows, plain)]
    half = half_width([math.log(fast / slow) for fast, slow in zip(*rates, strict=True)], CONFIDENCE)
    if math.isinf(half):
        return None
    ratio = one.tokens_per_second / other.tokens_per_second
    return Interval(ratio * math.exp(-half), ratio * math.exp(half), CONFIDENCE)


def counting(observe: Callable[[int], None]) -> Callable[[], None]:
    """Return a function that tells `observe` how often it was called."""
    numbers = itertools.count(1)
    return lambda: observe(next(numbers))


@dataclass(frozen=True, slots=True)
class Arm:
    """One side of a timed comparison: a pair, a verify width (None for whole blocks), and the longest answer."""

    pair: LoadedPair
    verify_width: int | None = None
    max_new_tokens: int | None = None


def measure_rounds(
    arms: Sequence[Arm], request: SpeedRequest, batch: int, count: Callable[[], None]
) -> list[list[Window]]:
    """Return the timed rounds of each arm at a batch size.

    The arms alternate, so that a disturbance of the machine affects all of them. An untimed warm-up round comes first,
    to compile kernels and capture CUDA graphs.
    """
    rounds = request.rounds(batch)
    lengths = [min(arm.max_new_tokens or request.max_new_tokens, request.max_new_tokens) for arm in arms]
    llms = [LLM(_sized(arm.pair, rounds, length)) for arm, length in zip(arms, lengths, strict=True)]
    for llm in llms:
        _capture_widths(llm, batch)
    windows: list[list[Window]] = [[] for _ in arms]
    for prompts in [rounds[0], *rounds]:
        for arm, llm, length, of_arm in zip(arms, llms, lengths, windows, strict=True):
            of_arm.append(_run(llm, prompts, length, arm.verify_width))
            check_num_steps(of_arm[-1][1])
            count()
    return [of_arm[1:] for of_arm in windows]


def _capture_widths(llm: LLM, batch: int) -> None:
    """Capture every width of a lookup's steps: the warm-up round may lack some."""
    engine = llm.engine
    if engine.runner.graphs is not None and llm.pair.is_looking_up:
        for mode in step_modes(engine, [SamplingParams()], batch):
            engine.runner.graphs.prepare(batch, mode)


def _choosing(pair: LoadedPair) -> dict[str, LoadedPair]:
    """Return the pair with adaptive width and with a row budget; empty if steps are not captured as CUDA graphs."""
    if not pair.has_graphs:
        return {}
    configs = {"adaptive": replace(pair.config, adaptive_width=True), "budget": replace(pair.config, row_budget=True)}
    return {name: replace(pair, config=config) for name, config in configs.items()}


def _sized(pair: LoadedPair, rounds: list[list[Sequence[int]]], max_new_tokens: int) -> LoadedPair:
    """Return the pair with just enough KV pages for the rounds, and with prefill of a whole round in one step."""
    limits, size, batch = pair.limits, pair.config.page_size, len(rounds[0])
    longest = max(len(prompt) for prompts in rounds for prompt in prompts) + max_new_tokens
    pages = -(-(longest + (pair.config.max_in_flight + 2) * limits.num_lookahead_tokens) // size)
    config = replace(pair.config, max_num_requests=batch, num_pages=batch * pages + 1, prefix_cache=False)
    num_rows = max(sum(map(len, prompts)) for prompts in rounds)
    return replace(pair, config=config, limits=replace(limits, max_num_requests=batch, max_batched_tokens=num_rows))


def _run(llm: LLM, prompts: list[Sequence[int]], max_new_tokens: int, verify_width: int | None = None) -> Window:
    """Fill the batch, decode until the first answer ends, and return tokens, steps and seconds of decoding."""
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, verify_width=verify_width)
    requests = [
        Request(index=index, prompt_token_ids=tuple(prompt), params=params) for index, prompt in enumerate(prompts)
    ]
    engine, num_steps = llm.engine, 0
    try:
        for request in requests:
            engine.add(request)
        while not all(request.output_token_ids or request.is_finished for request in requests):
            engine.step()
        _wait(llm.device)
        before, started = _num_tokens(requests), time.perf_counter()
        while not any(request.is_finished for request in requests):
            engine.step()
            num_steps += 1
        _wait(llm.device)
        seconds, num_tokens = time.perf_counter() - started, _num_tokens(requests) - before
    finally:
        engine.abort()
    failed = next((request.error for request in requests if request.error is not None), None)
    if failed is not None:
        raise failed
    return num_tokens, num_steps, seconds


def _num_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.output_token_ids) for request in requests)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
