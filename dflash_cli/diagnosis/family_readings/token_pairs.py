"""Readings of drafts that score pairs of tokens: two tables with a row per token, candidates, and scales of logits."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.alternatives import AlternativeReading, ReadingSpace, changed, with_equal_scales
from dflash_cli.diagnosis.equal_scales import EMBEDDING, LOGITS
from dflash_cli.diagnosis.run_level import reading_rule
from dflash_cli.diagnosis.weight_orders import orders, orders_of_parts
from dflash_cli.diagnosis.weight_rewrites import Change
from dflash_cli.rules.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

FACTORS = (-1.0, 0.125, 0.25, 0.5, 2.0, 4.0, 8.0)
NUMS_CANDIDATES = (16, 8, 32, 4, 64, 50, 128, 2, 1)
"""Numbers of candidates, usual ones first."""

USUAL_ORDERS = ("in reverse", "with halves exchanged")
CAPS = (30.0, 50.0, 15.0)
"""Caps of logits that published targets use."""


def table_readings(
    space: ReadingSpace, factor: str, first: str, second: str, *, factors: tuple[str, ...] = ()
) -> Iterator[AlternativeReading]:
    """Tables of predecessors (`first`) and successors exchanged, with other rows, other columns or another scale.

    `factors` are the names of parts that the scores are multiplied with like `second`: their scale has the same effect.
    """
    names = {
        name: name.rpartition(".")[2] if not name.endswith(".weight") else name.split(".")[-2]
        for name in (first, second)
    }
    if space.weights and space.weights[first].shape == space.weights[second].shape:
        pairs = ((first, second),)
        halves = (
            rewrites.exchange_tensors(pairs, is_half=True),
            rewrites.exchange_tensors([(second, first)], is_half=True),
        )
        title = f"{names[first]} and {names[second]} exchanged"
        cause = f"{names[first]} and {names[second]} are exchanged"
        rewrite = rewrites.exchange_tensors(pairs)
        touches = frozenset({(first, None), (second, None)})
        yield AlternativeReading(factor, title, space.config, cause, rewrite, touches=touches, halves=halves)
    groups = {names[first]: (first,), names[second]: (second,), f"{names[first]} and {names[second]}": (first, second)}
    for name, tensors in groups.items():
        for steps in (1, -1):
            title = f"rows of {name} shifted {'down' if steps > 0 else 'up'} by one"
            yield _changed_tables(space, factor, title, f"the rows of {name} belong to other tokens", tensors,
                                  rewrites.along(0, partial(rewrites.roll, steps)))  # fmt: skip
        yield _changed_tables(space, factor, f"{name} read by columns", f"the values of {name} are stored by columns",
                              tensors, rewrites.by_column)  # fmt: skip
    others = dict.fromkeys((names[first], *factors))
    cause = f"the columns of {names[second]} are in another order than in {' and '.join(others)}"
    rank = space.weights[second].shape[1] if space.weights else 1
    for how, order in (orders(rank) | orders_of_parts(rank)).items():
        reading = _changed_tables(
            space, factor, f"columns of {names[second]} {how}", cause, (second,), rewrites.along(1, order)
        )
        yield replace(reading, is_guess=how not in USUAL_ORDERS)
    cause = f"the values of {' or '.join((*factors, names[second]))} are scaled or negated"
    for scale in FACTORS:
        title = f"{names[second]} times {scale:.3g}"
        reading = _changed_tables(space, factor, title, cause, (second,), rewrites.scale(scale), is_scale=scale != -1)
        yield replace(reading, equal=tuple(f"{name} times {scale:.3g}" for name in factors))


def without_table(space: ReadingSpace, factor: str, name: str, table: str) -> AlternativeReading:
    """The draft without the scores that a table gives."""
    rewrite = rewrites.change_tensors({table: rewrites.scale(0.0)})
    cause = f"{name} is damaged"
    touches = frozenset({(table, None)})
    return AlternativeReading(factor, f"without {name}", space.config, cause, rewrite, touches=touches, is_neutral=True)


def _changed_tables(
    space: ReadingSpace, factor: str, title: str, cause: str, tables: tuple[str, ...], change: Change, *,
    is_scale: bool = False,
) -> AlternativeReading:  # fmt: skip
    rewrite = rewrites.change_tensors(dict.fromkeys(tables, change))
    touches = frozenset((table, None) for table in tables)
    return AlternativeReading(factor, title, space.config, cause, rewrite, touches=touches, is_scale=is_scale)


def scale_readings(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """Other scales and caps of logits. The pairs of tokens are scored without them, so they change what is chosen."""
    config, cause = space.config, "the scale of the logits differs from training"
    usual = {1.0, config.hidden_size**-0.5, config.hidden_size**0.5}
    usual |= {config.output_multiplier * factor for factor in (0.25, 0.5, 2.0, 4.0)}
    if config.output_multiplier * config.logit_scale != 1:
        yield changed(space, "scale", "logits as they are", cause, output_multiplier=1.0, logit_scale=1.0)
    for value in sorted(usual - {config.output_multiplier}):
        reading = changed(space, "scale", f"output_multiplier {value:.4g}", cause, output_multiplier=value)
        yield with_equal_scales(reading, LOGITS, value / config.output_multiplier)
    for cap in (None, *CAPS):
        name = "no cap of the logits" if cap is None else f"final_logit_softcapping {cap:g}"
        yield changed(space, "scale", name, "the cap of the logits differs from training", final_logit_softcapping=cap)


def embedding_readings(space: ReadingSpace) -> Iterator[AlternativeReading]:
    """Usual values of input_embedding_scale."""
    config, cause = space.config, "the draft was trained on embeddings of another scale"
    for value in (1.0, config.hidden_size**0.5, config.hidden_size**-0.5):
        if not config.has_own_width:
            reading = changed(space, "embedding", f"embeddings times {value:.4g}", cause, input_embedding_scale=value)
            yield with_equal_scales(reading, EMBEDDING, config.input_embedding_scale / value)


def candidate_readings(space: ReadingSpace, part: str) -> Iterator[AlternativeReading]:
    """Other numbers of candidates of the selector or of the Markov head. More of them always cover more of a text."""
    config, cause = space.config, "the number of candidates is too small or too large"
    settings = getattr(config, part)
    for number in NUMS_CANDIDATES:
        if number <= config.draft_vocab_size:
            setting = replace(settings, top_k=number)
            reading = changed(space, "candidates", f"{number} candidates", cause, **{part: setting})
            yield replace(reading, is_free=True)
    if part == "markov":
        setting = replace(settings, top_k=None)
        yield replace(changed(space, "candidates", "all candidates", cause, markov=setting), is_free=True)


def permuted(shape: tuple[int, ...], order: tuple[int, ...]) -> Change:
    """Rows that are stored as a grid of `shape`, with its axes in another order."""

    def change(tensor: "Tensor") -> "Tensor":
        rows = [shape[axis] for axis in order]
        back = tuple(order.index(axis) for axis in range(len(order)))
        return tensor.view(*rows, *tensor.shape[1:]).permute(*back, len(order)).reshape(tensor.shape)

    return change


def _at_candidates(subject: Subject) -> str:
    has_selector = subject.parsed is not None and subject.parsed.config.selector is not None
    return subject.expected_at("selector_top_k" if has_selector else "dspark_draft_topk")


reading_rule(
    "R15",
    "candidates",
    "No other number of candidates explains why few draft tokens are accepted.",
    at=_at_candidates,
    effect="the scores of token pairs choose among other tokens than in training",
    step="correct the number of candidates",
    source="z-lab/dflash 0.1.0 model.py (selector_top_k); vLLM 0.33.0 qwen3_dspark.py (dspark_draft_topk)",
)
reading_rule(
    "R17",
    "scale",
    """No other scale or cap of logits explains why few draft tokens are accepted.

    It is tried for drafts that add scores of token pairs to their logits. In other drafts it never changes a choice.
    """,
    at=lambda subject: subject.expected_at("output_multiplier"),
    effect="logits probably weigh more or less beside the scores of token pairs than in training",
    step="correct output_multiplier, logit_scale or final_logit_softcapping",
    source="vLLM 0.33.0 qwen3_dspark.py, qwen3_dflash2.py",
)
