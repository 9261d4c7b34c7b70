"""Alternative readings of a draft's config: run the draft with its config as it is, then with one setting changed.

A wrong tap offset, causality, mask token or rope base loads without an error and only lowers acceptance. If a changed
setting raises acceptance beyond chance, the config is wrong. The greedy text does not depend on the draft, so all
readings are compared on the same text, prompt by prompt.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.evaluation.statistics import (
    Interval,
    StepCounts,
    count_steps,
    paired_interval,
    pooled_acceptance_len,
)
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import DraftConfig, EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.json_values import is_int

if TYPE_CHECKING:
    pass

THETAS = (10_000.0, 1_000_000.0)
MAX_MASKS = 6
MIN_PROMPTS = 4
"""With fewer prompts an interval over prompts means nothing."""

Observe = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchBudget:
    """How much to run. Without prompts, the target first continues random ids by `lead_len` tokens.

    `factors` names the settings to change (`AlternativeReading.factor`); None changes each of them.
    """

    num_prompts: int = 32
    max_new_tokens: int = 96
    start_len: int = 8
    lead_len: int = 48
    num_resamples: int = 2000
    seed: int = 0
    factors: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class AlternativeReading:
    """A draft's config with one setting changed: `factor` is the setting, `name` says on screen how it is changed."""

    factor: str
    name: str
    config: DraftConfig
    is_anchor_first: bool = False


@dataclass(frozen=True, slots=True)
class ReadingResult:
    """Acceptance with one setting changed, compared with the config as it is on the same prompts."""

    reading: AlternativeReading
    acceptance_len: float
    difference: float
    interval: Interval | None

    @property
    def is_better(self) -> bool:
        """Whether the paired interval excludes zero from above."""
        return self.interval is not None and self.interval.low > 0

    def to_json(self) -> dict[str, Any]:
        return {
            "factor": self.reading.factor,
            "reading": self.reading.name,
            "acceptance_len": self.acceptance_len,
            "difference": self.difference,
            "interval": self.interval.to_json() if self.interval is not None else None,
            "is_better": self.is_better,
        }


@dataclass(frozen=True, slots=True)
class ReadingSearch:
    """Acceptance with the config as it is, and with every alternative reading, on the same prompts."""

    num_prompts: int
    num_tokens: int
    acceptance_len: float
    results: tuple[ReadingResult, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "acceptance_len": self.acceptance_len,
            "readings": [item.to_json() for item in self.results],
        }


def alternative_readings(
    config: DraftConfig, target: TargetSource, specials: Mapping[int, str]
) -> tuple[AlternativeReading, ...]:
    """Every reading to run; `specials` are ids that might be the mask, with their names."""
    return (
        *_tap_readings(config, target.config.num_layers),
        *_causality_readings(config),
        *_anchor_readings(config),
        *(
            AlternativeReading("rope", f"rope base {theta:g}", replace(config, rope=replace(config.rope, theta=theta)))
            for theta in dict.fromkeys((target.config.rope.theta, *THETAS))
            if theta != config.rope.theta
        ),
        *(
            AlternativeReading("mask", f"mask token {name} ({token})", replace(config, mask_token_id=token))
            for token, name in list(specials.items())[:MAX_MASKS]
            if token != config.mask_token_id and 0 <= token < config.vocab_size
        ),
    )


def find_specials(target: TargetSource) -> dict[int, str]:
    """Ids of the target that a trainer might have taken for the mask, mask-like names first."""
    tokenizer = target.checkpoint.read_optional_json("tokenizer_config.json") or {}
    contents = dict(_added_tokens(tokenizer.get("added_tokens_decoder"), target))
    named = {token: text for token, text in contents.items() if "mask" in text.lower()}
    found = dict(named)
    config = target.checkpoint.config
    for key in ("eos_token_id", "pad_token_id", "bos_token_id"):
        value = config.get(key)
        for token in value if isinstance(value, list) else [value]:
            if is_int(token):
                found.setdefault(token, key.removesuffix("_token_id"))
    return found


