"""How often intervals cover the true value, in the simulated worlds of examples/benchmarks/interval_coverage.py."""

import argparse
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import interval_coverage as coverage
import verdict_rates
from dflash_cli.acceptance.intervals.acceptance_difference import MIN_UNEVEN
from dflash_cli.acceptance.intervals.enough_prompts import MIN_FOR_INTERVAL
from dflash_cli.acceptance.intervals.resampling import MIN_FREEDOM, linear_bounds, resampled_bounds
from dflash_cli.acceptance.intervals.student import student_quantile

SAMPLED = ("bimodal", "heavy", "loops")
DEFAULT = (("bimodal", 1), ("heavy", 5), ("loops", 5))
TWO_ERRORS = 1.0
"""Two standard errors of a share of 95% over 2,000 replications."""
FEW, MANY = (MIN_FOR_INTERVAL,), (128,)
"""Numbers of prompts. Intervals over few prompts are the hard case."""


def check_coverage(name: str, num_turns: int, counts: Iterable[int]) -> None:
    """Require that 93% to 97% of 2,000 intervals of confidence 95% cover the true value, within two standard errors."""
    options = argparse.Namespace(replications=2000, bootstrap=1000, methods=["widened"])
    for count in counts:
        (covered,) = coverage.measure(options, name, num_turns, count)
        assert 93 - TWO_ERRORS <= covered <= 97 + TWO_ERRORS, count


@pytest.mark.parametrize(
    ("name", "num_turns"),
    [
        pytest.param(name, num_turns, marks=() if (name, num_turns) in DEFAULT else pytest.mark.slow)
        for name in SAMPLED
        for num_turns in (1, 5)
    ],
)
def test_the_interval_covers_as_often_as_it_says(name: str, num_turns: int) -> None:
    """Intervals over five turns fail: they cover 65%. In `loops`, intervals over 32 prompts cover 85%."""
    check_coverage(name, num_turns, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("num_turns", [1, 5])
@pytest.mark.parametrize("name", sorted(coverage.WORLDS))
def test_the_interval_covers_as_often_as_it_says_everywhere(name: str, num_turns: int) -> None:
    check_coverage(name, num_turns, MANY if name in SAMPLED else FEW + MANY)


@pytest.mark.parametrize("name", ["bimodal", pytest.param("categories", marks=pytest.mark.slow)])
def test_the_interval_of_a_position_covers_as_often_as_it_says(name: str) -> None:
    options = argparse.Namespace(replications=1000, bootstrap=1000)
    for covered in coverage.measure_positions(options, name, MIN_FOR_INTERVAL):
        assert 93 <= covered <= 97


def test_the_script_prints_its_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--worlds", "even", "--prompts", "32", "--replications", "20", "--bootstrap", "50"]
    monkeypatch.setattr(coverage, "true_ratio", lambda *_: 2.8)
    monkeypatch.setattr(sys, "argv", ["interval_coverage.py", *arguments, "--methods", ",".join(coverage.METHODS)])
    assert coverage.main() == 0
    tables = [table.splitlines()[2:] for table in capsys.readouterr().out.strip().split("\n\n")]
    names = [[row.split("|")[1].partition(":")[0].strip() for row in table] for table in tables]
    assert names == [["even", "even"], [*coverage.METHODS], ["even"]]


def test_samples_that_may_lack_a_kind_miss_their_coverage() -> None:
    """The reason for MIN_FOR_INTERVAL: if 6% of answers loop, samples of 32 prompts often lack them."""
    options = argparse.Namespace(replications=500, bootstrap=500, methods=["widened"])
    assert coverage.measure(options, "loops", 1, 32)[0] < 91


def test_the_interval_of_the_progress_line_covers_as_often_as_it_says() -> None:
    options = argparse.Namespace(replications=2000, bootstrap=1, methods=["linear"])
    for name in ("bimodal", "heavy", "loops"):
        (covered,) = coverage.measure(options, name, 1, MIN_FOR_INTERVAL)
        assert 93 - TWO_ERRORS <= covered <= 97 + TWO_ERRORS, name


@pytest.mark.parametrize(
    ("name", "kind"), [("pareto-1.2", "unpaired"), ("pareto-1.2", "paired"), ("few-low", "unpaired")]
)
def test_equal_drafts_are_rarely_called_different(name: str, kind: str) -> None:
    """At most 5.5 of 100, within two standard errors of 600 replications. Student's t gives 14 in the first world."""
    assert verdict_rates.false_differences(coverage.WORLDS[name], 16, 600, kind)[0] <= 5.5 + 1.9


@pytest.mark.parametrize("name", ["few-low", pytest.param("loops", marks=pytest.mark.slow)])
def test_positions_of_equal_drafts_are_rarely_called_different(name: str) -> None:
    """Any position in at most 5.5 of 100, and 93 to 97 of 100 intervals cover, within two errors of 300 replications.

    If intervals are shown wherever 6 prompts differ, 98.8 of 100 cover at the last position.
    """
    called, lowest, highest = verdict_rates.false_positions(coverage.WORLDS[name], 96, 300)
    assert called <= 5.5 + 2.6
    assert 93 - 2.6 <= lowest <= highest <= 97 + 2.6


def test_falls_with_the_context_are_rarely_named_if_there_are_none() -> None:
    """In at most 5.5 of 100, within two standard errors of 400 replications. Without the correction: 10.0."""
    assert verdict_rates.false_falls(coverage.WORLDS["bimodal"], 64, 400, 5) <= 5.5 + 2.3


def test_the_script_of_verdicts_prints_its_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verdict_rates, "PROMPTS", (12, 48))
    monkeypatch.setattr(verdict_rates, "true_ratio", lambda *_: 2.9)
    assert verdict_rates.main(["--worlds", "even", "--replications", "20"]) == 0
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [len(table.splitlines()) for table in tables] == [8, 8, 5, 6, 6, 4]
    assert "| even | unpaired, 1 to 4 | called different | - |" in tables[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["paired", "unpaired", "unpaired, 1 to 4"])
