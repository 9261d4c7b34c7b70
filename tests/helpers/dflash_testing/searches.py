"""The search for another reading in small: for faults that cost so much that fewer prompts and anchors show them."""

import pytest

from dflash_cli.diagnosis import readings


def shorten_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than half of the new prompts, and less than half of the anchors; every reading is tried all the same."""
    monkeypatch.setattr(readings, "MIN_TEST_PROMPTS", 12)
    monkeypatch.setattr(readings, "FEW_ANCHORS", 24)
    monkeypatch.setattr(readings, "MANY_ANCHORS", 96)