def search_readings(
    draft: DraftCheckpoint,
    target: TargetSource,
    prompts: Sequence[Sequence[int]] | None,
    *,
    config: EngineConfig,
    budget: SearchBudget,
    observe: Observe,
) -> ReadingSearch:
    """Load both models once, make or take the prompts, and run every reading on them.

    Raises:
        UsageError: too few prompts; and whatever loading and the engine raise.
    """
    from dflash_cli.validation.reading_runner import ReadingRunner

    if prompts is not None and len(prompts) < MIN_PROMPTS:
        raise UsageError(f"{len(prompts)} prompts, expected at least {MIN_PROMPTS}: fewer give no interval")
    readings = [
        reading
        for reading in alternative_readings(draft.config, target, find_specials(target))
        if budget.factors is None or reading.factor in budget.factors
    ]
    runner = ReadingRunner(draft, target, config, budget, longest=max(map(len, prompts)) if prompts else None)
    total = len(readings) + 1
    if prompts is None:
        observe("making prompts", 0, total)
        prompts = runner.make_prompts()
    observe("config as it is", 0, total)
    base = count_steps(runner.run(runner.build(draft.config), prompts))
    results = []
    for index, reading in enumerate(readings, start=1):
        observe(reading.name, index, total)
        pair = runner.build(reading.config, is_anchor_first=reading.is_anchor_first)
        results.append(_compare(reading, base, count_steps(runner.run(pair, prompts)), budget))
    return ReadingSearch(len(base), budget.max_new_tokens * len(base), pooled_acceptance_len(base), tuple(results))


def _compare(reading: AlternativeReading, base: StepCounts, other: StepCounts, budget: SearchBudget) -> ReadingResult:
    """Compare a reading with the config as it is, over the prompts on which both took steps."""
    shared = [pair for pair in zip(base, other, strict=True) if pair[0][1] and pair[1][1]]
    own, alternative = [pair[0] for pair in shared], [pair[1] for pair in shared]
    accepted = pooled_acceptance_len(alternative)
    interval = None
    if len(shared) >= MIN_PROMPTS:
        interval = paired_interval(
            own, alternative, confidence=0.95, num_resamples=budget.num_resamples, seed=budget.seed
        )
    return ReadingResult(reading, accepted, accepted - pooled_acceptance_len(own), interval)


def _tap_readings(config: DraftConfig, depth: int) -> Iterator[AlternativeReading]:
    """Tapped layers shifted by one; a first or last layer stays where it is, unless two would then be the same."""
    for offset, name in ((-1, "earlier"), (1, "later")):
        taps = tuple(min(max(tap + offset, 0), depth - 1) for tap in config.target_layer_ids)
        if len(set(taps)) == len(set(config.target_layer_ids)) and taps != config.target_layer_ids:
            yield AlternativeReading(
                "taps", f"tapped layers one {name} {list(taps)}", replace(config, target_layer_ids=taps)
            )


def _causality_readings(config: DraftConfig) -> Iterator[AlternativeReading]:
    readings = {
        "all layers causal": (True,) * config.num_layers,
        "no layer causal": (False,) * config.num_layers,
        "only sliding layers causal": tuple(window is not None for window in config.windows),
    }
    tried = {config.causal}
    for name, causal in readings.items():
        if causal not in tried:
            tried.add(causal)
            yield AlternativeReading("causality", name, replace(config, causal=causal))


def _anchor_readings(config: DraftConfig) -> Iterator[AlternativeReading]:
    """Predictions that start at the anchor; the runtime can run these only for non-causal drafts without windows."""
    if not any(config.causal) and set(config.windows) == {None}:
        yield AlternativeReading("anchor", "predictions from the last committed token on", config, is_anchor_first=True)


def _added_tokens(entries: Any, target: TargetSource) -> Iterator[tuple[int, str]]:
    """Special tokens with their ids: from tokenizer_config.json, or from the list at the head of tokenizer.json."""
    if isinstance(entries, dict):
        for key, entry in entries.items():
            if key.isdigit() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
                yield int(key), entry["content"]
        return
    listed = (target.checkpoint.read_optional_json("tokenizer.json") or {}).get("added_tokens")
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("id"), int) and isinstance(entry.get("content"), str):
            yield entry["id"], entry["content"]
