"""Conditions of a run: their options, their names, and the digests of prompts under them."""

from dataclasses import replace

import pytest

from dflash_cli.generation.conditions import make_conditions, parse_tokens
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.errors import UsageError
from dflash_testing.refusals import refuses


def names(thinking: str = "", lengths: str = "", **options: object) -> list[str]:
    settings = {"with_plain": False, "template_options": None} | options
    words, sizes = thinking.split(",") if thinking else (), [parse_tokens(text) for text in lengths.split(",") if text]
    made = make_conditions(words, sizes, **settings)  # type: ignore[arg-type]
    return [item.name for item in made]


def test_every_combination_is_a_condition_and_those_without_a_draft_come_last() -> None:
    assert names() == []
    assert names("on,off") == ["thinking on", "thinking off"]
    assert names("off", "1k,500") == ["thinking off, 1k", "thinking off, 500"]
    drafted, plain = names("on", with_plain=True)
    assert plain.startswith(f"{drafted}, ")
    assert names(with_plain=True) == ["", plain.removeprefix(f"{drafted}, ")]


def test_lengths_are_tokens_and_a_k_is_1024() -> None:
    assert [parse_tokens(text) for text in ("1k", "4K", "500")] == [1024, 4096, 500]


@pytest.mark.parametrize("text", ["", "k", "1.5k", "x"])
def test_texts_that_are_not_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_tokens(text)


def test_a_condition_given_twice_is_refused() -> None:
    with refuses(UsageError, field="--thinking"):
        names("on,on")
    with refuses(UsageError, field="--context-lengths"):
        names("on", "1k,1024")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (None, {"enable_thinking": True}),
        ('{"thinking": "$thinking", "date": "today"}', {"thinking": True}),
        ("not JSON", {"enable_thinking": True}),
    ],
)
def test_a_template_may_call_the_switch_something_else(options: str | None, expected: dict[str, object]) -> None:
    (made,) = make_conditions(("on",), (), with_plain=False, template_options=options)
    assert made.template_options == expected


def test_other_levels_of_thinking_are_passed_to_the_template() -> None:
    made = make_conditions(("low", "high"), (), with_plain=False, template_options='{"reasoning_effort": "$thinking"}')
    assert [item.template_options for item in made] == [{"reasoning_effort": "low"}, {"reasoning_effort": "high"}]


def test_a_prompt_has_another_digest_under_each_condition() -> None:
    row = PromptRow(index=0, kind="prompt", value="x")
    made = make_conditions(("on", "off"), (), with_plain=True, template_options=None)
    assert len({row.digest, *(replace(row, condition=item).digest for item in made)}) == 5
