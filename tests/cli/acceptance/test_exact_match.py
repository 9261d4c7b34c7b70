"""The final number of an answer: where it is found, when it equals the reference, with a draft and without."""

import re
from decimal import Decimal

import pytest

from dflash_cli.acceptance.exact_match import final_number, parse_number, score
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.conditions import Condition
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 boats need 9 oars.", 9),
        ("9 oars, which is \\boxed{12} as 3 x 4", 12),
        ("\\boxed{1} no, \\boxed{\\$1,234.50}", Decimal("1234.5")),
        ("first 7\n#### 18\nand 2 more", 18),
        ("it falls by -4 degrees", -4),
        ("<think>it is 5, or \\boxed{6}</think>It is 7.", 7),
        ("1,000,000", 1_000_000),
        ("\\boxed{x} is 3", 3),
        ("no number", None),
        ("", None),
    ],
)
def test_the_final_number_is_found(text: str, number: object) -> None:
    assert final_number(text) == number


def test_a_reference_is_a_number_and_nothing_else() -> None:
    assert parse_number(" 1,200 ") == 1200 == parse_number("1200.0")
    assert parse_number("3 boats") is parse_number(None) is parse_number("") is None


def answer(index: int, text: str, condition: Condition | None = None, *, reference: str | None = "9") -> Answer:
    row = PromptRow(
        index=index + 100 * (condition is not None), kind="prompt", value=f"x{index}", reference=reference,
        condition=condition, prompt_index=index,
    )  # fmt: skip
    output = RequestOutput(
        index=row.index,
        prompt_token_ids=(1,),
        token_ids=tuple(text.encode()),
        finish_reason=FinishReason.LENGTH if text.endswith("...") else FinishReason.STOP,
    )
    return Answer(row, 0, output, text)


PLAIN = Condition(is_plain=True)


def test_answers_with_and_without_a_draft_are_paired_by_prompt() -> None:
    drafted = [answer(0, "9"), answer(1, "9"), answer(2, "8..."), answer(3, "9"), answer(4, "9", reference=None)]
    plain = [answer(0, "9", PLAIN), answer(1, "7", PLAIN), answer(2, "9", PLAIN)]
    (found,) = score([*drafted, *plain], 0.95)
    assert (found.condition, found.num_scored, found.num_correct, found.num_cut) == (None, 4, 3, 1)
    assert found.plain is not None
    assert (found.plain.num_pairs, found.plain.num_correct, found.plain.num_same_text) == (3, 2, 1)
    assert (found.plain.num_only_draft, found.plain.num_only_plain, found.plain.p_value) == (1, 1, 1.0)
    numbers = re.findall(r"[\d.]+", found.lines[0])
    assert (numbers[0], numbers[-3:]) == ("75.0", ["3", "4", "1"])
    assert all(len(line) <= 100 for line in found.lines)


def test_each_condition_is_scored_and_paired_alone() -> None:
    thinking = {
        (word, is_plain): Condition(thinking=word, is_plain=is_plain)
        for word in ("on", "off")
        for is_plain in (False, True)
    }
    answers = [
        answer(0, "9", thinking["on", False]), answer(0, "8", thinking["on", True]),
        answer(0, "8", thinking["off", False]), answer(0, "9", thinking["off", True]),
    ]  # fmt: skip
    on, off = score(answers, 0.95)
    assert (on.condition, on.num_correct, off.condition, off.num_correct) == ("thinking on", 1, "thinking off", 0)
    assert on.plain is not None
    assert off.plain is not None
    assert (on.plain.num_only_draft, off.plain.num_only_plain) == (1, 1)


def test_a_share_of_few_prompts_has_no_interval() -> None:
    """Like an acceptance length, from 64 distinct prompts on. A repeated prompt counts once."""
    for number, has_interval in ((2, False), (63, False), (64, True)):
        drafted, plain = (
            [answer(index, "98"[(index + place) % 2], condition) for index in range(number)]
            for place, condition in enumerate((None, PLAIN))
        )
        (found,) = score([*drafted, *plain], 0.95)
        assert found.plain is not None
        intervals = (found.interval, found.plain.interval)
        assert [item is not None for item in intervals] == [has_interval] * 2
        assert getattr(found.no_interval, "id", None) == (None if has_interval else "too-few-prompts")
    (found,) = score([answer(index % 4, "9") for index in range(32)], 0.95)
    assert (found.num_scored, found.interval) == (4, None)


def test_the_difference_of_two_shares_needs_more_prompts_than_a_share() -> None:
    """Newcombe's interval covers 99 of 100 if 4 of 64 answers change, and 97 of 100 from 200 prompts on."""
    for number, has_interval in ((199, False), (200, True)):
        drafted, plain = ([answer(index, "9", condition) for index in range(number)] for condition in (None, PLAIN))
        (found,) = score([*drafted, *plain], 0.95)
        assert found.plain is not None
        assert found.plain.interval is not None
        assert (found.plain.difference_interval is not None) == has_interval


def test_without_references_nothing_is_scored() -> None:
    assert score([answer(0, "9", reference=None), answer(1, "9", reference="nine")], 0.95) == ()
