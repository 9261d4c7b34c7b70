"""The prompts of waiting hand-offs, and the notes of their rows."""

from dataclasses import replace
from typing import Any

import pytest

from dflash_cli.handoff.handing import Handing
from dflash_testing.transfers import make_handoff


def handing(*notes: dict[str, Any]) -> Handing:
    waiting = [replace(make_handoff(f"{number:05}", number), note=note).header for number, note in enumerate(notes)]
    return Handing(place="folder", is_folder=True, waiting=tuple(waiting))


def test_rows_keep_their_numbers_ids_and_categories() -> None:
    found = handing({"index": 7, "id": "b", "category": "code"}, {"index": 2, "id": 1, "category": None}).prompts
    assert found is not None
    assert [(row.index, row.id, row.category, row.where) for row in found.rows] == [
        (2, 1, None, "folder/00001"),
        (7, "b", "code", "folder/00000"),
    ]
    assert found.rows[0].value == [1, 2, 3]


@pytest.mark.parametrize("note", [{}, {"index": 7}, {"index": [7], "id": None, "category": None}, {"server": "x"}])
def test_rows_are_numbered_anew_with_a_note_of_another_program(note: dict[str, Any]) -> None:
    found = handing({"index": 7, "id": "b", "category": "code"}, note).prompts
    assert found is not None
    assert [(row.index, row.id, row.category) for row in found.rows] == [(0, "b", "code"), (1, None, None)]


def test_rows_with_one_number_are_numbered_anew() -> None:
    same = {"index": 7, "id": None, "category": None}
    found = handing(same, same).prompts
    assert found is not None
    assert [row.index for row in found.rows] == [0, 1]
