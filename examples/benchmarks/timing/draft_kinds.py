"""Drafts of every kind on one target, with equal layers and weights, and their steps measured in turns.

A GPU's clock changes from second to second. So the engines of all kinds are filled first, and then each round times a
few steps of every kind. A kind's ratio is its time over the time of the first kind, the median over rounds.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.draft_config import ConvolutionConfig, DraftConfig, MarkovConfig, SelectorConfig
from dflash_runtime.drafts.draft import build_draft
from dflash_runtime.llm import LLM
from timing.accounting import StepAccount, profile_steps
from timing.engine_arms import PROFILED_STEPS, WARM_STEPS, Cell, ready_engine, wait
from timing.gauges import Span
from timing.pairs import RandomPair, normal_weights
from timing.shape_configs import model_configs

KINDS = ("dflash", "dflash2", "dspark", "dspark-anchor", "dspark-top64")
RANK, TOP_K, TAPS, GROUP = 256, 16, 2, 16
ROUNDS = 11


def kind_config(base: DraftConfig, kind: str, num_rows: int) -> DraftConfig:
    """The config of a kind that drafts `num_rows` - 1 tokens. An anchor-first block needs one row less for them."""
    if kind == "dflash2":
        convolution = ConvolutionConfig(kernel_size=TAPS, group_size=GROUP)
        selector = SelectorConfig(rank=RANK, top_k=TOP_K)
        return replace(base, family=kind, block_size=num_rows, convolution=convolution, selector=selector)
    if kind == "dflash":
        return replace(base, block_size=num_rows)
    is_first = kind == "dspark-anchor"
    markov = MarkovConfig(rank=RANK, top_k=64 if kind == "dspark-top64" else None)
    return replace(base, family="dspark", block_size=num_rows - is_first, sample_from_anchor=is_first, markov=markov)


def add_kinds(random: RandomPair, kinds: Sequence[str]) -> RandomPair:
    """The pair with the weights of every kind. All kinds share the weights of DFlash."""
    base, placement = model_configs(random.shape)[1], random.pair.placement
    shapes: dict[str, tuple[int, ...]] = {}
    for kind in kinds:
        shapes |= owned_shapes(kind_config(base, kind, base.block_size))
    own = owned_shapes(base)
    fresh = {name: shape for name, shape in shapes.items() if name not in own}
    return replace(random, draft_weights={**random.draft_weights, **dict(normal_weights(fresh, placement))})


def with_kind(random: RandomPair, kind: str, num_rows: int) -> RandomPair:
    """The pair with a draft of a kind that drafts `num_rows` - 1 tokens."""
    pair, config = random.pair, kind_config(model_configs(random.shape)[1], kind, num_rows)
    draft = build_draft(config, random.draft_weights, pair.target, pair.placement)
    limits = replace(pair.limits, num_draft_tokens=config.num_draft_tokens)
    return replace(random, pair=replace(pair, draft=draft, limits=limits))


@dataclass(frozen=True)
class KindCell(Cell):
    """Steps of one kind in blocks of `num_rows` rows. Engines of all kinds are in memory, so each has little room."""

    num_rows: int = 16

    @property
    def warm_steps(self) -> int:
        return WARM_STEPS

    @property
    def num_new_tokens(self) -> int:
        num_steps = self.steps + WARM_STEPS + PROFILED_STEPS + 6
        return int(num_steps * min(self.num_rows, 1.6 * (self.acceptance or 1) + 1)) + 4 * self.num_rows


@dataclass(frozen=True)
class KindTimes:
    """Milliseconds per step of each round, the wall-clock times of each round, and a profile."""

    rounds: list[float]
    spans: list[Span]
    acceptance: float | None
    account: StepAccount | None

    @property
    def ms(self) -> float:
        return statistics.median(self.rounds)


def measure_kinds(random: RandomPair, cells: Sequence[KindCell], *, has_profile: bool) -> dict[str, KindTimes]:
    """Time the steps of all cells in turns: arm -> times."""
    pairs = [with_kind(random, cell.arm, cell.num_rows) for cell in cells]
    return measure_in_turns([*zip(pairs, cells, strict=True)], has_profile=has_profile)


def measure_in_turns(arms: Sequence[tuple[RandomPair, Cell]], *, has_profile: bool) -> dict[str, KindTimes]:
    """Time the steps of all arms in turns: name of the arm -> times. All engines are in memory together."""
    cells = [cell for _, cell in arms]
    engines: dict[str, LLM] = {}
    rounds: dict[str, list[float]] = {cell.arm: [] for cell in cells}
    spans: dict[str, list[Span]] = {cell.arm: [] for cell in cells}
    try:
        for random, cell in arms:
            engines[cell.arm] = ready_engine(random, cell)
        live = {arm: list(llm.engine.scheduler.live) for arm, llm in engines.items()}
        skipped = {arm: [len(request.steps) for request in requests] for arm, requests in live.items()}
        for turn in range(ROUNDS):
            for place in range(len(cells)):
                cell = cells[(turn + place) % len(cells)]
                ms, span = _round(engines[cell.arm], cell.steps // ROUNDS)
                rounds[cell.arm].append(ms)
                spans[cell.arm].append(span)
        found = {}
        for arm, llm in engines.items():
            both = zip(live[arm], skipped[arm], strict=True)
            steps = [step for request, num in both for step in request.steps[num:]]
            acceptance = statistics.fmean(step.num_accepted + 1 for step in steps) if steps else None
            account = profile_steps(llm.engine.step, PROFILED_STEPS) if has_profile else None
            if any(request.is_finished for request in live[arm]):
                raise RuntimeError(f"{arm}: a request ended before the last step")
            found[arm] = KindTimes(rounds[arm], spans[arm], acceptance, account)
    finally:
        for llm in engines.values():
            llm.close()
    return found


def ratios(own: KindTimes, first: KindTimes) -> list[float]:
    """The time of a kind over the time of the first kind, for each round."""
    return [mine / other for mine, other in zip(own.rounds, first.rounds, strict=True)]


def _round(llm: LLM, num_steps: int) -> tuple[float, Span]:
    """Milliseconds per step, and the wall-clock times of the round."""
    llm.engine.step()  # the GPU is idle before a round
    wait(llm.device)
    began, begin = time.time(), time.perf_counter()
    for _ in range(num_steps):
        llm.engine.step()
    wait(llm.device)
    return (time.perf_counter() - begin) * 1000 / num_steps, (began, time.time())
