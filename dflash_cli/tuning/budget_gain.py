"""The gain of a row budget: measured verify steps, replayed in batches under a table of step times.

Each request of a simulated batch takes blocks one after another. A policy gives it rows, it commits the accepted tokens
among them and one more, and the step takes the time of its rows. Three policies run on the same blocks:

    all rows    every block is verified whole
    one width   the same width for all requests and steps: the best one, known in advance
    budget      rows by predicted survival (`scheduling/row_budget.py`). The number of rows is chosen by the predictions
                of the step before, which is all that a host knows in time, except for perfect predictions

The regression on the draft's confidence predicts (measured), or the outcome (perfect), or the mean of each position
(uninformative). Requests are as measured, or of two kinds: half of the requests take nearly rejected blocks with at
most one accepted token, and half take nearly whole blocks with at most one rejected token. The regression is then
fitted to these blocks.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from statistics import fmean
from typing import Annotated, Literal

from dflash_cli.acceptance.calibration import PredictedBlock, fit, observed
from dflash_runtime.scheduling.row_budget import RecentTokens, expected_tokens, fastest, give_rows, survivals_of

NUM_STEPS = 400
"""Simulated steps. Gains vary by about 1% from one seed to another."""

Feature = Literal["measured", "perfect", "uninformative"]
Requests = Literal["as measured", "two kinds"]
FEATURES: tuple[Feature, ...] = ("measured", "perfect", "uninformative")
Step = Sequence[PredictedBlock]
"""One block of each request of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetGain:
    """Tokens per second with a row budget, divided by tokens per second without."""

    batch: int
    requests: Annotated[Requests, "blocks as measured, or half nearly whole and half nearly rejected"]
    feature: Annotated[Feature, "predictions: by the draft's confidence, by the outcome, or by position alone"]
    over_all_rows: Annotated[float, "against whole blocks"]
    over_one_width: Annotated[float, "against the best width for the whole batch"]
    rows_per_request: Annotated[float, "mean of the budget, anchors included"]
    one_width: Annotated[int, "that best width"]


def budget_gains(blocks: Sequence[PredictedBlock], batch: int, widths: Mapping[int, float]) -> list[BudgetGain]:
    """Return the gains for each kind of requests and predictions. `widths` has milliseconds of a step by verify width.

    Gains for requests of two kinds need measured blocks of both kinds.
    """
    num_drafts = max(widths) - 1
    whole = [block for block in blocks if len(block.confidences) == num_drafts]
    times = {rows: rows_ms(widths, batch, rows) for rows in range(batch, batch * (num_drafts + 1) + 1)}
    found = []
    for requests, steps in (("as measured", as_measured(whole, batch)), ("two kinds", two_kinds(whole, batch))):
        for feature in FEATURES if steps else ():
            found.append(_gain(requests, feature, steps, times))  # type: ignore[arg-type]
    return found


def rows_ms(widths: Mapping[int, float], batch: int, rows: int) -> float:
    """Return milliseconds of a step by its rows, between the measured widths. Fewer rows than measured cost as much."""
    sizes = sorted(widths)
    low = max((size for size in sizes if size * batch <= rows), default=sizes[0])
    high = min((size for size in sizes if size * batch >= rows), default=sizes[-1])
    share = 0.0 if high == low else (rows / batch - low) / (high - low)
    return (1 - share) * widths[low] + share * widths[high]


def as_measured(blocks: Sequence[PredictedBlock], batch: int) -> list[Step]:
    """Return steps in which each request takes the blocks of one prompt after another, in order."""
    generator = random.Random(0)
    by_prompt: dict[int, list[PredictedBlock]] = {}
    for block in blocks:
        by_prompt.setdefault(block.prompt, []).append(block)

    def request() -> Iterator[PredictedBlock]:
        while True:
            yield from generator.choice([*by_prompt.values()])

    return list(islice(zip(*(request() for _ in range(batch)), strict=True), NUM_STEPS)) if by_prompt else []


def two_kinds(blocks: Sequence[PredictedBlock], batch: int) -> list[Step]:
    """Return steps in which half of the requests take nearly rejected blocks, the others nearly whole ones."""
    kinds = (
        [block for block in blocks if block.num_accepted <= 1],
        [block for block in blocks if block.num_accepted >= len(block.confidences) - 1],
    )
    if not all(kinds):
        return []
    generator = random.Random(0)
    drawn = [tuple(generator.choice(kind) for kind in islice(cycle(kinds), batch)) for _ in range(NUM_STEPS)]
    flat = [block for step in drawn for block in step]
    features, *counts = observed([(block.confidences, block.num_accepted) for block in flat])
    likely = iter(fit(features, *counts).probabilities(features).tolist())
    return [
        tuple(PredictedBlock(item.prompt, item.confidences, tuple(next(likely)), item.num_accepted) for item in step)
        for step in drawn
    ]


def _gain(requests: Requests, feature: Feature, steps: Sequence[Step], times: Mapping[int, float]) -> BudgetGain:
    batch, num_drafts = len(steps[0]), len(steps[0][0].confidences)
    means = _position_means([block for step in steps for block in step])
    tokens = ms = num_rows = 0.0
    rows, recent = max(times), RecentTokens()
    for step in steps:
        survivals = [survivals_of(_predictions(block, feature, means)) for block in step]
        expected = expected_tokens(survivals, times)
        widths = give_rows(survivals, fastest(expected, times) if feature == "perfect" else rows)
        tokens += _committed(step, widths)
        ms += times[sum(widths)]
        num_rows += sum(widths)
        rows = fastest(recent.add(expected), times)
    rates = {
        width: sum(_committed(step, [width] * batch) for step in steps) / (len(steps) * times[width * batch])
        for width in range(1, num_drafts + 2)
    }
    best = max(rates, key=lambda width: rates[width])
    return BudgetGain(
        batch=batch,
        requests=requests,
        feature=feature,
        over_all_rows=tokens / ms / rates[num_drafts + 1],
        over_one_width=tokens / ms / rates[best],
        rows_per_request=num_rows / len(steps) / batch,
        one_width=best,
    )


def _committed(step: Step, widths: Sequence[int]) -> int:
    return sum(1 + min(block.num_accepted, width - 1) for block, width in zip(step, widths, strict=True))


def _predictions(block: PredictedBlock, feature: Feature, means: Sequence[float]) -> Sequence[float]:
    if feature == "measured":
        return block.likely
    return means if feature == "uninformative" else [float(place < block.num_accepted) for place in range(len(means))]


def _position_means(blocks: Sequence[PredictedBlock]) -> list[float]:
    """Return the accepted share of each position among the blocks that reach it; 0 for a position that none reaches."""
    found = []
    for place in range(len(blocks[0].confidences)):
        reached = [block.num_accepted > place for block in blocks if block.num_accepted >= place]
        found.append(fmean(reached) if reached else 0.0)
    return found
