"""The file of answers: lines are only added, other experiments are refused, and failed answers are not stored."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.acceptance.journal import HINTS, Journal
from dflash_cli.generation.answers import Answer
from dflash_cli.generation.prompts import PromptRow
from dflash_runtime.errors import MISSING, UsageError
from dflash_runtime.scheduling.request import FinishReason
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_testing.refusals import refuses

SETTINGS = {"draft_digest": "a", "seed": 0}
ROWS = [PromptRow(index=index, kind="prompt", value=f"prompt {index}") for index in range(4)]
TURNS = PromptRow(index=4, kind="turns", value=["one", "two"])


def answer(row: PromptRow, turn: int = 0, *, error: str | None = None, token: int = 7) -> Answer:
    output = RequestOutput(
        index=row.index,
        prompt_token_ids=(1,),
        token_ids=() if error else (token,),
        finish_reason=FinishReason.ERROR if error else FinishReason.STOP,
        acceptance_lengths=() if error else (2,),
        committed_lengths=() if error else (1,),
        error=error,
    )
    return Answer(row, turn, output, None if error else "x")


def keep(path: Path, answers: list[Answer], rows: list[PromptRow], settings: Any = SETTINGS) -> Journal:
    """Add answers to a new or an existing file."""
    with Journal(path, settings, rows, resume=True) as journal:
        for item in answers:
            journal.add(item)
    return journal


def test_the_first_line_has_kind_version_and_settings(tmp_path: Path) -> None:
    keep(tmp_path / "rows.jsonl", [], ROWS)
    first = json.loads((tmp_path / "rows.jsonl").read_text())
    assert first == {"settings": SETTINGS, "schema_version": 1, "kind": "answers"}


def test_a_smaller_run_deletes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [answer(row) for row in ROWS], ROWS)
    before = path.read_bytes()
    smaller = keep(path, [], ROWS[:2])
    assert [item.row.index for item in smaller.answers] == [0, 1]
    assert path.read_bytes() == before
    other = keep(path, [answer(TURNS, 0), answer(TURNS, 1)], [TURNS])
    assert len(other.answers) == 2
    assert path.read_bytes().startswith(before)
    assert [item.row.index for item in keep(path, [], [*ROWS, TURNS]).answers] == [0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_a_line_that_was_cut_off_is_asked_again(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [answer(row) for row in ROWS], ROWS)
    data = path.read_bytes()
    whole = data[: data[:-cut].rfind(b"\n") + 1]
    path.write_bytes(data[:-cut])
    journal = keep(path, [answer(ROWS[3])], ROWS)
    assert len(journal.answers) == 4
    assert path.read_bytes() == data
    assert data.startswith(whole)


@pytest.mark.parametrize("length", range(0, 15, 2))
def test_a_first_line_that_was_cut_off_is_written_again(length: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [], ROWS)
    first = path.read_bytes()
    path.write_bytes(first[:length])
    keep(path, [], ROWS)
    assert path.read_bytes() == first


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("mine", None),
        ("mine\n", None),
        ("[]\n", None),
        ('{"index": 0}\n', "schema_version"),
        ('{"schema_version": 1, "kind": "lock"}\n', "kind"),
        ('{"schema_version": 1, "kind": "answers", "settings": []}\n', "settings"),
        ('{"schema_version": 1, "kind": "answers", "settings": {}, "seed": 1}\n', "seed"),
        ('{"settings": ' * 100_000, None),
    ],
)
def test_another_file_is_refused_and_not_changed(content: str, field: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with refuses(UsageError, path=path, field=field):
        Journal(path, SETTINGS, ROWS, resume=True)
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["mine", "[]", '{"half": '])
def test_a_broken_line_is_named_and_nothing_is_dropped(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [answer(ROWS[0])], ROWS)
    path.write_text(path.read_text() + line + "\n")
    before = path.read_bytes()
    with refuses(UsageError, path=f"{path}:3", field=None):
        Journal(path, SETTINGS, ROWS, resume=True)
    assert path.read_bytes() == before


def test_an_answer_that_lacks_a_field_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [], ROWS)
    path.write_text(path.read_text() + json.dumps({"index": 0, "digest": ROWS[0].digest, "turn": 0}) + "\n")
    with refuses(UsageError, "missing-key", path=f"{path}:2", field="prompt_token_ids", found=MISSING):
        Journal(path, SETTINGS, ROWS, resume=True)


@pytest.mark.parametrize(
    ("changes", "id", "field"),
    [
        ({"token_ids": [1, "2"]}, "wrong-value", "token_ids[1]"),
        ({"token_ids": [True]}, "wrong-value", "token_ids[0]"),
        ({"finish_reason": "tired"}, "wrong-value", "finish_reason"),
        ({"tokens": [1]}, "unknown-key", "tokens"),
        ({"turn": None}, "wrong-value", "turn"),
    ],
)
def test_a_malformed_answer_is_refused_with_its_line_and_field(
    changes: dict[str, Any], id: str, field: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [answer(ROWS[0])], ROWS)
    head, row = map(json.loads, path.read_text().splitlines())
    path.write_text(json.dumps(head) + "\n" + json.dumps(row | changes) + "\n")
    with refuses(UsageError, id, path=f"{path}:2", field=field):
        Journal(path, SETTINGS, ROWS, resume=True)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [], ROWS)
    with refuses(UsageError, "settings-differ", path=path, field="draft_digest", found="a", expected="'b'") as raised:
        Journal(path, SETTINGS | {"draft_digest": "b"}, ROWS, resume=True)
    assert raised.value.hint == HINTS["draft_digest"]
    with refuses(UsageError, "settings-differ", field="kernels", found=None, expected="'triton'"):
        Journal(path, SETTINGS | {"kernels": "triton"}, ROWS, resume=True)


def test_a_changed_prompt_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [answer(row) for row in ROWS], ROWS)
    changed = [PromptRow(index=0, kind="prompt", value="another"), *ROWS[1:]]
    assert [row.index for row in Journal(path, SETTINGS, changed, resume=True).pending] == [0]


def test_a_failed_answer_is_not_stored_and_one_in_an_older_file_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    journal = keep(path, [answer(ROWS[0], error="too long"), answer(ROWS[1])], ROWS[:2])
    assert [item.row.index for item in journal.answers] == [1]
    assert len(path.read_text().splitlines()) == 2
    failed = {"index": 0, "digest": ROWS[0].digest, "turn": 0, "error": "too long", "finish_reason": "error"}
    path.write_text(path.read_text() + json.dumps(failed) + "\n")
    assert [row.index for row in Journal(path, SETTINGS, ROWS[:2], resume=True).pending] == [0]


def test_only_complete_conversations_are_resumed_and_their_last_answers_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [answer(TURNS, 0, token=1)], [TURNS])
    assert keep(path, [], [TURNS]).answers == []
    keep(path, [answer(TURNS, 0, token=2), answer(TURNS, 1, token=3)], [TURNS])
    again = Journal(path, SETTINGS, [TURNS], resume=True)
    assert [item.output.token_ids for item in again.answers] == [(2,), (3,)]
    assert len(path.read_text().splitlines()) == 4


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with (
        Journal(path, SETTINGS, ROWS, resume=True),
        refuses(UsageError, "file-in-use", path=path),
        Journal(path, SETTINGS, ROWS, resume=True),
    ):
        pass


@pytest.mark.parametrize("how", [{"resume": True}, {"resume": False, "force": True}])
def test_a_refused_run_changes_nothing_and_closes_the_file(tmp_path: Path, how: dict[str, bool]) -> None:
    """The first run has written half a line."""
    path = tmp_path / "rows.jsonl"
    with Journal(path, SETTINGS, ROWS, resume=True):
        with path.open("a") as other:
            other.write('{"index": 0, "tok')
        before = path.read_bytes()
        with refuses(UsageError, "file-in-use", path=path), Journal(path, SETTINGS, ROWS, **how):
            pass
        gc.collect()  # an open file would be reported here
        assert path.read_bytes() == before


def test_answers_that_another_run_added_since_the_file_was_read_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    keep(path, [], ROWS)
    late = Journal(path, SETTINGS, ROWS, resume=True)
    keep(path, [answer(ROWS[0])], ROWS)
    before = path.read_bytes()
    with refuses(UsageError, "file-in-use", path=path), late:
        pass
    assert path.read_bytes() == before


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    keep(link, [answer(ROWS[0])], ROWS)
    assert link.is_symlink()
    assert len(real.read_text().splitlines()) == 2
