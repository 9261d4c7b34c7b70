"""The running acceptance length equals the result's, and its interval is close to the bootstrap interval."""

import random
import re

import pytest

from dflash_cli.acceptance.acceptance_progress import AcceptanceProgress, RunningAcceptance
from dflash_cli.acceptance.intervals.statistics import summarise
from dflash_cli.generation.answers import Answer, Event
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.token_meter import TokenMeter
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput


def output(index: int, lengths: list[int]) -> RequestOutput:
    return RequestOutput(
        index=index,
        prompt_token_ids=(1,),
        token_ids=(1,) * sum(lengths),
        finish_reason=FinishReason.LENGTH,
        acceptance_lengths=tuple(lengths),
        committed_lengths=tuple(lengths),
    )


def outputs(count: int) -> list[RequestOutput]:
    generator = random.Random(1)
    made = []
    for index in range(count):
        most = generator.choice([3, 5, 8])
        made.append(output(index, [generator.randint(1, most) for _ in range(generator.randint(5, 40))]))
    return made


def test_value_and_interval_agree_with_the_result() -> None:
    running = RunningAcceptance()
    made = outputs(64)
    for item in made:
        running.add(item, item.index)
    result = summarise(made, 7, num_resamples=4000)
    assert running.value == pytest.approx(result.counts.acceptance_len)
    exact = result.acceptance_len_interval
    assert exact is not None
    assert running.interval == pytest.approx((exact.low, exact.high), abs=0.15 * (exact.high - exact.low))


def test_a_value_needs_a_step_and_an_interval_needs_64_prompts() -> None:
    running = RunningAcceptance()
    assert (running.value, running.interval, running.text) == (None, None, "")
    running.add(output(0, []), 0)
    running.add(output(1, [1, 4]), 1)
    assert (running.interval, running.text) == (None, "2.50")
    for index in range(2, 64):
        running.add(output(index, [3, 4]), index)
    assert running.interval is None
    running.add(output(64, [3, 4]), 64)
    assert running.text.startswith("3.48 [")


def test_turns_of_one_conversation_are_one_unit() -> None:
    """Conversations of five turns have the same interval as one request per conversation with the summed steps."""
    by_turn, by_sum = RunningAcceptance(), RunningAcceptance()
    turns = outputs(60)
    for index, item in enumerate(turns):
        by_turn.add(item, index // 5)
    for index in range(12):
        lengths = [length for item in turns[5 * index : 5 * index + 5] for length in item.acceptance_lengths]
        by_sum.add(output(index, lengths), index)
    assert by_turn.interval == pytest.approx(by_sum.interval)


def test_a_resumed_run_counts_the_stored_answers(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [PromptRow(index=index, kind="prompt", value="x") for index in range(4)]
    answers = [Answer(row, 0, output(row.index, [2, 3]), "x") for row in rows]
    with AcceptanceProgress(4) as progress:
        progress.resume(answers[:3])
        progress._meter.SECONDS = 0.0
        progress(Event(rows[3], (1,), "x", answers[3]))
    assert re.match(r"4/4 prompts  acceptance 2\.50  \d+ tokens/s\n$", capsys.readouterr().err)


@pytest.mark.parametrize("max_new_tokens", [100, None])
def test_running_requests_move_the_bar(max_new_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four requests have 50 of 100 tokens: a quarter of the work, in 5 s, so 15 s are left."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    seconds = [0.0]
    rows = [PromptRow(index=index, kind="prompt", value="x") for index in range(4)]
    with TokenMeter(4, max_new_tokens, clock=lambda: seconds[0]) as meter:
        for second in range(1, 6):
            seconds[0] = float(second)
            for row in rows[:2]:
                meter.tell(Event(row, (7,) * 10, "x"), 0, lambda: "")
        seconds[0] += meter.REDRAW_S
        meter.tell(Event(rows[0], (), "x"), 0, lambda: "3.00")
        assert meter._display is not None
        (task,) = meter._display.tasks
        assert task.completed == (1.0 if max_new_tokens else 0.0)
        left = "  0:16 left" if max_new_tokens else ""
        assert task.description == f"0/4 prompts  acceptance 3.00  19 tokens/s{left}"
        meter.tell(Event(rows[0], (7,), "x", Answer(rows[0], 0, output(0, [2]), "x")), 1, lambda: "3.00")
        assert meter._display.tasks[0].completed == (1.5 if max_new_tokens else 1.0)


def test_a_prompt_is_one_conversation_under_all_conditions() -> None:
    progress = AcceptanceProgress(24)
    for index in range(24):
        condition = Condition(context_len=1000 * (1 + index // 12))
        row = PromptRow(index=index, kind="prompt", value="x", prompt_index=index % 12, condition=condition)
        progress(Event(row, (), None, Answer(row, 0, output(index, [2 + index % 12 % 3] * 10), "")))
    running = RunningAcceptance()
    for index in range(12):
        running.add(output(index, [2 + index % 3] * 20), index)
    assert running.text in progress.text
    assert re.findall(r"\d+", progress.text.replace(running.text, "")) == ["24", "24"]


def test_a_repeated_prompt_is_one_unit_of_the_progress() -> None:
    """Twelve rows of four prompts have no interval, like the result."""
    progress = AcceptanceProgress(12)
    for index in range(12):
        row = PromptRow(index=index, kind="prompt", value=str(index % 4))
        progress(Event(row, (), None, Answer(row, 0, output(index, [2 + index % 3] * 10), "")))
    assert "[" not in progress.text
