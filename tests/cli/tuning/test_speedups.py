"""Speed-ups from known acceptance and step times: the best candidate, the level ones, and whether drafting pays."""

import math
import random
from collections.abc import Mapping, Sequence
from statistics import stdev

import pytest

from dflash_cli.acceptance.acceptance_report import Evaluation
from dflash_cli.acceptance.conversation_counts import ConversationCounts
from dflash_cli.acceptance.intervals.statistics import summarise
from dflash_cli.generation.prompt_source import PromptSource
from dflash_cli.tuning.candidates import Candidate
from dflash_cli.tuning.speedups import Choice, batch_schedule, choose, overall_best, speedup
from dflash_cli.tuning.step_costs import StepCosts, Times
from dflash_cli.tuning.tuning_report import advice, caveats
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_testing.evaluations import evaluation_run

DOES_NOT_PAY = "does not pay"
ONE, THREE, SEVEN = Candidate(1, "resized"), Candidate(3, "resized"), Candidate(7, "whole")
TREE = Candidate(7, "tree", 32)


def output_of(index: int, lengths: Sequence[int]) -> RequestOutput:
    return RequestOutput(
        index=index,
        prompt_token_ids=(1,),
        token_ids=(1,) * sum(lengths),
        finish_reason=FinishReason.LENGTH,
        acceptance_lengths=tuple(lengths),
        verify_widths=(8,) * len(lengths),
        committed_lengths=tuple(lengths),
    )


def evaluation_of(rows: Sequence[Sequence[int]], categories: str = "a", num_resamples: int = 500) -> Evaluation:
    """An evaluation with steps of these lengths in each row. Rows take the categories in turn."""
    outputs = [output_of(index, lengths) for index, lengths in enumerate(rows)]
    counts = tuple(
        ConversationCounts(
            digest=str(index), name=str(index), category=categories[index % len(categories)], num_tokens=sum(lengths),
            num_steps=len(lengths),
        )
        for index, lengths in enumerate(rows)
    )  # fmt: skip
    by_name = {name: outputs[place :: len(categories)] for place, name in enumerate(categories)}
    return Evaluation(
        total=summarise(outputs, 7, num_resamples=num_resamples),
        categories={name: summarise(item, 7, num_resamples=num_resamples) for name, item in by_name.items()},
        settings={},
        measured=evaluation_run(),
        prompts=PromptSource(name="made", num_available=len(rows)),
        conversations=counts,
        seconds=0.0,
    )


def costs_of(plain: Mapping[int, Times], **drafting: Mapping[int, Times]) -> StepCosts:
    candidates = {item.name.replace("-", ""): item for item in (ONE, THREE, SEVEN, Candidate(3, "narrowed"), TREE)}
    return StepCosts(
        plain=plain, drafting={candidates[name]: times for name, times in drafting.items()}, source="given"
    )


def spread(mean: int, num_rows: int = 64, seed: int = 0) -> list[list[int]]:
    """Rows of ten steps, each with at most one token more or less than the mean."""
    generator = random.Random(seed)
    return [[mean + generator.choice((-1, 0, 1)) for _ in range(10)] for _ in range(num_rows)]


def test_a_speedup_is_length_times_plain_over_drafting() -> None:
    """With equal times, only the interval of the acceptance length is left."""
    evaluation = evaluation_of([[3] * 5] * 64)
    found = speedup(evaluation, costs_of({4: (10.0, 10.0)}, whole7={4: (15.0, 15.0)}), SEVEN, None, 4, 0.95)
    assert found is not None
    assert found.interval is not None
    of_length = evaluation.total.acceptance_len_interval
    assert of_length is not None
    assert (found.speedup, found.interval.low, found.interval.high) == pytest.approx(
        (2.0, of_length.low / 1.5, of_length.high / 1.5)
    )


def test_a_single_timing_decides_nothing() -> None:
    """Twice as fast by one timing: no interval, no verdict, and no candidate is called slower."""
    once = costs_of({1: (10.0,)}, resized1={1: (40.0,)}, whole7={1: (15.0,)})
    choice = choices_of(once)[1]
    assert [item.interval for item in choice.speedups] == [None, None]
    assert all(item.no_interval for item in choice.speedups)
    assert (choice.payoff, choice.level) == ("undecided", ["resized-1"])


