"""`dflash bench`: counts, refusals, and the same prompts for both arms."""

import json
import re
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dflash_cli.acceptance.intervals.statistics import Interval
from dflash_cli.commands.bench import _doubts, _headline, _rows
from dflash_cli.tuning.batch_speeds import BatchSpeed, Speed, TreeSpeed, check_speedup
from dflash_cli.tuning.speed import SpeedRequest, measure_speeds
from dflash_cli.tuning.step_parts import StepParts
from dflash_runtime.documents import to_json
from dflash_runtime.errors import GateFailed, RequestError, UsageError
from dflash_testing.pairs import bundled_draft_model, bundled_llm, bundled_prompts
from dflash_testing.raised_errors import run_or_raise
from dflash_testing.refusals import refuses

SMALL = ["--concurrency", "2,1", "-n", "24", "--rounds", "2", "--device", "cpu"]


run = partial(run_or_raise, "bench")


def test_every_batch_size_is_measured_in_the_order_given() -> None:
    document = json.loads(run("tiny", *SMALL, "--rivals", "suffix", "--tree", "24", "--json").stdout)
    assert document["kind"] == "bench"
    assert [item["batch"] for item in document["batches"]] == [2, 1]
    assert document["num_speculative_tokens"] == 7
    assert document["num_prompts"] == 4
    assert document["prompts"]["name"] == "bundled"
    assert document["measured"]["max_num_requests"] == 1
    for item in document["batches"]:
        assert item["plain"]["tokens_per_step"] == pytest.approx(1)
        assert 1.5 < item["speculative"]["tokens_per_step"] <= 8
        for arm in ("plain", "speculative"):
            speed = item[arm]
            expected = 1000 * item["batch"] * speed["tokens_per_step"] / speed["step_ms"]
            assert speed["tokens_per_second"] == pytest.approx(expected)
        gain = item["speculative"]["tokens_per_second"] / item["plain"]["tokens_per_second"]
        assert item["speedup"] == pytest.approx(gain)
        assert item["adaptive"] is None, "widths adapt where steps are CUDA graphs"
        parts = item["parts"]
        assert {"draft_ms", "verify_ms", "rest_ms"} <= parts.keys()
        assert parts["draft_ms_interval"]["low"] < parts["draft_ms"] < parts["draft_ms_interval"]["high"]
        assert item["speedup_interval"]["low"] < item["speedup"] < item["speedup_interval"]["high"]
        assert item["plain"]["step_ms_interval"] is not None
        (rival,) = item["rivals"]
        assert rival["name"] == "suffix"
        assert 1 <= rival["speed"]["tokens_per_step"] <= 8
        rates = [item[arm]["tokens_per_second"] for arm in ("speculative", "plain")]
        own = rival["speed"]["tokens_per_second"]
        assert [rival["lead"], rival["speedup"]] == pytest.approx([rates[0] / own, own / rates[1]])
        assert rival["lead_interval"]["low"] < rival["lead"] < rival["lead_interval"]["high"]
        (tree,) = item["trees"]
        assert tree["num_nodes"] == 24
        assert item["speculative"]["tokens_per_step"] < tree["speed"]["tokens_per_step"] <= 8
        own = tree["speed"]["tokens_per_second"]
        assert [tree["gain"], tree["speedup"]] == pytest.approx([own / rate for rate in rates])
        assert tree["gain_interval"]["low"] < tree["gain"] < tree["gain_interval"]["high"]


def test_text_leads_with_the_speedup() -> None:
    lines = run("tiny", "--concurrency", "1", "-n", "12", "--rounds", "1", "--device", "cpu").stdout.splitlines()
    assert lines[0].startswith("speedup by drafting: ")
    assert lines[0].endswith(" at batch 1")
    assert [line.split()[:3] for line in (lines[-8], lines[-5], lines[-2])] == [
        ["batch", "plain", "tokens/s"], ["batch", "plain", "ms"], ["batch", "draft", "ms"],
    ]  # fmt: skip
    assert [line.split()[0] for line in (lines[-7], lines[-4], lines[-1])] == ["1", "1", "1"]
    assert max(map(len, lines[-8:])) <= 80
    assert "[" not in "".join(lines), "one round has no interval"


