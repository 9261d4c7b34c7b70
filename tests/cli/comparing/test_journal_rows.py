"""Rows of our own answer files, read as a measured result."""

from pathlib import Path
from typing import Any

import pytest

from dflash_cli.comparing.measured_result import MeasuredResult
from dflash_cli.comparing.result_comparison import compare_results
from dflash_runtime.errors import UsageError
from dflash_testing.refusals import refuses
from dflash_testing.result_samples import lines, read


def test_rows_of_an_interrupted_run_are_read_without_a_cut_off_last_line(tmp_path: Path) -> None:
    """Rows of a release without verify widths. A later line about a turn replaces an earlier line."""
    head = {"schema_version": 1, "kind": "answers", "settings": {"num_speculative_tokens": 3}}
    row = {
        "index": 0, "turn": 0, "digest": "d", "category": None, "prompt_token_ids": [1, 2], "token_ids": [3],
        "text": "a", "finish_reason": "length",
    }  # fmt: skip
    first, second, again = (
        row | {"turn": turn, "acceptance_lengths": lengths, "committed_lengths": lengths}
        for turn, lengths in ((0, [1, 1]), (1, [4]), (0, [3, 2]))
    )
    text = lines(head, first, second, again) + '{"index": 1, "tu'
    result = read(tmp_path, text)
    assert [(item.name, item.num_tokens, item.num_steps) for item in result.conversations] == [("prompt 1", 9, 3)]
    assert result.counts is not None
    assert (result.counts.per_pos_accepted, result.acceptance_len) == ([3, 2, 1], 3.0)


def test_a_setting_that_only_one_file_of_answers_states_is_a_difference(tmp_path: Path) -> None:
    """A run states some settings only if they are chosen. Another release may lack a setting for another reason."""
    row = {
        "index": 0, "turn": 0, "digest": "d", "category": None, "prompt_token_ids": [1, 2], "token_ids": [3],
        "text": "a", "finish_reason": "length", "acceptance_lengths": [1], "committed_lengths": [1],
    }  # fmt: skip

    def with_settings(name: str, **settings: Any) -> MeasuredResult:
        (tmp_path / name).mkdir()
        head = {"schema_version": 1, "kind": "answers", "settings": {"num_speculative_tokens": 3, **settings}}
        return read(tmp_path / name, lines(head, row))

    plain = with_settings("plain", dflash="1")
    chosen = with_settings("chosen", dflash="1", kv_dtype="fp8", num_tree_nodes=8, seed=None)
    older = with_settings("older", dflash="0", num_tree_nodes=8, rounding="int4")
    found = compare_results([plain, chosen, older])
    trees = {"num_tree_nodes": (None, 8)}
    assert [item.unlike for item in found] == [{"kv_dtype": ("auto", "fp8"), **trees}, trees]


@pytest.mark.parametrize(
    ("changes", "id", "field"),
    [
        ({"turn": "0"}, "wrong-value", "turn"),
        ({"acceptance_lengths": [1.5]}, "wrong-value", "acceptance_lengths[0]"),
        ({"accepted": []}, "unknown-key", "accepted"),
    ],
)
def test_a_malformed_row_is_refused_with_its_line_and_field(
    changes: dict[str, Any], id: str, field: str, tmp_path: Path
) -> None:
    head = {"schema_version": 1, "kind": "answers", "settings": {"num_speculative_tokens": 3}}
    row = {
        "index": 0, "turn": 0, "digest": "d", "category": None, "prompt_token_ids": [1, 2], "token_ids": [3],
        "text": "a", "finish_reason": "length", "acceptance_lengths": [1], "committed_lengths": [1],
    }  # fmt: skip
    with refuses(UsageError, id, field=field, path=f"{tmp_path / 'result'}:3"):
        read(tmp_path, lines(head, row, row | changes))