def test_intervals_hold_for_all_candidates_together() -> None:
    """The best of several is chosen by its figure, so each interval is wider than the interval of one candidate."""
    costs = costs_of({1: (10.0, 11.0)}, **{name: {1: (15.0, 16.0)} for name in ("resized1", "resized3", "whole7")})
    together = next(item for item in choices_of(costs)[1].speedups if item.candidate == SEVEN).interval
    alone = speedup(LENGTHS[SEVEN], costs, SEVEN, None, 1, 0.95)
    corrected = speedup(LENGTHS[SEVEN], costs, SEVEN, None, 1, 1 - 0.05 / 3)
    assert alone is not None
    assert corrected is not None
    assert together == corrected.interval
    assert together is not None
    assert alone.interval is not None
    assert together.low < alone.interval.low < alone.interval.high < together.high


def test_settings_for_a_loss_carry_a_caution() -> None:
    """K 1 is best on average, but slower in large batches. A loss at every batch size gives no settings."""
    (line,) = caveats(list(choices_of(TRADE_OFF).values()), 1)
    assert "batch 64" in line
    loss = costs_of({1: (10.0, 11.0)}, whole7={1: (64.0, 40.0)}, resized1={1: (99.0, 99.0)})
    assert choices_of(loss)[1].payoff == "undecided"
    assert overall_best(list(choices_of(loss).values())) is None


def test_an_interval_has_the_errors_of_acceptance_and_of_times() -> None:
    """On a log scale, the squares of both half widths add up."""
    plain, widths = {1: (10.0, 10.0, 10.0)}, []
    for times in ((15.0, 15.0, 15.0), (14.0, 15.0, 16.0)):
        found = speedup(evaluation_of(spread(3)), costs_of(plain, whole7={1: times}), SEVEN, None, 1, 0.95)
        assert found is not None
        assert found.interval is not None
        widths.append(math.log(found.interval.high / found.speedup))
    of_times = 4.302653 * stdev(math.log(time) for time in (14, 15, 16)) / math.sqrt(3)
    assert widths[0] > 0.01
    assert widths[1] == pytest.approx(math.hypot(widths[0], of_times))


def test_a_slow_round_does_not_widen_the_interval_of_paired_times() -> None:
    plain, drafting = (10.0, 20.0, 15.0, 30.0), (15.0, 30.0, 22.5, 45.0)
    evaluation = evaluation_of([[3] * 5] * 64)
    paired = speedup(evaluation, costs_of({1: plain}, whole7={1: drafting}), SEVEN, None, 1, 0.95)
    apart = speedup(evaluation, costs_of({1: plain}, whole7={1: (*drafting, 30.0)}), SEVEN, None, 1, 0.95)
    assert paired is not None
    assert apart is not None
    assert paired.interval is not None
    assert apart.interval is not None
    of_length = evaluation.total.acceptance_len_interval
    assert of_length is not None
    assert paired.interval.high == pytest.approx(of_length.high / 1.5)
    assert apart.interval.high > 1.5 * apart.speedup


def test_too_few_prompts_have_no_interval() -> None:
    found = speedup(evaluation_of(spread(3, 6)), costs_of({1: (10.0,)}, whole7={1: (5.0,)}), SEVEN, None, 1, 0.95)
    assert found is not None
    assert (found.interval, found.payoff) == (None, "undecided")


def test_few_prompts_decide_only_what_a_lacking_kind_cannot_change() -> None:
    """16 prompts have no interval. 5% faster is not enough: a kind without accepted tokens may be missing."""
    for ms, payoff in ((19.0, "undecided"), (5.0, "pays"), (200.0, DOES_NOT_PAY)):
        costs = costs_of({1: (10.0, 10.0)}, whole7={1: (ms, ms)})
        found = speedup(evaluation_of([[2, 2, 2, 2, 2, 1, 3]] * 15 + [[1, 3, 1]]), costs, SEVEN, None, 1, 0.95)
        assert found is not None
        assert (found.interval, found.payoff) == (None, payoff)
        assert getattr(found.no_interval, "id", None) == "too-few-prompts"


