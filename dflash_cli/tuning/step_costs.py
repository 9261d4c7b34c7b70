"""How long decode steps take, plainly and with each candidate, by batch size: measured here, or given in a file.

A file has milliseconds of a step, one number or one for each time it was measured:

    {"plain": {"1": 5.1, "8": [5.3, 5.4]}, "resized": {"7": {"1": 6.5, "8": 7.4}}, "narrowed": {...}, "source": "..."}

Keys of the outer objects are K, those of the inner ones batch sizes. The trained K may stand under either way. The
document of `dflash tune --json` has the same under `step_times`, and is read too. Lists of one length are taken to be
of the same rounds, one after the other, so that what disturbed a round is not taken for a difference.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_cli.comparing.measured_result import ResultFile
from dflash_cli.tuning.candidates import Candidate, Way, resize
from dflash_cli.tuning.speed import SpeedRequest, measure_rounds
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.errors import UsageError
from dflash_runtime.json_values import is_number

Times = tuple[float, ...]
"""Milliseconds of a step, each time it was measured."""
WAYS: tuple[Way, ...] = ("resized", "narrowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Milliseconds of a step of a batch by batch size; `source` says whose they are."""

    plain: Mapping[int, Times]
    drafting: Mapping[Candidate, Mapping[int, Times]]
    source: str

    @property
    def batches(self) -> list[int]:
        return sorted(self.plain)

    def of(self, candidate: Candidate, batch: int) -> Times | None:
        """A candidate's steps; None where they are not known."""
        return self.drafting.get(candidate, {}).get(batch)

    def to_json(self) -> dict[str, Any]:
        """The form of a file; the whole block stands under `resized`."""
        found: dict[str, Any] = {"source": self.source, "plain": _to_text_keys(self.plain)}
        found |= {way: {} for way in WAYS}
        for candidate, times in sorted(self.drafting.items()):
            way = "resized" if candidate.way == "whole" else candidate.way
            found[way][str(candidate.num_draft_tokens)] = _to_text_keys(times)
        return found


def read_step_costs(path: Path, trained: int) -> StepCosts:
    """Read a file of step times, for a draft that was trained to draft so many tokens.

    Raises:
        CheckpointNotFound: there is no such file.
        UsageError: it is none, naming the field.
    """
    file = ResultFile(path)
    document = file.document
    if isinstance(document, dict) and document.get("kind") == "tune":
        document = document.get("step_times")
    if not isinstance(document, dict):
        raise file.refuse(
            "is no JSON object of step times", hint='expected {"plain": {"1": MS}, "resized": {"7": ...}}'
        )
    unknown = sorted(document.keys() - {"plain", "source", "settings", *WAYS})
    if unknown:
        raise file.refuse(f"{unknown[0]}: not known, expected plain, resized, narrowed or source")
    drafting: dict[Candidate, Mapping[int, Times]] = {}
    for way in WAYS:
        for number, times in _as_numbers(file, way, document.get(way, {})).items():
            candidate = Candidate(number, "whole" if number == trained else way)
            drafting.setdefault(candidate, _as_times(file, f"{way}.{number}", times))
    plain = _as_times(file, "plain", document.get("plain"))
    if not drafting:
        raise file.refuse("resized: found none, expected the steps of some K", hint="keys are K, then batch sizes")
    return StepCosts(plain=plain, drafting=drafting, source=str(document.get("source", path)))


def check_complete(costs: StepCosts, numbers: Sequence[int], batches: Sequence[int]) -> None:
    """Require the times that are asked for. Narrowed blocks may lack them: these are judged by acceptance alone then.

    Raises:
        UsageError: naming what is not there.
    """
    known = {item.num_draft_tokens: times for item, times in costs.drafting.items() if item.way != "narrowed"}
    for batch in batches:
        if batch not in costs.plain:
            raise UsageError(f"{costs.source}: plain.{batch}: missing, expected milliseconds of a plain step")
        lacking = [number for number in numbers if batch not in known.get(number, {})]
        if lacking:
            raise UsageError(f"{costs.source}: resized.{lacking[0]}.{batch}: missing, expected milliseconds of a step")


def measure_step_costs(
    pair: LoadedPair,
    candidates: Sequence[Candidate],
    request: SpeedRequest,
    config: EngineConfig,
    observe: Callable[[int], None] = lambda num_done: None,
) -> StepCosts:
    """Run every candidate and plain decoding at every batch size; `observe` hears how many rounds are done.

    Raises:
        UsageError: answers are too short to measure.
    """
    num_done = 0

    def count() -> None:
        nonlocal num_done
        num_done += 1
        observe(num_done)

    arms = [(pair.without_draft(), None), *((resize(pair, item, config), item.verify_width) for item in candidates)]
    found: list[dict[int, Times]] = [{} for _ in arms]
    for batch in request.batches:
        for times, windows in zip(found, measure_rounds(arms, request, batch, count), strict=True):
            times[batch] = tuple(1000 * seconds / num_steps for _, num_steps, seconds in windows)
    plain, *drafting = found
    return StepCosts(plain=plain, drafting=dict(zip(candidates, drafting, strict=True)), source="measured here")


def num_timed_rounds(candidates: Sequence[Candidate], request: SpeedRequest) -> int:
    """How many rounds `measure_step_costs` runs: one more of each before, which compiles."""
    return (len(candidates) + 1) * len(request.batches) * (request.num_rounds + 1)


def _to_text_keys(times: Mapping[int, Times]) -> dict[str, list[float]]:
    return {str(batch): list(values) for batch, values in sorted(times.items())}


def _as_numbers(file: ResultFile, where: str, value: object) -> dict[int, object]:
    """An object whose keys are whole numbers from 1 on."""
    if not isinstance(value, dict):
        raise file.refuse(f"{where}: found {value!r}, expected an object of numbers")
    for key in value:
        if not (key.isdecimal() and int(key)):
            raise file.refuse(f"{where}: found the key {key!r}, expected a whole number from 1 on")
    return {int(key): item for key, item in value.items()}


def _as_times(file: ResultFile, where: str, value: object) -> dict[int, Times]:
    return {batch: _as_list(file, f"{where}.{batch}", item) for batch, item in _as_numbers(file, where, value).items()}


def _as_list(file: ResultFile, where: str, value: object) -> Times:
    found = value if isinstance(value, list) else [value]
    if not found or not all(is_number(item) and 0 < item < 1e6 for item in found):
        raise file.refuse(f"{where}: found {value!r}, expected milliseconds of a step, or a list of them")
    return tuple(map(float, found))
