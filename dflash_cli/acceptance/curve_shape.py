"""Shapes of acceptance by position that point to a fault, each with likely causes and a command that tests them.

A shape is reported only if the measured steps support it. Steps of one text resemble each other, so rates have 99%
intervals computed from a quarter of the steps. A sound draft has no such shape: conditional acceptance falls slowly.
"""

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from dflash_cli.acceptance.conversation_counts import ConversationCounts, pool_repeats
from dflash_cli.acceptance.intervals.acceptance_difference import paired_difference, tokens_per_step
from dflash_cli.acceptance.intervals.proportions import wilson_interval
from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_runtime.metrics import AcceptanceCounts

WIDTH = 76
STEPS_PER_UNIT = 4
"""Correlated steps that carry as much information as one independent step."""
CONFIDENCE = 0.99
LOW, FLAT = 0.35, 0.6
"""A curve is flat and low if the first rate is surely below LOW and no later conditional rate surely above FLAT."""
CLIFF = 0.6
"""There is a cliff if the second position's conditional rate is below this share of the first position's rate."""
ZERO, FEW = 0.1, 0.02
"""A position counts as never accepted if its rate is surely below ZERO and the measured rate is at most FEW."""
DECAY = 0.8
"""Acceptance decays if far from the prompt it is below this share of the draft tokens accepted near the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveShape:
    """A shape that was found: its name, the rates that show it, possible causes, and a command that tests them."""

    name: Annotated[str, "docs/explanation/shapes.md lists the names"]
    evidence: str
    causes: str
    test: Annotated[str, "the command that tests the causes"]

    @property
    def lines(self) -> list[str]:
        """The shape in words, wrapped to 76 columns except for the command."""
        first = textwrap.wrap(f"shape: {self.name} ({self.evidence})", WIDTH, subsequent_indent="  ")
        likely = textwrap.wrap(f"likely: {self.causes}", WIDTH, initial_indent="  ", subsequent_indent="    ")
        return [*first, *likely, f"  test: {self.test}"]


@dataclass(frozen=True, slots=True)
class _Rate:
    """Acceptance rate of a position, given that the previous position was accepted, with its 99% interval."""

    num_accepted: int
    num_reached: int

    @property
    def value(self) -> float:
        return self.num_accepted / self.num_reached if self.num_reached else 0.0

    @property
    def low(self) -> float:
        return self._interval.low

    @property
    def high(self) -> float:
        return self._interval.high

    @property
    def _interval(self) -> Interval:
        found = wilson_interval(self.num_accepted / STEPS_PER_UNIT, self.num_reached / STEPS_PER_UNIT, CONFIDENCE)
        return found or Interval(0.0, 1.0, CONFIDENCE)


def find_shapes(
    counts: AcceptanceCounts | None,
    conversations: Sequence[ConversationCounts] = (),
    references: Mapping[str, Any] | None = None,
) -> list[CurveShape]:
    """Return the shapes that the counts show: at most one by position, and decay with context. A lookup has none.

    `references` holds the names of draft and target for the commands.
    """
    names = references or {}
    if lookup_of(names) is not None:
        return []
    pair = " --target ".join(_word(names.get(name), name.upper()) for name in ("draft", "target"))
    by_position = _by_position(_rates(counts), pair) if counts is not None else None
    return [shape for shape in (by_position, _decay(conversations, pair)) if shape is not None]


def lookup_of(settings: Mapping[str, Any]) -> str | None:
    """Return the lookup that drafted a run with these settings, or None if a draft model did."""
    drafting = settings.get("drafting", "model")
    return None if drafting == "model" else drafting


def _word(reference: Any, otherwise: str) -> str:
    return shlex.quote(reference) if isinstance(reference, str) else otherwise


def _rates(counts: AcceptanceCounts) -> list[_Rate]:
    """Return the conditional rates of the positions that were verified."""
    verified = [
        accepted for accepted, steps in zip(counts.per_pos_accepted, counts.per_pos_verified, strict=True) if steps
    ]
    return [_Rate(*pair) for pair in zip(verified, [counts.num_drafts, *verified], strict=False)]


def _by_position(rates: Sequence[_Rate], pair: str) -> CurveShape | None:
    return _flat_and_low(rates, pair) or _zeros(rates, pair) or _cliff(rates, pair)


def _flat_and_low(rates: Sequence[_Rate], pair: str) -> CurveShape | None:
    if not rates or rates[0].high >= LOW or any(rate.low > FLAT for rate in rates[1:]):
        return None
    return CurveShape(
        name="flat and low",
        evidence=f"{_percent(rates[0].value)} of steps accept the first position",
        causes="tapped layers, mask token, rope base or target differ from training; in an engine, also the dtype",
        test=f"dflash diagnose {pair}",
    )


def _zeros(rates: Sequence[_Rate], pair: str) -> CurveShape | None:
    for place in range(1, len(rates)):
        before, rate = rates[place - 1], rates[place]
        if before.low > 2 * ZERO and rate.high < ZERO and rate.value <= FEW:
            return CurveShape(
                name=f"zeros after position {place}",
                evidence=f"{rate.num_accepted} of {rate.num_reached} steps that reach the next position accept it",
                causes="more tokens drafted than the draft was trained for, or a mask that hides the later rows",
                test=f"dflash eval-acceptance {pair} -k {place}",
            )
    return None


def _cliff(rates: Sequence[_Rate], pair: str) -> CurveShape | None:
    if len(rates) < 2 or rates[0].low <= LOW or rates[1].high >= CLIFF * rates[0].low:
        return None
    return CurveShape(
        name="cliff after position 1",
        evidence=f"{_percent(rates[0].value)} of steps accept position 1, {_percent(rates[1].value)} of them 2",
        causes="causal attention differs from training, or the block has another width than in training",
        test=f"dflash validate {pair} --level run",
    )


def _decay(conversations: Sequence[ConversationCounts], pair: str) -> CurveShape | None:
    """Return the decay with context, found by comparing steps within each conversation.

    A comparison between conversations would also find long prompts of another kind.
    """
    both = [item for item in pool_repeats(conversations) if 0 < item.num_far_steps < item.num_steps]
    near = [(item.num_tokens - item.num_far_tokens, item.num_steps - item.num_far_steps) for item in both]
    far = [(item.num_far_tokens, item.num_far_steps) for item in both]
    found = paired_difference(near, far, CONFIDENCE)
    before, after = tokens_per_step(near), tokens_per_step(far)
    if found is None or before is None or after is None or found.p_value >= 1 - CONFIDENCE:
        return None
    if after - 1 >= DECAY * (before - 1):
        return None
    return CurveShape(
        name="decay with context",
        evidence=f"{before:.2f} tokens per step near the prompt, {after:.2f} after the context has doubled",
        causes="rope scaling or window differ from training, contexts are longer than in training, or texts get harder",
        test=f"dflash validate {pair} --level run",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
