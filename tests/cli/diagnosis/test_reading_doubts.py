"""Doubts about the best reading, and readings that are taken together with it. No model runs."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from dflash_cli.diagnosis import weight_rewrites as rewrites
from dflash_cli.diagnosis.alternatives import ORDERED_TAPS, AlternativeReading
from dflash_cli.diagnosis.reading_doubts import ReadingCase
from dflash_cli.diagnosis.reading_results import ReadingResult, combine, is_alike
from dflash_cli.diagnosis.readings import Searcher
from dflash_cli.diagnosis.run_settings import Score
from dflash_cli.diagnosis.same_part import contested
from dflash_cli.diagnosis.weight_rewrites import HEAD_NORMS, MATRICES, NORMS
from dflash_cli.diagnosis.weight_space import spots
from dflash_testing.pairs import bundled_draft
from dflash_testing.searches import result


def case_of(best: ReadingResult, losses: dict[str, float], *screened: ReadingResult) -> ReadingCase:
    """The doubts about a reading. `losses` has the loss of each reading by name. The config as it is has 4.0."""

    def score(reading: AlternativeReading, _: bool) -> Score:
        changed = [field for field in ("mask_token_id", "rms_norm_eps") if getattr(reading.config, field) != getattr(
            bundled_draft().config, field)]  # fmt: skip
        return Score(6.0, 5.0, losses[" ".join(changed)])

    own = AlternativeReading("", "as it is", bundled_draft().config)
    return ReadingCase(best, own, Score(3.0, 3.0, 4.0), Score(3.0, 3.0, 4.0), screened, 12, score, lambda _: 0.0)


def in_config(length: float, loss: float, **fields: Any) -> ReadingResult:
    found = result(3.0, length, 1.0, next(iter(fields)))
    reading = replace(found.alternative, config=replace(found.alternative.config, **fields), cause=f"wrong {fields}")
    return replace(found, alternative=reading, score=Score(length, length - 1, loss))


def of_part(cause: str, loss: float, gain: float, **changes: Any) -> ReadingResult:
    touches = frozenset({("hidden_norm", None)})
    rewrite = rewrites.change_parts({"hidden_norm": rewrites.scale(1.0)})
    found = result(3.0, 3.0 + gain, 1.0, "weights", cause=cause, touches=touches, rewrite=rewrite, **changes)
    return replace(found, score=Score(3.0 + gain, 2.0, loss))


def test_another_kind_of_reading_of_the_same_part_is_a_rival() -> None:
    """A norm times 3 also gains from subtracting 1. A rival needs four fifths of the gain."""
    offset = of_part("offset", 1.0, 4.0, changes_values=True)
    for gain, is_doubted in ((3.4, True), (2.0, False)):
        scale = of_part("scale", 3.0, gain, is_scale=True)
        doubt = replace(case_of(offset, {"": 2.0}), same_parts=(scale,)).doubt()
        assert (doubt is not None) == is_doubted


def test_a_shorter_block_that_accepts_nearly_as_much_is_a_rival() -> None:
    """Causal attention hides the rows that a block has too many. A reading of the block itself has no such rival."""
    causal = in_config(5.0, 2.0, mask_token_id=7)
    for accepted, factor, is_doubted in ((4.7, "block", True), (4.3, "block", False), (4.7, "mask_token_id", False)):
        block = result(3.0, accepted, 1.0, factor)
        block = replace(block, score=Score(accepted, accepted, 3.5))

        def score(reading: AlternativeReading, _: bool, block: ReadingResult = block) -> Score:
            return block.score if reading is block.alternative else Score(5.0, 4.0, 2.0)

        case = replace(case_of(causal, {}, causal, block), score=score)
        assert (case.doubt() is not None) == is_doubted


def test_a_rival_is_compared_at_the_anchors_of_the_best_reading() -> None:
    """Most readings are scored at few anchors only, where every loss may be lower."""
    best, eps = in_config(5.0, 2.0, mask_token_id=7), in_config(3.0, 1.9, rms_norm_eps=1e-3)
    for loss, is_doubted in ((1.9, True), (4.0, False)):
        losses = {"mask_token_id": 2.0, "rms_norm_eps": loss, "mask_token_id rms_norm_eps": 2.0}
        assert (case_of(best, losses, best, eps).doubt() is not None) == is_doubted


def test_a_reading_that_gains_little_on_top_is_not_taken_together_with_the_best() -> None:
    """A lower loss alone is not enough: the reading is named as a cause too."""
    best = in_config(2.6, 2.0, mask_token_id=7)
    for length, is_taken in ((2.7, False), (3.2, True)):
        both = replace(in_config(length, 1.0, rms_norm_eps=1e-3), difference=length - 2.2)
        searcher: Any = object.__new__(Searcher)
        searcher._case = lambda *_, both=both: SimpleNamespace(further=lambda: both.alternative)
        searcher._estimate = searcher._counted = lambda *_, both=both: both
        found = searcher._composed(best, (), Score(2.2, 2.2, 3.0), ())
        assert found is (both if is_taken else best)


def test_a_scale_on_top_of_a_reading_of_the_same_part_is_a_doubt() -> None:
    offset = of_part("offset", 1.0, 4.0, changes_values=True)

    for loss, is_doubted in ((0.5, True), (1.5, False)):

        def score(reading: AlternativeReading, _: bool, loss: float = loss) -> Score:
            return Score(6.0, 5.0, 1.0 if reading is offset.alternative else loss)

        assert (replace(case_of(offset, {}), score=score).doubt() is not None) == is_doubted


def test_an_offset_is_no_order_of_the_same_part() -> None:
    """Nor is another order of the tapped layers the same cause as other layers."""
    offset, order = of_part("offset", 1.0, 4.0, changes_values=True), of_part("order", 1.0, 4.0)
    other = of_part("another order", 1.0, 4.0)
    assert (is_alike(order, offset), is_alike(order, other)) == (False, True)
    ordered, late, later = (result(3.0, 5.0, 1.0, "taps", cause=cause) for cause in (ORDERED_TAPS, "late", "later"))
    assert (is_alike(late, ordered), is_alike(ordered, late), is_alike(late, later)) == (False, False, True)


def test_an_offset_of_more_norms_is_the_same_cause() -> None:
    one = of_part("two norms", 1.0, 4.0, changes_values=True, shift=1.0)
    touches = one.alternative.touches | {("norm", None)}
    for shift, alike in ((1.0, True), (-1.0, False)):
        more = replace(one.alternative, touches=touches, cause="every norm", shift=shift)
        assert is_alike(replace(one, alternative=more), one) is alike


def test_contested_parts_of_a_reading() -> None:
    """Norms are also scaled together. A norm folded into matrices may have been scaled. Scaling fc is not tried."""
    config = bundled_draft().config

    def parts(*names: str, **changes: Any) -> list[tuple[str, ...]]:
        touches = spots(names, None)
        reading = AlternativeReading("weights", "", config, touches=touches, **changes)
        return [names for names, _ in contested(reading)]

    assert parts("hidden_norm", "norm") == [("hidden_norm",), ("norm",), ("hidden_norm", "norm")]
    assert parts(*HEAD_NORMS) == [(HEAD_NORMS[1],), (HEAD_NORMS[0],)]
    assert parts(*NORMS) == [tuple(sorted(NORMS))]
    assert parts("mlp.gate_proj", changes_values=True) == [("mlp.gate_proj",), ("post_attention_layernorm",)]
    assert parts("fc") == parts(*MATRICES) == parts("norm", is_neutral=True) == []


def test_a_reading_that_saves_much_on_top_is_taken_together_with_the_best() -> None:
    mask, eps = in_config(5.0, 2.0, mask_token_id=7), in_config(4.0, 3.0, rms_norm_eps=1e-3)
    losses = {"mask_token_id": 2.0, "rms_norm_eps": 3.0, "mask_token_id rms_norm_eps": 1.0}
    both = case_of(mask, losses, mask, eps).further()
    assert both is not None
    assert (both.config.mask_token_id, both.config.rms_norm_eps) == (7, 1e-3)
    assert all(item.alternative.cause in both.cause for item in (mask, eps))
    assert case_of(mask, {**losses, "mask_token_id rms_norm_eps": 1.9}, mask, eps).further() is None


def test_a_scale_is_no_part_of_several_readings_and_must_gain_much() -> None:
    mask, eps = in_config(5.0, 2.0, mask_token_id=7), in_config(4.0, 3.0, rms_norm_eps=1e-3)
    losses = {"mask_token_id": 2.0, "rms_norm_eps": 3.0, "mask_token_id rms_norm_eps": 1.0}
    scale = replace(eps, alternative=replace(eps.alternative, is_scale=True))
    assert case_of(mask, losses, mask, scale).further() is None
    little = replace(in_config(3.4, 2.0, mask_token_id=7), score=Score(3.4, 2.0, 2.0))
    assert case_of(little, losses).doubt() is None
    assert case_of(replace(little, alternative=replace(little.alternative, is_scale=True)), losses).doubt() is not None


def test_a_scale_of_layers_does_not_rival_a_scale_of_embeddings() -> None:
    best, eps = in_config(5.0, 2.0, mask_token_id=7), in_config(4.9, 2.05, rms_norm_eps=1e-3)
    scale = replace(eps, alternative=replace(eps.alternative, is_scale=True))
    losses = {"mask_token_id": 2.0, "rms_norm_eps": 2.05, "mask_token_id rms_norm_eps": 2.0}
    embedding = replace(best, alternative=replace(best.alternative, factor="embedding"))
    assert case_of(best, losses, scale).doubt() is not None
    assert case_of(embedding, losses, scale).doubt() is None


def test_two_readings_change_a_draft_together_unless_they_change_the_same_setting() -> None:
    own = AlternativeReading("", "as it is", bundled_draft().config)
    mask = replace(own, config=replace(own.config, mask_token_id=7))
    eps = replace(own, config=replace(own.config, rms_norm_eps=1e-3))
    both = combine(mask, eps, own)
    assert both is not None
    assert (both.config.mask_token_id, both.config.rms_norm_eps) == (7, 1e-3)
    assert combine(mask, replace(own, config=replace(own.config, mask_token_id=9)), own) is None