def test_tokens_a_step_are_the_engines_acceptance() -> None:
    """`generate` answers the same prompt. The window has all its steps except the last, which ends the round."""
    prompt = bundled_prompts()[3]
    llm = bundled_llm(bundled_draft_model(), 7)
    request = SpeedRequest(prompts=[prompt], batches=[1], max_new_tokens=24, num_rounds=1)
    (speed,) = measure_speeds(llm.pair, request)
    from dflash_runtime.scheduling.sampling_params import SamplingParams

    (output,) = llm.generate([prompt], SamplingParams(max_new_tokens=24, ignore_eos=True))
    assert speed.speculative.tokens_per_step == pytest.approx(23 / len(output.committed_lengths), rel=0.35)


def test_prompts_are_taken_in_turns() -> None:
    request = SpeedRequest(prompts=[[1], [2], [3]], batches=[2], max_new_tokens=8, num_rounds=2)
    assert request.rounds(2) == [[[1], [2]], [[3], [1]]]
    llm = bundled_llm(bundled_draft_model(), 7)
    assert request.num_runs(llm.pair) == 12


def test_progress_counts_every_round() -> None:
    seen: list[int] = []
    llm = bundled_llm(bundled_draft_model(), 7)
    request = SpeedRequest(prompts=bundled_prompts()[:2], batches=[1, 2], max_new_tokens=16, num_rounds=1)
    list(measure_speeds(llm.pair, request, seen.append))
    assert seen == list(range(1, request.num_runs(llm.pair) + 1))


