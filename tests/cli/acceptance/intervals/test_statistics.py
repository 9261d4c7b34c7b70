"""Acceptance by hand, and intervals: one bootstrap and one quantile rule, for one sample and for two samples."""

import json
import random
import re
import time
from dataclasses import replace

import numpy as np
import pytest

from dflash_cli.acceptance.intervals.resampling import resampled_bounds
from dflash_cli.acceptance.intervals.statistics import (
    Summary,
    limit_text,
    pooled_acceptance_len,
    summarise,
)
from dflash_runtime.documents import to_json
from dflash_runtime.notices import Notice
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput


def test_few_prompts_can_lack_more_than_half_of_all_kinds() -> None:
    """0.05 ** (1 / N) of prompts must be of other kinds."""
    assert [limit_text(count, 0.95).rpartition("than ")[2] for count in (1, 3, 5, 64)] == [
        "95%", "63%", "1 in 2", "1 in 21",
    ]  # fmt: skip


def test_pooled_length_is_tokens_over_steps() -> None:
    assert pooled_acceptance_len([(6, 2), (2, 2)]) == 2.0
    assert pooled_acceptance_len([(0, 0)]) == 1.0


def output(lengths: list[int], kept: list[int] | None = None, prefill: int = 1) -> RequestOutput:
    kept = kept or lengths
    return RequestOutput(
        index=0,
        prompt_token_ids=(1,),
        token_ids=(1,) * (sum(kept) + prefill),
        finish_reason=FinishReason.LENGTH,
        acceptance_lengths=tuple(lengths),
        committed_lengths=tuple(kept),
    )


def test_every_definition_by_hand() -> None:
    """Two requests with K = 3. The token limit cuts the last step of the second request from 4 tokens to 2."""
    summary = summarise([output([1, 4, 2]), output([3, 4], kept=[3, 2])], 3, num_resamples=0)
    assert summary.definitions == pytest.approx(
        {
            "vllm": 14 / 5,
            "zlab": (7 / 3 + 5 / 2) / 2,
            "zlab_untruncated": (7 / 3 + 7 / 2) / 2,
            "sglang": (8 / 3 + 6 / 2) / 2,
            "committed": 12 / 5,
            "mlx_ratio": 9 / 14,
        }
    )
    assert summary.histogram == (1, 1, 1, 2)
    assert summary.per_pos_conditional_rates == [4 / 5, 3 / 4, 2 / 3]


def test_no_steps_are_no_figures() -> None:
    summary = summarise([output([])], 3)
    assert summary.counts.acceptance_len is None
    assert summary.acceptance_len_interval is None
    assert set(summary.definitions.values()) == {None}
    json.dumps(to_json(summary), allow_nan=False)


def draw_length(generator: random.Random, accept: float) -> int:
    """Draw the number of tokens of a step, at most 8: each drafted token is accepted with probability `accept`."""
    length = 1
    while length < 8 and generator.random() < accept:
        length += 1
    return length


def test_the_summary_of_a_large_set_is_quick() -> None:
    """1,319 prompts and 10,000 resamples, positions included: 0.2 s of processor time on a free core."""
    generator = random.Random(0)
    outputs = [output([draw_length(generator, 0.6) for _ in range(20)]) for _ in range(1319)]
    started = time.process_time()
    summarise(outputs, 7)
    assert time.process_time() - started < 1


def why_none(summary: Summary) -> tuple[str, list[str]]:
    """The id of the reason for a missing interval, and the numbers in its text."""
    assert summary.acceptance_len_interval is None
    reason = summary.acceptance_len_no_interval
    assert isinstance(reason, Notice)
    return reason.id, re.findall(r"\d+", reason)


