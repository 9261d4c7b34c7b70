"""Falls with the context: named where an interval supports them, with the lengths that the draft names between."""

import random

from dflash_cli.acceptance.context_curve import ContextCurve, context_curve
from dflash_cli.acceptance.intervals.acceptance_difference import TokenCounts
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.context_marks import ContextMark

WINDOW = ContextMark(kind="window", num_tokens=4096, source="sliding_window of 5 of 5 layers")
POSITIONS = ContextMark(kind="positions", num_tokens=40960, source="max_position_embeddings")


def counts(length: float, num_prompts: int = 64) -> TokenCounts:
    """Tokens and steps of prompts with a mean length, each with luck of its own."""
    generator = random.Random(length)
    return [(round(40 * length * (1 + 0.05 * generator.gauss(0, 1))), 40) for _ in range(num_prompts)]


def curve(lengths: dict[int, float], num_prompts: int = 64, thinking: str | None = None) -> ContextCurve:
    conditions = [Condition(context_len=size, thinking=thinking) for size in lengths]
    found = context_curve(
        conditions,
        (WINDOW, POSITIONS),
        lambda *pair: tuple(counts(lengths[item.context_len or 0], num_prompts) for item in pair),
        0.95,
    )
    assert found is not None
    return found


def test_a_collapse_beyond_the_window_is_named_once() -> None:
    found = curve({1024: 4.1, 4096: 4.1001, 16384: 1.6})
    (fall,) = found.falls
    assert (fall.shorter, fall.longer, fall.beyond) == (4096, 16384, (WINDOW,))
    assert fall.interval.high < 0
    assert fall.interval.confidence > 0.98, "three comparisons"
    assert "beyond 4,096, the draft's window" in found.conclusion


def test_a_fall_without_a_length_of_the_draft_has_both_lengths() -> None:
    (fall,) = curve({1024: 4.1, 2048: 1.6}).falls
    assert fall.beyond == ()
    assert "between 1,024 and 2,048 tokens" in fall.text


def test_a_slow_fall_is_found_from_the_shortest_to_the_longest() -> None:
    """Each step alone may be luck."""
    (fall,) = curve({1024: 4.10, 2048: 4.05, 4096: 4.00, 8192: 3.95}).falls
    assert (fall.shorter, fall.longer) == (1024, 8192)


def test_equal_lengths_and_rises_are_no_fall() -> None:
    for lengths in ({1024: 4.1, 4096: 4.1001, 16384: 4.1002}, {1024: 3.0, 4096: 4.0}):
        found = curve(lengths)
        assert (found.falls, found.no_test) == ((), None)
        assert found.conclusion == "no fall with the context was measured"


def test_few_prompts_support_no_statement() -> None:
    found = curve({1024: 4.1, 16384: 1.6}, num_prompts=32)
    assert found.falls == ()
    assert getattr(found.no_test, "id", None) == "too-few-prompts"
    assert "32 distinct prompts" in found.conclusion


def test_one_length_and_no_length() -> None:
    assert curve({4096: 4.1}).falls == ()
    assert context_curve([Condition(thinking="on")], (WINDOW,), lambda *_: ([], []), 0.95) is None
