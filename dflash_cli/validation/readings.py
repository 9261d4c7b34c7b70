"""The interpretation search: run a draft as its config reads, and again with one factor changed at a time.

A wrong tap offset, causality, mask or rope base loads without a word and only accepts less. If another reading accepts
more, surely, the config is wrong. Greedy text does not depend on the draft, so every reading is judged on the same
steps of the same text, prompt by prompt.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dflash_cli.checkpoints.opening import DraftCheckpoint
from dflash_cli.evaluation.statistics import Interval
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import DraftConfig, EngineConfig
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_runtime.scheduling.request import RequestOutput

THETAS = (10_000.0, 1_000_000.0)
MAX_MASKS = 6
MIN_PROMPTS = 4
"""Fewer prompts give no interval worth the name."""

Observe = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much to run. Without prompts, random ids are continued by the target for `lead_len` tokens first.

    `factors` limits the search to some of them; None tries all.
    """

    num_prompts: int = 32
    max_new_tokens: int = 96
    start_len: int = 8
    lead_len: int = 48
    num_resamples: int = 2000
    seed: int = 0
    factors: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """One other reading. `factor` is what it changes, `name` says how."""

    factor: str
    name: str
    config: DraftConfig
    is_anchor_first: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial accepted, beside the config's reading on the same prompts."""

    trial: Trial
    acceptance_len: float
    difference: float
    interval: Interval | None

    @property
    def is_better(self) -> bool:
        """Whether the paired interval excludes zero from above."""
        return self.interval is not None and self.interval.low > 0

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "factor": self.trial.factor,
            "reading": self.trial.name,
            "acceptance_len": self.acceptance_len,
            "difference": self.difference,
            "interval": self.interval.to_json() if self.interval is not None else None,
            "is_better": self.is_better,
        }


@dataclass(frozen=True, slots=True)
class Search:
    """The config's reading and all trials, on the same prompts."""

    num_prompts: int
    num_tokens: int
    acceptance_len: float
    outcomes: tuple[Outcome, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "acceptance_len": self.acceptance_len,
            "trials": [item.document() for item in self.outcomes],
        }


def make_trials(config: DraftConfig, target: TargetSource, specials: Mapping[int, str]) -> tuple[Trial, ...]:
    """Every reading to try; `specials` are ids that might be the mask, with their names."""
    return (
        *_tap_trials(config, target.config.num_layers),
        *_causality_trials(config),
        *_anchor_trials(config),
        *(
            Trial("rope", f"rope base {theta:g}", replace(config, rope=replace(config.rope, theta=theta)))
            for theta in dict.fromkeys((target.config.rope.theta, *THETAS))
            if theta != config.rope.theta
        ),
        *(
            Trial("mask", f"mask {name} ({token})", replace(config, mask_token_id=token))
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
            if isinstance(token, int) and not isinstance(token, bool):
                found.setdefault(token, key.removesuffix("_token_id"))
    return found


def run_search(
    draft: DraftCheckpoint,
    target: TargetSource,
    prompts: Sequence[Sequence[int]] | None,
    *,
    config: EngineConfig,
    effort: Effort,
    observe: Observe,
) -> Search:
    """Load both models once, make or take the prompts, and run every reading on them.

    Raises:
        UsageError: too few prompts; and whatever loading and the engine raise.
    """
    from dflash_cli.validation.reading_runner import TrialEngine

    if prompts is not None and len(prompts) < MIN_PROMPTS:
        raise UsageError(f"{len(prompts)} prompts, expected at least {MIN_PROMPTS} for an interval over prompts")
    trials = [
        trial
        for trial in make_trials(draft.config, target, find_specials(target))
        if effort.factors is None or trial.factor in effort.factors
    ]
    engine = TrialEngine(draft, target, config, effort, longest=max(map(len, prompts)) if prompts else None)
    total = len(trials) + 1
    if prompts is None:
        observe("prompts", 0, total)
        prompts = engine.make_prompts()
    observe("as configured", 0, total)
    base = _sample(engine.run(engine.build(draft.config), prompts))
    outcomes = []
    for index, trial in enumerate(trials, start=1):
        observe(trial.name, index, total)
        pair = engine.build(trial.config, is_anchor_first=trial.is_anchor_first)
        outcomes.append(_judge(trial, base, _sample(engine.run(pair, prompts)), effort))
    tokens = effort.max_new_tokens * len(base)
    return Search(len(base), tokens, _pooled(base, range(len(base))), tuple(outcomes))


Sample = list[tuple[int, int]]
"""For each prompt: tokens its verify steps committed, and how many steps there were."""


def _sample(outputs: "Sequence[RequestOutput]") -> Sample:
    return [(sum(output.acceptance_lengths), len(output.acceptance_lengths)) for output in outputs]


def _judge(trial: Trial, base: Sample, other: Sample, effort: Effort) -> Outcome:
    places = [place for place in range(len(base)) if base[place][1] and other[place][1]]
    difference = _pooled(other, places) - _pooled(base, places)
    return Outcome(trial, _pooled(other, places), difference, _interval(base, other, places, effort))


def _interval(base: Sample, other: Sample, places: Sequence[int], effort: Effort) -> Interval | None:
    """Percentile bootstrap of the difference, drawing whole prompts, the same ones for both readings."""
    if len(places) < MIN_PROMPTS:
        return None
    generator = random.Random(effort.seed)
    differences = []
    for _ in range(effort.num_resamples):
        drawn = generator.choices(places, k=len(places))
        differences.append(_pooled(other, drawn) - _pooled(base, drawn))
    differences.sort()
    tail = round(0.025 * (len(differences) - 1))
    return Interval(differences[tail], differences[-1 - tail], 0.95)


def _pooled(sample: Sample, places: Sequence[int]) -> float:
    """Acceptance length over these prompts; 1, which is none accepted, where there was no step."""
    steps = sum(sample[place][1] for place in places)
    return sum(sample[place][0] for place in places) / steps if steps else 1.0


def _tap_trials(config: DraftConfig, depth: int) -> Iterator[Trial]:
    """Taps one layer earlier and later; those at an end stay, unless two would fall together."""
    for offset, name in ((-1, "earlier"), (1, "later")):
        taps = tuple(min(max(tap + offset, 0), depth - 1) for tap in config.target_layer_ids)
        if len(set(taps)) == len(set(config.target_layer_ids)) and taps != config.target_layer_ids:
            yield Trial("taps", f"taps one layer {name} {list(taps)}", replace(config, target_layer_ids=taps))


def _causality_trials(config: DraftConfig) -> Iterator[Trial]:
    readings = {
        "all layers causal": (True,) * config.num_layers,
        "no layer causal": (False,) * config.num_layers,
        "sliding layers causal, full layers not": tuple(window is not None for window in config.windows),
    }
    tried = {config.causal}
    for name, causal in readings.items():
        if causal not in tried:
            tried.add(causal)
            yield Trial("causality", name, replace(config, causal=causal))


def _anchor_trials(config: DraftConfig) -> Iterator[Trial]:
    """Predictions from the anchor on, where the runtime can be made to read them: non-causal, without windows."""
    if not any(config.causal) and set(config.windows) == {None}:
        yield Trial("anchor", "predictions from the anchor on", config, is_anchor_first=True)


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
