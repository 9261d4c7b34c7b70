"""Rows of prompts: what is malformed is named by file and line, and a sample of them is a fair one."""

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.prompts import PromptRow, gather_rows, parse_rows, sample_rows
from dflash_runtime.errors import RequestError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "found a JSON list, expected an object"),
        ("{}", "found nothing, expected exactly one of prompt"),
        ('{"text": "x"}', "found text, expected exactly one of"),
        ('{"prompt": "x", "turns": ["y"]}', "found prompt and turns"),
        ('{"prompt": 5}', "prompt: found 5, expected a string"),
        ('{"prompt_token_ids": []}', "prompt_token_ids: found \\[\\], expected a list of one or more ids"),
        ('{"prompt_token_ids": [1, true]}', "expected a list of one or more ids"),
        ('{"turns": "x"}', "turns: found .x., expected a list of one or more strings"),
        ('{"messages": [{"role": "user"}]}', "expected a list of objects with role and content"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(line: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"rows.jsonl:2: .*{message}"):
        parse_rows(['{"prompt": "fine"}', line], "rows.jsonl")


def test_a_sample_is_drawn_from_each_category_and_is_part_of_a_larger_one() -> None:
    rows = gather_rows([], str(tiny_directory() / "prompts.jsonl"))
    for count in (4, 12, 40, 64):
        sample = sample_rows(rows, count, seed=0)
        names = [row.category for row in sample]
        assert {names.count(name) for name in set(names)} == {count // 4}
        assert [row.index for row in sample] == sorted(row.index for row in sample)
        larger = sample_rows(rows, count + 3, seed=0)
        assert {row.index for row in sample} <= {row.index for row in larger}
    assert sample_rows(rows, 12, seed=0) == sample_rows(rows, 12, seed=0) != sample_rows(rows, 12, seed=1)
    uneven = [PromptRow(index=n, kind="prompt", value=str(n), category="a" if n < 90 else None) for n in range(100)]
    assert [row.category for row in sample_rows(uneven, 20, seed=3)].count(None) == 2