@pytest.mark.parametrize("name", sorted(name for name, world in coverage.WORLDS.items() if world.repeats == 1))
def test_equal_drafts_are_rarely_called_different_everywhere(name: str, kind: str) -> None:
    counts = [count for count in verdict_rates.PROMPTS if count >= MIN_UNEVEN or "1 to" not in kind]
    for count in counts:
        wrong, covered = verdict_rates.false_differences(coverage.WORLDS[name], count, 2000, kind)
        assert wrong <= 5.5 + TWO_ERRORS, count
        assert math.isnan(covered) or 93 - TWO_ERRORS <= covered <= 97 + TWO_ERRORS, count


def _fixed(chance: coverage.Floats, *_: object) -> tuple[coverage.Floats, float]:
    return chance, 200.0


def test_the_interval_of_a_difference_covers_as_often_as_it_says() -> None:
    """Two drafts on the same prompts. The second is better, on each prompt by another amount."""
    world, rng = coverage.WORLDS["both"], np.random.default_rng(5)
    for count in (16, 64):
        shape, worlds = (2000, count), []
        chance, _ = world.draw(rng, shape)
        for gain in (0.0, 0.05):
            moved = np.clip(chance + gain + 0.05 * rng.normal(size=shape), 0.01, 0.99)
            fixed = replace(world, draw=partial(_fixed, moved))
            worlds.append(coverage.as_units(coverage.draw_counts(fixed, np.random.default_rng(7), shape, 1)))
        units = np.concatenate(worlds, axis=1)
        sums = units.sum(axis=(0, 2))
        truth = sums[1, 0] / sums[1, 1] - sums[0, 0] / sums[0, 1]
        assert 93 <= coverage.coverage(coverage.widened(units, 1000), truth) <= 97, count


def test_the_delta_method_agrees_with_the_bootstrap_for_many_units() -> None:
    units = coverage.as_units(coverage.draw_counts(coverage.WORLDS["both"], np.random.default_rng(1), (3, 600), 1))
    exact = resampled_bounds(units, confidence=0.9, num_resamples=8000, seed=0)
    width = exact[:, 1] - exact[:, 0]
    assert (np.abs(linear_bounds(units, confidence=0.9) - exact) < 0.08 * width[:, None]).all()


def test_cached_quantiles_are_plain_floats() -> None:
    """A NumPy number would reach JSON through the cache of another interval with the same degrees of freedom."""
    student_quantile.cache_clear()
    units = np.concatenate([np.full((1, 1, 20, 2), 1.0), np.ones((1, 1, 1, 2)) * [50.0, 1.0]], axis=2)
    linear_bounds(units, confidence=0.95)
    assert type(student_quantile(0.975, MIN_FREEDOM)) is float
    assert student_quantile.cache_info().hits == 1


def test_equal_units_have_an_interval_of_width_zero() -> None:
    units = np.broadcast_to(np.array([12.0, 4.0]), (1, 1, 20, 2))
    assert resampled_bounds(units, confidence=0.95, num_resamples=50, seed=0).tolist() == [[3.0, 3.0]]
