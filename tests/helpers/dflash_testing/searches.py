"""A smaller search for another reading, for faults large enough to show with fewer prompts and anchors."""

import pytest

from dflash_cli.diagnosis import readings


def shorten_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use less than half of the new prompts and less than half of the anchors. Every reading is still tried."""
    monkeypatch.setattr(readings, "MIN_TEST_PROMPTS", 12)
    monkeypatch.setattr(readings, "FEW_ANCHORS", 24)
    monkeypatch.setattr(readings, "MANY_ANCHORS", 96)
