"""Shapes of synthetic curves: each is found given enough steps, and noise never becomes a shape.

Steps of a conversation share its difficulty, so they carry less information than independent steps.
"""

import numpy as np
import pytest

from dflash_cli.acceptance.conversation_counts import ConversationCounts, TurnSteps, count_turns
from dflash_cli.acceptance.curve_shape import find_shapes
from dflash_runtime.metrics import AcceptanceCounts

FLAT_AND_LOW, CLIFF, ZEROS, DECAY = (
    "flat and low", "cliff after position 1", "zeros after position {}", "decay with context",
)  # fmt: skip
"""Names of shapes, as JSON has them."""
SOUND = [0.75, 0.72, 0.7, 0.66, 0.6, 0.56, 0.54]
"""Conditional rates by position, close to the bundled pair's."""


def curve(rates: list[float], *, num_conversations: int = 64, seed: int = 0, spread: float = 0.8) -> AcceptanceCounts:
    """Draw counts of conversations with 5 to 60 steps. The logits of their rates have a standard deviation `spread`."""
    generator = np.random.default_rng(seed)
    reached = generator.integers(5, 60, num_conversations)
    logits = np.log(np.clip(rates, 1e-6, 1 - 1e-6) / (1 - np.clip(rates, 1e-6, 1 - 1e-6)))
    shift = spread * generator.standard_normal(num_conversations)
    counts = AcceptanceCounts(len(rates), int(reached.sum()))
    for place, logit in enumerate(logits):
        reached = generator.binomial(reached, 1 / (1 + np.exp(-logit - shift)) if rates[place] else 0.0)
        counts.per_pos_accepted[place] = int(reached.sum())
    counts.num_accepted_tokens = sum(counts.per_pos_accepted)
    return counts


def names(counts: AcceptanceCounts) -> list[str]:
    return [shape.name for shape in find_shapes(counts)]


@pytest.mark.parametrize(("rates", "name"), [
    ([0.03, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], FLAT_AND_LOW),
    ([0.2, 0.14, 0.17, 0.12, 0.1, 0.1, 0.1], FLAT_AND_LOW),
    ([0.75, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2], CLIFF),
    ([0.75, 0.72, 0.7, 0.66, 0.0, 0.0, 0.0], ZEROS.format(4)),
    ([0.75, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], ZEROS.format(1)),
])  # fmt: skip
def test_a_shape_is_named(rates: list[float], name: str) -> None:
    assert [names(curve(rates, seed=seed)) for seed in range(20)] == [[name]] * 20


@pytest.mark.parametrize(
    "rates",
    [SOUND, [0.5, 0.45, 0.4, 0.35, 0.3, 0.25, 0.2], [0.9] * 15, [0.45] * 7, [0.6, 0.4, 0.5, 0.4, 0.4, 0.3, 0.2]],
)
@pytest.mark.parametrize("num_conversations", [4, 16, 64])
def test_a_sound_curve_has_no_shape(rates: list[float], num_conversations: int) -> None:
    """At most 2 of 200 draws may show a shape, also for a weak draft: weak is not faulty."""
    found = [names(curve(rates, num_conversations=num_conversations, seed=seed)) for seed in range(200)]
    assert sum(map(bool, found)) <= 2, [item for item in found if item]


@pytest.mark.parametrize("rates", [[0.03, 0, 0], [0.75, 0.2, 0.2], [0.75, 0.7, 0.0]])
def test_a_handful_of_steps_shows_no_shape(rates: list[float]) -> None:
    counts = AcceptanceCounts(3, 8)
    for place, rate in enumerate(rates):
        counts.per_pos_accepted[place] = round(rate * (counts.per_pos_accepted[place - 1] if place else 8))
    assert find_shapes(counts) == []
    assert find_shapes(AcceptanceCounts(3)) == []


def test_positions_that_were_not_verified_do_not_count_as_zeros() -> None:
    counts = curve(SOUND)
    counts.per_pos_accepted[3:] = [0] * 4
    assert names(counts) == [ZEROS.format(3)]
    counts.per_pos_verified[3:] = [0] * 4
    assert names(counts) == []


def conversation(index: int, near: float, far: float, generator: np.random.Generator) -> ConversationCounts:
    """Draw 100 steps after a prompt of 60 tokens. Acceptance is `far` once the context has reached 316 tokens."""
    ease = generator.normal(0, 0.08)
    lengths: list[int] = []
    length = 60
    for _ in range(100):
        chance = min(0.95, max(0.05, (near if length < 316 else far) + ease))
        lengths.append(min(8, int(generator.geometric(1 - chance))))
        length += lengths[-1]
    turns = [TurnSteps(60, lengths, lengths)]
    return ConversationCounts(digest=str(index), name=str(index), category=None, condition=None, **count_turns(turns))


def test_decay_with_context_is_found() -> None:
    generator = np.random.default_rng(0)
    found = [
        [shape.name for shape in find_shapes(None, [conversation(index, 0.75, far, generator) for index in range(24)])]
        for far in [0.55] * 10 + [0.75] * 100
    ]
    assert found[:10] == [[DECAY]] * 10
    assert sum(map(bool, found[10:])) <= 3


def test_short_texts_have_no_far_steps() -> None:
    """A far context has doubled and grown by 256 tokens. Prompts of later turns count as context."""
    counts = count_turns([TurnSteps(10, [4] * 60, [4] * 60)])
    assert counts.pop("histogram") == (0, 0, 0, 60)
    assert counts == {"num_tokens": 240, "num_steps": 60, "num_far_tokens": 0, "num_far_steps": 0}
    counts = count_turns([TurnSteps(300, [5, 5], [5, 5]), TurnSteps(598, [2, 3, 4], [2, 3, 1])])
    assert counts.pop("histogram") == (0, 1, 1, 1, 2)
    assert counts == {"num_tokens": 19, "num_steps": 5, "num_far_tokens": 7, "num_far_steps": 2}


def test_the_test_command_of_a_shape_names_the_pair() -> None:
    (shape,) = find_shapes(curve([0.1] * 7), references={"draft": "my draft", "target": "org/model"})
    assert shape.test == "dflash diagnose 'my draft' --target org/model"
    first, *likely, test = shape.lines
    assert f"{shape.name} ({shape.evidence})" in first
    assert " ".join(map(str.strip, likely)).endswith(shape.causes)
    assert test.endswith(shape.test)
    assert max(map(len, shape.lines)) <= 76
    (shape,) = find_shapes(curve([0.75, 0.2, 0.2]))
    assert shape.test == "dflash validate DRAFT --target TARGET --level run"
