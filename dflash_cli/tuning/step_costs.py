"""Times of decode steps, without a draft and with each candidate, by batch size, and their file. Imports no torch.

A file has milliseconds of a step, one number or one per measurement:

    {"plain": {"1": 5.1, "8": [5.3, 5.4]}, "resized": {"7": {"1": 6.5, "8": 7.4}}, "narrowed": {...}, "source": "..."}

The keys of the outer objects are K, and in `trees` numbers of drafted tokens. The keys of the inner objects are batch
sizes. `lookups` has such objects by name. The trained K may be in `resized` or in `narrowed`. The document of `dflash
tune --json` has the same object in `step_times`, and can be given too. Lists of equal length are paired by round, so
that a disturbed round does not look like a difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from dflash_cli.comparing.measured_result import ResultFile
from dflash_cli.terminal.sampling_options import LOOKUP_NAMES, LookupName
from dflash_cli.tuning.candidates import WAYS, Candidate
from dflash_runtime.documents import NOT_REQUIRED, OPTIONAL, Limits, from_json
from dflash_runtime.errors import MISSING, UsageError

Value = TypeVar("Value")
Times = tuple[float, ...]
"""Milliseconds of a step, one number per measurement."""


Milliseconds = Annotated[float, Limits(above=0, below=1e6)]
TimesByBatch = Mapping[int, Milliseconds | tuple[Milliseconds, ...]]
TimesByK = Mapping[int, TimesByBatch]
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Milliseconds of decode steps: one number per batch size, or one for each time that it was measured."""

    source: Annotated[str, NOT_REQUIRED] = ""
    plain: Annotated[TimesByBatch, "by batch size"]
    resized: Annotated[TimesByK, NOT_REQUIRED, "by K, then by batch size"] = field(default_factory=dict)
    narrowed: Annotated[TimesByK, NOT_REQUIRED, "by K, then by batch size"] = field(default_factory=dict)
    trees: Annotated[TimesByK, NOT_REQUIRED, "by number of drafted tokens, then by batch size"] = field(
        default_factory=dict
    )
    lookups: Annotated[Mapping[LookupName, TimesByK], NOT_REQUIRED, "by lookup, K and batch size"] = field(
        default_factory=dict
    )
    settings: Annotated[Settings, OPTIONAL, "of the measurement; --resume compares them"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Milliseconds of a step by batch size. `source` names the origin of the times."""

    plain: Mapping[int, Times]
    drafting: Mapping[Candidate, Mapping[int, Times]]
    source: str

    @property
    def batches(self) -> list[int]:
        return sorted(self.plain)

    def of(self, candidate: Candidate, batch: int) -> Times | None:
        """Return a candidate's step times, or None if unknown."""
        return self.drafting.get(candidate, {}).get(batch)

    @property
    def times(self) -> StepTimes:
        """The document of these times. The whole block is in `resized`."""
        ways: dict[str, dict[int, TimesByBatch]] = {}
        for candidate, times in sorted(self.drafting.items()):
            way = "resized" if candidate.way == "whole" else candidate.way
            number = candidate.num_nodes or candidate.num_speculative_tokens
            ways.setdefault(way, {})[number] = dict(sorted(times.items()))
        resized, narrowed, trees = (ways.get(way, {}) for way in (*WAYS, "tree"))
        lookups = {name: ways[name] for name in LOOKUP_NAMES if name in ways}
        plain = dict(sorted(self.plain.items()))
        return StepTimes(
            source=self.source, plain=plain, resized=resized, narrowed=narrowed, trees=trees, lookups=lookups
        )


def read_step_times(path: Path) -> StepTimes:
    """Read a file of step times, or the step times in a document of `dflash tune --json`.

    Raises:
        CheckpointNotFound: the file does not exist.
        UsageError: naming the missing, unknown or wrong field.
    """
    file = ResultFile(path)
    document = file.parsed.get("step_times") if file.parsed.get("kind") == "tune" else file.parsed
    hint = 'expected {"plain": {"1": MS}, "resized": {"7": {"1": MS}}}: keys are K, then batch sizes'
    return from_json(StepTimes, document, path=path, error=UsageError, hint=hint)


def read_step_costs(path: Path, trained: int) -> StepCosts:
    """Return the step times in a file, for a draft that was trained to draft `trained` tokens.

    Raises:
        CheckpointNotFound: the file does not exist.
        UsageError: naming the missing, unknown or wrong field.
    """
    times = read_step_times(path)
    drafting: dict[Candidate, Mapping[int, Times]] = {}
    for way in WAYS:
        for number, by_batch in _from_one(getattr(times, way), way, path):
            candidate = Candidate(number, "whole" if number == trained else way)
            drafting.setdefault(candidate, _as_times(by_batch, f"{way}.{number}", path))
    for name, by_k in times.lookups.items():
        for number, by_batch in _from_one(by_k, f"lookups.{name}", path):
            drafting[Candidate(number, name)] = _as_times(by_batch, f"lookups.{name}.{number}", path)
    for number, by_batch in _from_one(times.trees, "trees", path):
        drafting[Candidate(trained, "tree", number)] = _as_times(by_batch, f"trees.{number}", path)
    if not (times.resized or times.narrowed or times.trees):
        raise UsageError(
            id="no-step-times", path=path, field="resized", found=times.resized, expected="step times of one K or more"
        )
    return StepCosts(plain=_as_times(times.plain, "plain", path), drafting=drafting, source=times.source or str(path))


def check_complete(costs: StepCosts, path: Path | None, numbers: Sequence[int], batches: Sequence[int]) -> None:
    """Require the step times of these K and batch sizes in a file. Narrowed blocks may lack times; then only acceptance
    counts.

    Raises:
        UsageError: naming the field of a missing time.
    """
    known = {item.num_speculative_tokens: times for item, times in costs.drafting.items() if item.is_resized}
    for batch in batches:
        if batch not in costs.plain:
            raise _missing(path, f"plain.{batch}")
        lacking = [number for number in numbers if batch not in known.get(number, {})]
        if lacking:
            raise _missing(path, f"resized.{lacking[0]}.{batch}")


def _missing(path: Path | None, field: str) -> UsageError:
    facts: dict[str, Any] = {"field": field, "found": MISSING, "expected": "milliseconds of a step"}
    return UsageError(id="missing-step-time", path=path, **facts)


def _as_times(by_batch: TimesByBatch, where: str, path: Path) -> dict[int, Times]:
    found = {}
    for batch, values in _from_one(by_batch, where, path):
        found[batch] = values if isinstance(values, tuple) else (values,)
        if not found[batch]:
            raise UsageError(
                id="missing-step-time", path=path, field=f"{where}.{batch}", found=[], expected="milliseconds of a step"
            )
    return found


def _from_one(by_number: Mapping[int, Value], where: str, path: Path) -> Iterator[tuple[int, Value]]:
    """Yield the items of a mapping.

    Raises:
        UsageError: a key is below 1.
    """
    for number, value in by_number.items():
        if number < 1:
            raise UsageError(
                id="key-below-one", path=path, field=f"{where}.{number}", found=number, expected="a key of 1 or more"
            )
        yield number, value
