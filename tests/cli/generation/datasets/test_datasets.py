"""Datasets of prompts, with made-up rows in the published layouts.

This file contains no row of a dataset.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.generation.datasets import table_files
from dflash_cli.generation.datasets.dataset import datasets, parse_spec
from dflash_cli.generation.datasets.places import choose_files
from dflash_cli.generation.prompt_sets import PromptSet, read_prompts
from dflash_runtime.errors import CheckpointNotFound, RequestError, UnsupportedError, UsageError
from dflash_testing import hub_server as hub
from dflash_testing.command_line import IMPORT_PATHS
from dflash_testing.refusals import refuses

GSM8K = [
    {"question": f"There are {n} boats with 3 oars each. How many oars?", "answer": f"{n} x 3\n#### {n * 3:,}"}
    for n in (2, 5, 7, 11, 13, 400)
]
MADE: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "gsm8k": ("main/test-00000-of-00001.jsonl", GSM8K),
    "math500": (
        "test.jsonl",
        [{"problem": "Find x.", "solution": "x is 1", "answer": "1", "subject": "Algebra", "unique_id": "a/1.json"}],
    ),
    "humaneval": (
        "openai_humaneval/test-00000-of-00001.jsonl",
        [{"task_id": "Made/0", "prompt": "def f(x):\n", "test": "", "entry_point": "f"}],
    ),
    "mbpp": (
        "sanitized/test-00000-of-00001.jsonl",
        [{"task_id": 3, "prompt": "Write a function.", "code": "", "test_list": ["assert f(1) == 1", "assert f(2)"]}],
    ),
    "mt-bench": (
        "raw/question.jsonl",
        [{"prompt_id": 81, "category": "writing", "prompt": ["Write.", "Again."], "reference": []}],
    ),
    "speed-bench": (
        "qualitative.jsonl",
        [{"question_id": "q1", "category": "coding", "turns": ["Do this.", "And that."]}],
    ),
}
"""Dataset -> the name of a file in its repository, and made-up rows."""


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_dataset(folder: Path, name: str) -> Path:
    file, rows = MADE[name]
    write_rows(folder / file, rows)
    return folder


def read(text: str, form: str | None = None) -> PromptSet:
    found = read_prompts(None, text, form)
    assert found is not None
    return found


def test_every_dataset_is_tried_here() -> None:
    assert set(MADE) == set(datasets())


@pytest.mark.parametrize("name", MADE)
def test_a_dataset_is_read_from_a_folder_in_every_format(name: str, tmp_path: Path) -> None:
    write_dataset(tmp_path, name)
    for form in datasets()[name].formats:
        found = read(f"{name}={tmp_path}", form)
        assert found.name == name
        assert found.for_chat
        assert found.dataset is not None
        assert found.dataset.format == form
        assert found.dataset.files == (MADE[name][0],)
        assert found.dataset.commit is None
        assert found.rows


ZLAB = "\nPlease reason step by step, and put your final answer within \\boxed{}."


@pytest.mark.parametrize(
    ("name", "form", "value"),
    [
        ("gsm8k", None, GSM8K[0]["question"] + ZLAB),
        ("gsm8k", "vllm", GSM8K[0]["question"]),
        ("math500", None, "Find x." + ZLAB),
        ("math500", "specforge", "Find x."),
        (
            "humaneval",
            None,
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f(x):\n\n```",
        ),
        ("humaneval", "vllm", "def f(x):\n"),
        ("mbpp", None, "Write a function."),
        (
            "mbpp",
            "specforge",
            "You are an expert Python programmer, and here is your task: Write a function. Your code should pass these "
            "tests:\n\nassert f(1) == 1\nassert f(2)\n\n[BEGIN]\n",
        ),
        ("mt-bench", None, ["Write.", "Again."]),
        ("mt-bench", "vllm", ["Write."]),
        ("speed-bench", None, ["Do this.", "And that."]),
        ("speed-bench", "vllm", ["Do this."]),
    ],
)
def test_prompts_are_made_as_the_named_project_does(name: str, form: str | None, value: Any, tmp_path: Path) -> None:
    assert read(f"{name}={write_dataset(tmp_path, name)}", form).rows[0].value == value


def test_examples_stand_before_the_question_and_are_not_asked(tmp_path: Path) -> None:
    found = read(f"gsm8k={write_dataset(tmp_path, 'gsm8k')}", "specforge")
    (row,) = found.rows
    assert row.kind == "messages"
    assert [item["role"] for item in row.value] == ["user", "assistant"] * 5 + ["user"]
    assert row.value[-1]["content"] == GSM8K[5]["question"]
    assert (row.reference, row.where) == ("1,200", f"{tmp_path}/main/test-00000-of-00001.jsonl:6")


def test_rows_keep_id_and_category(tmp_path: Path) -> None:
    found = {name: read(f"{name}={write_dataset(tmp_path / name, name)}").rows[0] for name in MADE}
    assert {name: (row.id, row.category) for name, row in found.items()} == {
        "gsm8k": (None, None), "math500": ("a/1.json", "Algebra"), "humaneval": ("Made/0", None), "mbpp": (3, None),
        "mt-bench": (81, "writing"), "speed-bench": ("q1", "coding"),
    }  # fmt: skip
    assert found["gsm8k"].reference == "6"


def test_the_script_of_speed_bench_writes_messages(tmp_path: Path) -> None:
    row = {"question_id": "q", "category": "qa", "messages": [{"role": "user", "content": "Why?"}]}
    write_rows(tmp_path / "qualitative.jsonl", [row])
    write_rows(tmp_path / "throughput_1k.jsonl", [{**row, "messages": [{"role": "user", "content": "Long."}]}])
    assert read(f"speed-bench={tmp_path}").rows[0].value == ["Why?"]
    found = read(f"speed-bench/throughput_1k={tmp_path}")
    assert (found.name, found.rows[0].value) == ("speed-bench/throughput_1k", ["Long."])
    with refuses(CheckpointNotFound, "no-such-subset", field="--dataset", found="throughput_2k"):
        read(f"speed-bench/throughput_2k={tmp_path}")


def test_a_placeholder_of_speed_bench_is_no_prompt(tmp_path: Path) -> None:
    text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    write_rows(tmp_path / "qualitative.jsonl", [{"category": "qa", "turns": [text]}])
    with refuses(RequestError, "placeholder-prompt") as raised:
        read(f"speed-bench={tmp_path}")
    assert "qualitative.jsonl:1" in raised.value.message
    assert "speed-bench=FOLDER" in str(raised.value.hint)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
def test_a_file_of_another_kind_has_the_same_rows(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"test.{kind}"
    if kind == "json":
        path.write_text(json.dumps({"data": GSM8K}))
    elif kind == "csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, ["question", "answer"])
            writer.writeheader()
            writer.writerows(GSM8K)
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(GSM8K), path)
    other = write_rows(tmp_path / "lines" / "test.jsonl", GSM8K)
    assert [row.digest for row in read(f"gsm8k={path}").rows] == [row.digest for row in read(f"gsm8k={other}").rows]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(table_files, "find_spec", lambda name: None)
    with refuses(UnsupportedError, "missing-package", path=tmp_path / "test.parquet", found="pyarrow") as raised:
        read(f"gsm8k={tmp_path}")
    assert "'dflash-cli[datasets]'" in str(raised.value.hint)


def test_a_broken_parquet_file_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "test.parquet").write_bytes(b"PAR1 and no more")
    with refuses(RequestError, "cannot-be-read", path=tmp_path / "test.parquet") as raised:
        read(f"gsm8k={tmp_path}")
    assert "\n" not in raised.value.message


LAYOUT = [
    "README.md", "dataset_infos.json", "main/test-00000-of-00002.parquet", "main/test-00001-of-00002.parquet",
    "main/train-00000-of-00001.parquet", "socratic/test-00000-of-00001.parquet",
]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (LAYOUT, ("main/test-00000-of-00002.parquet", "main/test-00001-of-00002.parquet")),
        ([*LAYOUT, "main/test.jsonl"], ("main/test.jsonl",)),
        (["train.jsonl", "test.jsonl"], ("test.jsonl",)),
        (["question.jsonl"], ("question.jsonl",)),
        (["main.jsonl", "main/coding.jsonl", "main/math.jsonl"], ("main.jsonl",)),
    ],
    ids=["shards", "lines before Parquet", "split", "one file", "flat before split by category"],
)
def test_files_are_chosen_by_subset_split_and_kind(names: list[str], chosen: tuple[str, ...]) -> None:
    assert choose_files(names, "here", subset="main", split="test", is_subset_asked=False) == chosen


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gsm8k", ("gsm8k", None, None, None)),
        ("GSM8K:100", ("gsm8k", None, None, 100)),
        ("gsm8k=./here:7", ("gsm8k", None, "./here", 7)),
        ("speed-bench/throughput_1k=org/name@v1", ("speed-bench", "throughput_1k", "org/name@v1", None)),
    ],
)
def test_a_dataset_is_named_with_subset_place_and_count(text: str, parts: tuple[Any, ...]) -> None:
    found = parse_spec(text)
    assert (found.name, found.subset, found.place, found.count) == parts


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("alpaca", "no-such-dataset"),
        ("gsm8k:0", "usage-error"),
        ("", "usage-error"),
        ("gsm8k:x", "usage-error"),
    ],
)
def test_an_unknown_or_malformed_dataset_is_refused(text: str, id: str) -> None:
    with refuses(UsageError, id, field="--dataset", found=text) as caught:
        parse_spec(text)
    known = "gsm8k, humaneval, math500, mbpp, mt-bench, speed-bench"
    assert (known in caught.value.message) is (id == "no-such-dataset")


def test_a_format_that_nobody_has_is_refused(tmp_path: Path) -> None:
    with refuses(UsageError, field="--dataset-format", found="sglang") as caught:
        read(f"mbpp={write_dataset(tmp_path, 'mbpp')}", "sglang")
    assert all(name in str(caught.value.expected) for name in ("z-lab", "specforge"))


def test_two_counts_that_differ_are_refused() -> None:
    with refuses(UsageError, "two-counts", field="--num-prompts", found=6, expected="5"):
        read_prompts(None, "gsm8k:5", count=6)


@pytest.mark.parametrize(
    ("content", "id", "where"),
    [
        ("", "no-rows", "test.jsonl: "),
        ('{"question": "x"}', "missing-column", "test.jsonl:1: "),
        (f"{json.dumps(GSM8K[0])}\n[1]", "row-not-an-object", "test.jsonl:2: "),
        (f"{json.dumps(GSM8K[0])}\n\n{{", "invalid-json", "test.jsonl:3: "),
        ('{"question": 5, "answer": "#### 1"}', None, ""),
    ],
)
def test_malformed_rows_are_named_by_line(content: str, id: str | None, where: str, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(content)
    if id is None:
        assert read(f"gsm8k={tmp_path}").rows[0].value.startswith("5\n")
        return
    with refuses(RequestError, id) as caught:
        read(f"gsm8k={tmp_path}")
    assert where in caught.value.message


@pytest.mark.parametrize(("typed", "meant"), [("humanevl", "humaneval"), ("mtbench", "mt-bench"), ("GSM-8k", "gsm8k")])
def test_a_similar_dataset_is_suggested(typed: str, meant: str) -> None:
    with refuses(UsageError, "no-such-dataset") as caught:
        parse_spec(f"{typed}:4")
    assert meant in (caught.value.hint or "").rstrip("?").split()


def test_rows_without_questions_are_named(tmp_path: Path) -> None:
    for name in ("mt-bench", "speed-bench"):
        write_rows(tmp_path / name / "rows.jsonl", [{"text": "x"}])
        with refuses(RequestError, "missing-column", field="turns") as caught:
            read(f"{name}={tmp_path / name}")
        assert "rows.jsonl:1: " in caught.value.message


def test_a_location_without_rows_is_refused(tmp_path: Path) -> None:
    with refuses(CheckpointNotFound, "no-such-dataset-location", field="--dataset", found="nowhere/at/all"):
        read("gsm8k=nowhere/at/all")
    with refuses(CheckpointNotFound, "no-row-files", found=str(tmp_path)):
        read(f"gsm8k={tmp_path}")
    (tmp_path / "test.json").write_text('{"a": 1}')
    with refuses(RequestError, "no-list-of-rows", path=tmp_path / "test.json"):
        read(f"gsm8k={tmp_path}")


@pytest.fixture(scope="module")
def local_hub() -> Iterator[hub.LocalHub]:
    """A hub with one dataset, and other files that must not be downloaded."""
    with hub.serving() as server:
        rows = "".join(json.dumps(row) + "\n" for row in GSM8K).encode()
        server.repos["openai/gsm8k"] = {
            "README.md": b"#", "main/test-0.jsonl": rows, "main/train-0.jsonl": b"", "socratic/test-0.jsonl": b"{}",
        }  # fmt: skip
        yield server


SHOW = """
import json, sys
from dflash_cli.generation.prompt_sets import read_prompts
from dflash_runtime.documents import to_json
from dflash_runtime.errors import DFlashError
try:
    found = read_prompts(None, sys.argv[1])
    print(json.dumps([len(found.rows), found.sha256, to_json(found.dataset)]))