LENGTHS = {ONE: evaluation_of([[1, 2] * 5] * 64), THREE: evaluation_of(spread(2)), SEVEN: evaluation_of(spread(4))}
TRADE_OFF = costs_of(
    {1: (10.0, 10.0), 8: (10.0, 10.0), 64: (10.0, 10.0)},
    resized1={1: (9.5, 9.5), 8: (10.0, 10.0), 64: (30.0, 30.0)},
    resized3={1: (11.0, 11.0), 8: (15.0, 15.0), 64: (50.0, 50.0)},
    whole7={1: (12.0, 12.0), 8: (40.0, 40.0), 64: (200.0, 200.0)},
)
"""Wide blocks become slow in large batches, as on a GPU when arithmetic instead of memory limits the products."""


def choices_of(costs: StepCosts) -> dict[int, Choice]:
    return {item.batch: item for item in choose(LENGTHS, costs, 0.95) if item.category is None}


def test_the_best_k_falls_with_the_batch_size_until_none_pays() -> None:
    found = choices_of(TRADE_OFF)
    assert [found[batch].best.candidate for batch in (1, 8, 64)] == [SEVEN, ONE, ONE]
    assert [found[batch].payoff for batch in (1, 8, 64)] == ["pays", "pays", DOES_NOT_PAY]
    assert found[1].best.speedup == pytest.approx((LENGTHS[SEVEN].total.counts.acceptance_len or 0) * 10 / 12)
    assert found[1].level == []


def test_one_candidate_that_may_pay_leaves_it_undecided() -> None:
    """The other candidate is certainly slower than plain decoding. The best has varying step times, so it may pay."""
    costs = costs_of({1: (10.0, 10.0, 10.0)}, resized1={1: (40.0, 40.0) * 3}, whole7={1: (30.0, 40.0, 50.0)})
    choice = choices_of(costs)[1]
    assert [item.payoff for item in choice.speedups] == ["undecided", DOES_NOT_PAY]
    assert choice.payoff == "undecided"
    assert batch_schedule([choice]) == [(1, 1, 7)]


def test_candidates_that_are_not_certainly_slower_are_level_with_the_best() -> None:
    """Two candidates have the same speed, with acceptance that differs between rows. A third is half as fast."""
    evaluations = {THREE: evaluation_of(spread(3, seed=1)), SEVEN: evaluation_of(spread(3, seed=2)), ONE: LENGTHS[ONE]}
    costs = costs_of({1: (10.0, 10.0)}, **{name: {1: (12.0, 12.0)} for name in ("resized3", "whole7", "resized1")})
    (choice, _) = choose(evaluations, costs, 0.95)
    assert {choice.best.candidate, *choice.ties} == {THREE, SEVEN}
    loose = costs_of(
        {1: (10.0, 10.0)}, resized3={1: (12.0, 12.0)}, whole7={1: (12.0, 12.0)}, resized1={1: (3.0, 12.0, 25.0)}
    )
    (choice, _) = choose(evaluations, loose, 0.95)
    assert ONE in (choice.best.candidate, *choice.ties), "its step times are too uncertain to call it slower"


def test_each_category_has_a_best_of_its_own() -> None:
    """Prompts of one category accept most of a wide block, prompts of the other category almost nothing."""
    wide = evaluation_of([[7] * 6 if index % 2 else [1] * 6 for index in range(32)], "ab")
    narrow = evaluation_of([[2, 1] * 3] * 32, "ab")
    costs = costs_of({1: (10.0, 10.0)}, whole7={1: (13.0, 13.0)}, resized1={1: (11.0, 11.0)})
    found = {item.category: item for item in choose({ONE: narrow, SEVEN: wide}, costs, 0.95)}
    assert found["b"].best.candidate == SEVEN
    assert found["a"].best.candidate == ONE
    assert found[None].best.candidate == SEVEN


