"""Measure the times of decode steps, without a draft and with each candidate, by batch size."""

from collections.abc import Callable, Sequence

from dflash_cli.tuning.candidate_runs import resize
from dflash_cli.tuning.candidates import Candidate
from dflash_cli.tuning.speed import Arm, SpeedRequest, counting, measure_rounds
from dflash_cli.tuning.step_costs import StepCosts, Times
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.engine_config import EngineConfig


def measure_step_costs(
    pair: LoadedPair,
    candidates: Sequence[Candidate],
    request: SpeedRequest,
    config: EngineConfig,
    observe: Callable[[int], None] = lambda num_done: None,
) -> StepCosts:
    """Time every candidate and plain decoding at every batch size. `observe` gets the number of finished rounds.

    Raises:
        UsageError: answers are too short to measure.
    """
    count = counting(observe)
    arms = [Arm(pair.without_draft()), *(Arm(resize(pair, item, config), item.verify_width) for item in candidates)]
    found: list[dict[int, Times]] = [{} for _ in arms]
    for batch in request.batches:
        for times, windows in zip(found, measure_rounds(arms, request, batch, count), strict=True):
            times[batch] = tuple(1000 * seconds / num_steps for _, num_steps, seconds in windows)
    plain, *drafting = found
    return StepCosts(plain=plain, drafting=dict(zip(candidates, drafting, strict=True)), source="measured here")


def num_timed_rounds(candidates: Sequence[Candidate], request: SpeedRequest) -> int:
    """Return the number of rounds that `measure_step_costs` runs, warm-up rounds included."""
    return (len(candidates) + 1) * len(request.batches) * (request.num_rounds + 1)