except DFlashError as error:
    print(json.dumps([error.exit_code, error.message, error.hint]))
"""


def show(text: str, environment: dict[str, str]) -> Any:
    """The result of a separate process, because the hub's library reads its settings during its import."""
    done = subprocess.run(
        [sys.executable, "-c", SHOW, text],
        env={**os.environ, **IMPORT_PATHS, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_dataset_comes_from_the_hub_and_then_from_its_cache(local_hub: hub.LocalHub, tmp_path: Path) -> None:
    environment = hub.environment(local_hub, tmp_path)
    local_hub.forget()
    count, sha256, facts = show("gsm8k", environment)
    assert (count, len(sha256)) == (6, 64)
    assert facts == {
        "source": "openai/gsm8k", "commit": hub.COMMIT, "files": ["main/test-0.jsonl"], "subset": "main",
        "format": "z-lab",
    }  # fmt: skip
    assert not any("train" in path or "socratic" in path for path, _ in local_hub.asked if "/resolve/" in path)
    assert [sha256, facts] == show("gsm8k", {**environment, "HF_HUB_OFFLINE": "1"})[1:]
    assert show("gsm8k=openai/gsm8k@v2", environment)[2]["source"] == "openai/gsm8k@v2"


def test_a_hub_that_is_not_reached_points_to_a_folder(local_hub: hub.LocalHub, tmp_path: Path) -> None:
    environment = hub.environment(local_hub, tmp_path) | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    code, message, hint = show("gsm8k", environment)
    assert code == 4
    assert message.startswith("openai/gsm8k: ")
    assert "HF_ENDPOINT" in hint
    assert "NAME=DIR" in hint
    code, message = show("gsm8k=acme/absent", hub.environment(local_hub, tmp_path))[:2]
    assert (code, message.split(":")[0]) == (4, "acme/absent")