class Slow:
    """A model with a forward that takes 15 ms more."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def logits(self, *arguments: Any) -> Any:
        time.sleep(0.015)
        return self._model.logits(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        time.sleep(0.015)
        return self._model(*arguments)


@pytest.mark.parametrize("name", ["draft", "target"])
def test_a_part_of_a_step_is_the_time_of_its_model(name: str) -> None:
    llm = bundled_llm(bundled_draft_model(), 7)
    slow: dict[str, Any] = {name: Slow(getattr(llm.pair, name))}
    request = SpeedRequest(prompts=bundled_prompts()[:1], batches=[1], max_new_tokens=12, num_rounds=1)
    (speed,) = measure_speeds(replace(llm.pair, **slow), request)
    assert speed.parts is not None
    slower, other = (speed.parts.draft_ms, speed.parts.verify_ms)[:: 1 if name == "draft" else -1]
    assert slower > 10
    assert other + speed.parts.rest_ms < speed.speculative.step_ms - 10


def test_parts_of_a_step_add_up() -> None:
    parts = StepParts.of_steps([9.0, 11.0], [8.0, 8.0], [2.0, 4.0])
    assert (parts.draft_ms, parts.verify_ms, parts.rest_ms, parts.adds_up) == (2.0, 7.0, 1.0, True)
    assert parts.draft_ms_interval is not None
    assert parts.draft_ms_interval.high == pytest.approx(2 + 12.7062 * 1)
    assert parts.verify_ms_interval is not None
    assert parts.verify_ms_interval.low == parts.verify_ms_interval.high == 7
    assert StepParts.of_steps([10.0], [8.0], [3.0]).draft_ms_interval is None


@pytest.mark.parametrize("times", [([51.0], [20.0], [14.0]), ([10.0], [11.0], [3.0])])
def test_parts_that_exceed_the_step_are_named(times: tuple[list[float], ...]) -> None:
    """Draft 31 and verify 37 of a step of 51, and a step that is slower without its draft."""
    parts = StepParts.of_steps(*times)
    assert not parts.adds_up
    (notice,) = _doubts([replace(speeds(1.5)[0], parts=parts)])
    assert notice.id == "parts-do-not-add-up"


def test_each_tree_is_measured_once_and_has_a_row_and_the_best_a_headline() -> None:
    (speed,) = speeds(1.5)
    trees = tuple(
        TreeSpeed(num_nodes=number, speed=speed.speculative, speedup=1.5 * gain, gain=gain)
        for number, gain in ((8, 0.9), (16, 1.2), (32, 1.1))
    )
    shown = replace(speed, trees=trees)
    assert [row[0] for row in _rows(shown)] == ["1", "1 tree 8", "1 tree 16", "1 tree 32"]
    assert re.findall(r"[\d.]+", _headline([shown]).split("\n")[1]) == ["1.20", "1", "16"]
    llm = bundled_llm(bundled_draft_model(), 7)
    request = SpeedRequest(prompts=[[1]], batches=[1], max_new_tokens=8, num_rounds=1, trees=[8, 16])
    assert request.num_runs(llm.pair) == 12, "6 arms, each with a warm-up round"
    sampling = replace(llm.pair, config=replace(llm.pair.config, draft_sampling="probabilistic"))
    with refuses(UsageError, "tree-of-sampled-drafts", field="draft_sampling"):
        next(measure_speeds(sampling, request))


def test_adaptive_width_and_a_row_budget_have_rows_of_their_own() -> None:
    (fixed,) = speeds(1.5)
    adaptive, budget = (replace(fixed.speculative, tokens_per_second=rate) for rate in (300.0, 400.0))
    speed = replace(fixed, adaptive=adaptive, budget=budget)
    assert [row[0] for row in _rows(speed)] == ["1", "1 adaptive", "1 budget"]
    assert [row[3] for row in _rows(speed)] == ["1.50", "3.00", "4.00"]
    assert (to_json(speed)["adaptive_speedup"], to_json(speed)["budget_speedup"]) == (3, 4)
    assert len(_rows(fixed)) == 1


def speeds(*gains: float) -> list[BatchSpeed]:
    def at(tokens: float) -> Speed:
        return Speed(tokens_per_second=tokens, step_ms=1.0, tokens_per_step=1.0)

    return [BatchSpeed(batch=batch, plain=at(100), speculative=at(100 * gain)) for batch, gain in enumerate(gains, 1)]


def test_the_gate_names_the_batch_that_gains_least() -> None:
    check_speedup(speeds(1.6, 1.5), 1.5)
    with refuses(GateFailed) as caught:
        check_speedup(speeds(1.6, 1.2, 1.4), 1.5)
    assert caught.value.exit_code == 3
    assert re.findall(r"[\d.]+", caught.value.message) == ["1.20", "2", "1.5"], "the speed-up, its batch, the gate"


def test_a_speedup_that_chance_may_explain_is_a_warning() -> None:
    (sure,) = speeds(1.6)
    unsure = replace(sure, speedup_interval=Interval(1.2, 2.1, 0.95))
    assert check_speedup([sure], 1.5) is None
    found = check_speedup([unsure], 1.5)
    assert found is not None
    assert found.id == "speedup-uncertain"
    with refuses(UsageError, field="--rounds", found=1):
        run("tiny", "--rounds", "1", "--min-speedup", "1.1")


def test_impossible_measurements_are_refused() -> None:
    with refuses(UsageError, field="--concurrency", found="x"):
        run("tiny", "--concurrency", "1,x")
    with refuses(UsageError, field="--num-speculative-tokens", found=0):
        run("tiny", "-k", "0")
    llm = bundled_llm(bundled_draft_model(), 7)
    short = SpeedRequest(prompts=bundled_prompts()[:1], batches=[1], max_new_tokens=2, num_rounds=1)
    with refuses(UsageError) as caught:
        list(measure_speeds(llm.pair, short))
    assert caught.value.hint is not None
    assert "-n" in caught.value.hint.split()
    long = SpeedRequest(prompts=[list(range(2000)) * 2], batches=[1], max_new_tokens=8, num_rounds=1)
    with refuses(RequestError, "prompt-too-long", field="prompt_token_ids", found=4000):
        list(measure_speeds(llm.pair, long))
