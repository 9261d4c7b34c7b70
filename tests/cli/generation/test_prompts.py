"""Rows of prompts: malformed rows are named by file and line, and samples are fair."""

import io
from typing import Any

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation.prompts import PromptRow, gather_rows, parse_rows, sample_rows
from dflash_runtime.errors import RequestError
from dflash_testing.refusals import refuses


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("{", {"field": None}),
        ("[]", {"field": None}),
        ("{}", {"id": "not-one-prompt", "found": []}),
        ('{"text": "x"}', {"id": "not-one-prompt", "found": ["text"]}),
        ('{"prompt": "x", "turns": ["y"]}', {"id": "not-one-prompt", "found": ["prompt", "turns"]}),
        ('{"prompt": 5}', {"field": "prompt", "found": 5, "expected": "a string"}),
        ('{"prompt_token_ids": []}', {"field": "prompt_token_ids", "found": []}),
        ('{"prompt_token_ids": [1, true]}', {"field": "prompt_token_ids", "found": [1, True]}),
        ('{"turns": "x"}', {"field": "turns", "found": "x", "expected": "a list of one or more strings"}),
        ('{"messages": [{"role": "user"}]}', {"field": "messages", "found": [{"role": "user"}]}),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(line: str, fields: dict[str, Any]) -> None:
    with refuses(RequestError, **fields) as caught:
        parse_rows(io.StringIO('{"prompt": "fine"}\n' + line), "rows.jsonl")
    assert caught.value.message.startswith("rows.jsonl:2: ")


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