def test_a_schedule_covers_every_batch_size_once() -> None:
    assert batch_schedule(list(choices_of(TRADE_OFF).values())) == [(1, 2, 7), (3, 22, 1), (23, 64, 0)]
    same = costs_of({1: (10.0, 10.0), 8: (10.0, 10.0)}, whole7={1: (11.0, 11.0), 8: (12.0, 12.0)})
    assert batch_schedule(list(choices_of(same).values())) == [(1, 8, 7)]


def test_neighbouring_batch_sizes_have_ranges_of_their_own() -> None:
    costs = costs_of(
        {1: (10.0, 10.0), 2: (10.0, 10.0)},
        whole7={1: (11.0, 11.0), 2: (99.0, 99.0)},
        resized1={1: (99.0, 99.0), 2: (11.0, 11.0)},
    )
    assert batch_schedule(list(choices_of(costs).values())) == [(1, 1, 7), (2, 2, 1)]


def test_one_k_for_all_batch_sizes_is_the_best_on_average() -> None:
    assert overall_best(list(choices_of(TRADE_OFF).values())) == ONE
    hopeless = costs_of({1: (1.0, 1.0)}, whole7={1: (99.0, 99.0)}, resized1={1: (99.0, 99.0)})
    assert overall_best(list(choices_of(hopeless).values())) is None


@pytest.mark.parametrize("other", [Candidate(3, "narrowed"), TREE], ids=["narrowed", "tree"])
def test_engines_get_resized_blocks_only(other: Candidate) -> None:
    evaluations = {**LENGTHS, other: LENGTHS[SEVEN]}
    times: dict[str, Mapping[int, Times]] = {other.name.replace("-", ""): {1: (1.0, 1.0)}}
    costs = costs_of({1: (10.0, 10.0)}, resized3={1: (9.0, 9.0)}, whole7={1: (30.0, 30.0)}, **times)
    (choice, _) = choose(evaluations, costs, 0.95)
    assert choice.best.candidate == other
    assert overall_best([choice]) == THREE
    assert batch_schedule([choice]) == [(1, 1, 3)]


@pytest.mark.parametrize(
    ("milliseconds", "verdict"),
    [((12.0, 12.0, 12.0), "pays"), ((15.0, 15.0, 15.0), "is level with it"), ((40.0, 40.0, 40.0), DOES_NOT_PAY)],
)
def test_a_tree_pays_where_it_is_faster_than_every_block(milliseconds: Times, verdict: str) -> None:
    """A block of 5 tokens per step in 10 ms, beside a tree of 7 or 8 tokens: 1.5 times as many."""
    evaluations = {SEVEN: evaluation_of(spread(5)), TREE: evaluation_of([[7, 8] * 5] * 64)}
    costs = costs_of({1: (9.0,) * 3, 8: (9.0,) * 3}, whole7={1: (10.0,) * 3, 8: (10.0,) * 3}, tree32={1: milliseconds})
    found = list(advice(choose(evaluations, costs, 0.95)))
    compared = [line for line in found if "times as fast as K 7" in line]
    assert len(compared) == 1  # the tree has no time at batch 8
    assert verdict in compared[0]


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """400 worlds of 64 prompts, each easy or hard, and 5 rounds of noisy times.

    If 95% of all intervals cover, one test run in 2,000 is outside 364 to 394. If 88% cover, one run in 30 is inside.
    """
    generator, covered = random.Random(5), 0
    truth = 2.5 * 10 / 14
    for _ in range(400):
        rows = [[generator.choice(kind) for _ in range(12)] for kind in generator.choices(((1, 2), (3, 4)), k=64)]
        plain, drafting = (tuple(ms * generator.gauss(1, 0.05) for _ in range(5)) for ms in (10.0, 14.0))
        evaluation = evaluation_of(rows, num_resamples=120)
        found = speedup(evaluation, costs_of({1: plain}, whole7={1: drafting}), SEVEN, None, 1, 0.95)
        assert found is not None
        assert found.interval is not None
        covered += found.interval.low <= truth <= found.interval.high
    assert 364 <= covered <= 394
