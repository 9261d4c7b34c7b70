"""Readings of DSpark drafts: the layout of a block, and the Markov head."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.alternatives import (
    ANCHOR_MIN_LEN,
    FAMILY_READINGS,
    AlternativeReading,
    ReadingSpace,
    changed,
)
from dflash_cli.diagnosis.family_readings.token_pairs import (
    candidate_readings,
    embedding_readings,
    scale_readings,
    table_readings,
    without_table,
)
from dflash_cli.diagnosis.run_level import RunSubject, gain_in_words, reading_rule
from dflash_cli.diagnosis.weight_rewrites import Change
from dflash_cli.formats.dialect import COMMON
from dflash_cli.rules.rule import FIX_RUN_LEVEL, Problem, check
from dflash_cli.rules.shapes import layout_in_words
from dflash_cli.rules.subject import WEIGHTS
from dflash_runtime.checkpoint.layout import MARKOV

if TYPE_CHECKING:
    from torch import Tensor

BEFORE, AFTER = f"{MARKOV}.markov_w1.weight", f"{MARKOV}.markov_w2.weight"
GATE, JOINT = f"{MARKOV}.gate_proj.weight", f"{MARKOV}.joint_proj.weight"
LAYOUT = "layout"

SURELY = 2.0
"""The layout that is assumed is right if it accepts this many times as many draft tokens as the other."""


@FAMILY_READINGS.register("dspark")
def dspark_readings(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """Every reading that only DSpark drafts have."""
    config = space.config
    yield other_layout(space)
    yield from embedding_readings(space)
    if config.markov is None:
        return
    yield from scale_readings(space)
    yield from candidate_readings(space, "markov")
    if config.markov.head_type != "vanilla":
        vanilla = replace(config.markov, head_type="vanilla")
        cause = "the draft was trained with a vanilla Markov head"
        yield changed(space, "markov", "a vanilla Markov head", cause, markov=vanilla)
    if space.weights:
        factors = ("markov_w1",) if config.markov.head_type == "vanilla" else ()
        yield from table_readings(space, "markov", BEFORE, AFTER, factors=factors)
        yield without_table(space, "markov", "the Markov head", AFTER)
        yield from _inner(space)


def other_layout(space: ReadingSpace) -> AlternativeReading:
    """The layout of a block that the config does not state."""
    is_anchor_first = not space.config.sample_from_anchor
    name = layout_in_words(is_anchor_first)
    cause = f"the draft's blocks are {name}"
    reading = changed(space, LAYOUT, f"{name} blocks", cause, sample_from_anchor=is_anchor_first)
    return replace(reading, min_len=ANCHOR_MIN_LEN)


def _inner(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """The matrix inside a gated or recurrent head with its inputs, and outputs, in another order."""
    markov, hidden = space.config.markov, space.config.hidden_size
    assert markov is not None
    rank = markov.rank
    inputs = {"gated": (GATE, (hidden, rank)), "rnn": (JOINT, (rank, rank, hidden))}.get(markov.head_type)
    if inputs is None:
        return
    name, sizes = inputs
    title, touches = name.split(".")[-2], frozenset({(name, None)})
    for order in list(permutations(range(len(sizes))))[1:]:
        rewrite = rewrites.change_tensors({name: _reordered(1, sizes, order)})
        cause = f"the inputs of {title} are in another order"
        how = f"inputs of {title} in the order {list(order)}"
        yield AlternativeReading("markov", how, space.config, cause, rewrite, touches=touches)
    bias = name.replace(".weight", ".bias")
    for order in list(permutations(range(3)))[1:] if markov.head_type == "rnn" else ():
        change = _reordered(0, (rank,) * 3, order)
        rewrite = rewrites.change_tensors({name: change, bias: change})
        cause = f"the outputs of {title} are in another order"
        how = f"outputs of {title} in the order {list(order)}"
        yield AlternativeReading("markov", how, space.config, cause, rewrite, touches=touches)


def _reordered(dim: int, sizes: tuple[int, ...], order: tuple[int, ...]) -> Change:
    """Parts of an axis in place of the order in which they are stored."""

    def change(tensor: "Tensor") -> "Tensor":
        import torch

        stored = tensor.split([sizes[part] for part in order], dim=dim)
        return torch.cat([stored[order.index(part)] for part in range(len(sizes))], dim=dim)

    return change


@check(
    "R12",
    level="run",
    effect="every prediction is off by one position",
    fix=f"dflash convert {{draft}} {{out}} --to {COMMON} --layout anchor-first # or fill-in",
    source="vllm-project/vllm#56792 (0.9% accepted); ggml-org/llama.cpp#26275",
    outcome="drops",
)
def layout_is_right(subject: RunSubject) -> Iterator[Problem]:
    """The other layout of a DSpark block does not explain why few draft tokens are accepted.

    If the config does not state the layout, a remark names the layout that accepts more by far.
    """
    search, best = subject.search, subject.search.explanation
    if best is not None and best.factor == LAYOUT:
        right = best.alternative.config.sample_from_anchor
        value = str(right).lower()
        yield Problem(
            subject.expected_at("sample_from_anchor"),
            gain_in_words(search, best),
            fix=f"{_state(right)}, then repeat the run: {FIX_RUN_LEVEL}",
            correction=f"set {subject.expected_at('sample_from_anchor')} to {value}",
        )
    if best is not None or subject.parsed is None or not subject.parsed.has_unknown_layout:
        return
    other = next((item for item in search.readings if item.factor == LAYOUT), None)
    accepted = search.acceptance_len - 1
    if other is not None and accepted >= ANCHOR_MIN_LEN - 1 and accepted >= SURELY * (other.acceptance_len - 1):
        right = subject.parsed.config.sample_from_anchor
        yield Problem(
            subject.expected_at("sample_from_anchor"),
            f"missing, and the blocks are {layout_in_words(right)}: {search.acceptance_len:.2f} tokens per step, with "
            f"{other.reading} {other.acceptance_len:.2f}",
            effect="an engine that assumes the other layout accepts almost no token",
            fix=_state(right),
            severity="info",
        )


def _state(is_anchor_first: bool) -> str:
    return f"dflash convert {{draft}} {{out}} --to {COMMON} --layout {layout_in_words(is_anchor_first)}"


reading_rule(
    "R16",
    "markov",
    """No exchange or rewriting of the Markov head's tensors explains why few draft tokens are accepted.

    The run tries its two factors exchanged, with rows of other tokens, in other orders and scales, and no head.
    """,
    at=lambda _: WEIGHTS,
    effect="the bias of each token probably belongs to another pair of tokens than in training",
    step="export the draft again with the right tensors (the reading names them)",
    source="speculators 0.9.0 models/dspark; vLLM 0.33.0 qwen3_dspark.py",
)
