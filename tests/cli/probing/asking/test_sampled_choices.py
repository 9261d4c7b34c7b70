"""Sampled tokens against the target's own probabilities."""

import pytest

from dflash_cli.probing.asking.sampled_choices import Choice, Choices


def test_few_other_tokens_are_rare_only_among_uncertain_ones() -> None:
    sure, unsure = (Choice(1, 5, 5, value, value) for value in (0.999, 0.8))
    other = Choice(1, 6, 5, 0.2, 0.8)
    assert Choices((sure,) * 200, 200).nats < 1
    assert Choices((unsure,) * 100, 100).nats == pytest.approx(20)
    assert Choices((unsure,) * 20, 100).nats == pytest.approx(20)
    assert Choices((unsure,) * 80 + (other,) * 20, 100).nats == 0
