"""Prompts of an exact length: deterministic, without repetition, with the question at the end."""

from itertools import islice
from typing import Any

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.padding import count_tokens, filler, fit_row
from dflash_cli.generation.prompts import PromptRow
from dflash_cli.generation.tokenizer import Tokenizer, find_tokenizer
from dflash_runtime.errors import UsageError
from dflash_testing.refusals import refuses


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = find_tokenizer(tiny_directory() / "target")
    assert found is not None
    return found


def make_row(kind: str, value: Any) -> PromptRow:
    return PromptRow(index=0, kind=kind, value=value, where="rows.jsonl:1")


ROWS = {
    "prompt": ("prompt", "What is a fjord?"),
    "turns": ("turns", ["What is a fjord?", "And a skerry?"]),
    "messages": ("messages", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is it?"}]),
}


def test_no_sentence_comes_twice_and_a_seed_is_a_text() -> None:
    sentences = list(islice(filler("a"), 5000))
    assert len({item.strip() for item in sentences}) == 5000
    assert sentences[:50] == list(islice(filler("a"), 50)) != list(islice(filler("b"), 50))
    assert all(item.rstrip().endswith(".") for item in sentences)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("length", [60, 128, 300, 1024, 4096])
def test_a_prompt_gets_the_length_that_was_asked_for(name: str, length: int, tokenizer: Tokenizer) -> None:
    row = make_row(*ROWS[name])
    padded = fit_row(row, length, tokenizer, chat=True)
    assert padded is not None
    assert count_tokens(padded, tokenizer, chat=True) == length


def test_the_question_stays_last_and_the_rest_as_it_was(tokenizer: Tokenizer) -> None:
    prompt, turns, messages = (fit_row(make_row(*ROWS[name]), 500, tokenizer, chat=True) for name in ROWS)
    assert prompt is not None
    assert turns is not None
    assert messages is not None
    assert prompt.value.endswith("End of the log book.\n\nWhat is a fjord?")
    assert turns.value[0].endswith("\n\nWhat is a fjord?")
    assert turns.value[1] == "And a skerry?"
    assert messages.value[0] == {"role": "system", "content": "Be brief."}
    assert messages.value[1]["content"].endswith("\n\nWhat is it?")


def test_a_longer_filler_goes_on_where_a_shorter_one_ends(tokenizer: Tokenizer) -> None:
    row = make_row(*ROWS["prompt"])
    short, long = (fit_row(row, length, tokenizer, chat=False) for length in (400, 900))
    assert short is not None
    assert long is not None
    assert long.value.startswith(short.value.partition("End of the log book.")[0])


@pytest.mark.parametrize("missing", [*range(1, 40), 61, 127])
def test_every_small_number_of_missing_tokens_is_reached(missing: int, tokenizer: Tokenizer) -> None:
    """Even one token, which no frame around the filler leaves room for."""
    row = make_row(*ROWS["prompt"])
    length = count_tokens(row, tokenizer, chat=False) + missing
    padded = fit_row(row, length, tokenizer, chat=False)
    assert padded is not None
    assert count_tokens(padded, tokenizer, chat=False) == length
    assert padded.value.endswith("What is a fjord?")


@pytest.mark.parametrize("text", ["word " * 500, "峡湾是被海水淹没的冰川谷。" * 60, "naïve café " * 90])
@pytest.mark.parametrize("length", [7, 50, 128])
def test_a_longer_prompt_keeps_its_end(text: str, length: int, tokenizer: Tokenizer) -> None:
    """A Chinese character is several tokens here, so a cut alone rarely gives the number."""
    row = make_row("prompt", f"{text} What is a fjord?")
    cut = fit_row(row, length, tokenizer, chat=False)
    assert cut is not None
    assert count_tokens(cut, tokenizer, chat=False) == length
    assert cut.value.endswith("fjord?")


def test_a_cut_keeps_the_system_message(tokenizer: Tokenizer) -> None:
    kind, (system, _) = ROWS["messages"]
    row = make_row(kind, [system, {"role": "user", "content": "word " * 500 + "What is it?"}])
    cut = fit_row(row, 100, tokenizer, chat=True)
    assert cut is not None
    assert cut.value[0] == system
    assert cut.value[1]["content"].endswith("word What is it?")
    assert count_tokens(cut, tokenizer, chat=True) == 100


def test_a_prompt_whose_template_is_longer_is_left_out(tokenizer: Tokenizer) -> None:
    assert fit_row(make_row(*ROWS["messages"]), 2, tokenizer, chat=True) is None


def test_a_prompt_without_text_of_the_user_is_refused(tokenizer: Tokenizer) -> None:
    with refuses(UsageError, "padding-needs-text", field="--context-lengths", found="prompt_token_ids"):
        fit_row(make_row("prompt_token_ids", [1, 2]), 100, tokenizer, chat=False)
    with refuses(UsageError, "padding-needs-text", field="--context-lengths", found="messages"):
        fit_row(make_row("messages", [{"role": "system", "content": "x"}]), 300, tokenizer, chat=False)
