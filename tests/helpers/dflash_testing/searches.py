"""A smaller search for another reading, and results of readings from numbers alone."""

from typing import Any

import pytest

from dflash_cli.diagnosis import further_training, readings
from dflash_cli.diagnosis.alternatives import AlternativeReading
from dflash_cli.diagnosis.reading_results import ReadingResult
from dflash_cli.diagnosis.run_settings import SearchBudget
from dflash_testing.pairs import bundled_draft


def shorten_search(monkeypatch: pytest.MonkeyPatch, *factors: str) -> None:
    """Use half or less of the new prompts, anchors, sampled leads, rare mask ids, suspect parts and runs.

    This is enough for large faults. The screen still tries every reading of the config, or every reading of these
    factors. A search of few factors has a quarter of the anchors and sampled leads, and half of the lengths of a
    training step.
    """
    lead_len, few, many = (12, 12, 48) if factors else (24, 24, 96)
    defaults = SearchBudget.__init__.__kwdefaults__ or {}
    changed = {"lead_len": lead_len, "factors": frozenset(factors) or None}
    monkeypatch.setattr(SearchBudget.__init__, "__kwdefaults__", {**defaults, **changed})
    monkeypatch.setattr(readings, "MAX_RUN", 2)
    monkeypatch.setattr(readings, "MAX_SUSPECTS", 1)
    monkeypatch.setattr(readings, "MAX_PULLED", 1)
    monkeypatch.setattr(readings, "MAX_STRAINED", 1)
    monkeypatch.setattr(readings, "NUM_RARE_IDS", 16)
    monkeypatch.setattr(readings, "MIN_TEST_PROMPTS", 12)
    monkeypatch.setattr(readings, "FEW_ANCHORS", few)
    monkeypatch.setattr(readings, "MANY_ANCHORS", many)
    if factors:
        monkeypatch.setattr(further_training, "LENGTHS", further_training.LENGTHS[1::2])


def result(own: float, length: float, low: float, factor: str = "rope", **changes: Any) -> ReadingResult:
    """A reading with this acceptance length, of a draft with `own`. The gain is sure if `low` is positive."""
    reading = AlternativeReading(factor, f"another {factor}", bundled_draft().config, **changes)
    return ReadingResult(reading, length, length - own, p_value=0.001 if low > 0 else 0.5)