def test_an_interval_needs_enough_conversations_and_is_repeatable() -> None:
    outputs = [output([1, 2]), output([5, 6]), output([3]), output([2, 2])] * 16
    assert why_none(summarise(outputs[:63], 7, num_resamples=100)) == ("too-few-prompts", ["63", "64"])
    turns = [0, *range(63)]
    assert why_none(summarise(outputs, 7, conversations=turns, num_resamples=100)) == ("too-few-prompts", ["63", "64"])
    first, again = (summarise(outputs, 7, confidence=0.9, num_resamples=100, seed=3) for _ in range(2))
    assert first.acceptance_len_interval is not None
    assert first.acceptance_len_interval.confidence == 0.9
    assert first.acceptance_len_no_interval is None
    assert first.acceptance_len_interval == again.acceptance_len_interval
    assert why_none(summarise(outputs, 7, num_resamples=0)) == ("no-bootstrap", [])
    assert why_none(summarise([], 7)) == ("no-steps", [])
    assert why_none(summarise(outputs[:1], 7)) == ("too-few-prompts", ["1", "64"])


def test_rates_that_few_prompts_reach_have_no_interval() -> None:
    """63 of 64 prompts reach position 2, so only its share of all steps has an interval."""
    outputs = [output([1 + index % 3 + (index > 0)]) for index in range(64)]
    summary = summarise(outputs, 7, num_resamples=50)
    assert summary.per_pos_intervals[1] is not None
    assert summary.per_pos_conditional_intervals[1] is None


def test_a_document_of_an_earlier_release_loses_intervals_of_few_prompts() -> None:
    outputs = [output([1 + index % 3]) for index in range(64)]
    kept = summarise(outputs, 7, num_resamples=50)
    few = replace(kept, num_distinct_prompts=16)
    assert why_none(few) == ("too-few-prompts", ["16", "64"])
    assert not any((*few.per_pos_intervals, *few.per_pos_conditional_intervals))
    assert replace(kept) == kept


def test_positions_have_the_interval_of_their_share_of_steps() -> None:
    """A position's interval is the interval of the ratio of its counts. Equal prompts give no interval."""
    generator = random.Random(3)
    outputs = [output([1 + draw_length(generator, 0.5) for _ in range(10)]) for _ in range(80)]
    summary = summarise(outputs, 8, num_resamples=500)
    assert summary.per_pos_intervals[0] is None
    for place, rate in enumerate(summary.counts.per_pos_acceptance_rates[1:], start=2):
        interval = summary.per_pos_intervals[place - 1]
        assert interval is not None
        assert 0 <= interval.low < rate < interval.high <= 1
        counts = [(sum(length > place for length in item.acceptance_lengths), 10) for item in outputs]
        exact = resampled_bounds(np.array([[counts]], dtype=float), confidence=0.95, num_resamples=500, seed=0)
        assert (interval.low, interval.high) == pytest.approx(tuple(exact[0]))


def test_repeats_of_a_prompt_are_one_unit() -> None:
    """Four prompts, 32 times each, have no interval. 64 prompts twice have the interval of 64."""
    rows = [output([2 + index % 5, 3]) for index in range(128)]
    few = summarise(rows, 7, prompts=[index % 4 for index in range(128)])
    assert (few.acceptance_len_interval, few.num_conversations, few.num_distinct_prompts) == (None, 128, 4)
    assert few.acceptance_len_no_interval is not None
    assert getattr(few.acceptance_len_no_interval, "id", None) == "too-few-prompts"
    half, twice = summarise(rows[:64], 7), summarise([*rows[:64], *rows[:64]], 7, prompts=[*range(64), *range(64)])
    assert half.acceptance_len_interval == twice.acceptance_len_interval


def test_equal_prompts_have_the_interval_of_the_rule_of_three() -> None:
    """If all 64 prompts have 4 tokens per step, 6% of all prompts may still have 1, or 8."""
    found = summarise([output([4, 4]) for _ in range(64)], 7).acceptance_len_interval
    share = 1 - 0.025 ** (1 / 64)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((4 / (1 + 3 * share), 4 / (1 - share / 2)))


def test_steps_with_more_drafts_than_configured_have_positions_and_intervals_of_their_own() -> None:
    outputs = [replace(output([2, 6, 1 + index % 3]), index=index) for index in range(70)]
    found = summarise(outputs, 3)
    assert found.histogram == (24, 93, 23, 0, 0, 70)
    assert len(found.per_pos_intervals) == len(found.counts.per_pos_accepted) == 5
