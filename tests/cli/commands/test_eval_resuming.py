"""`dflash eval-acceptance --output --resume`: which answers are kept, asked again, refused or replaced."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.references import tiny_directory
from dflash_cli.generation import loaded_pair
from dflash_runtime.errors import UsageError
from dflash_testing.command_line import run_main
from dflash_testing.edits import edit_config
from dflash_testing.eval_runs import SMALL, run_eval
from dflash_testing.refusals import refuses


def test_resuming_asks_only_what_is_missing(rows: Path, answered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = json.loads(answered.with_name("result.json").read_text())
    with refuses(UsageError, "output-exists", path=rows):
        run_eval(*SMALL, "--output", str(rows))
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:3]) + lines[3][:40])  # settings, two answers, and half of a third
    asked: list[int] = []
    from dflash_runtime.llm import LLM

    stream = LLM.stream

    def counting(self: LLM, prompts: Any, params: Any = None) -> Any:
        asked.append(len(prompts))
        return stream(self, prompts, params)

    monkeypatch.setattr(LLM, "stream", counting)
    resumed = json.loads(run_eval(*SMALL, "--output", str(rows), "--resume", "--json").stdout)
    assert asked == [2]
    for key in ("num_drafts", "num_accepted_tokens", "acceptance_len", "histogram", "definitions"):
        assert resumed[key] == whole[key]
    assert sorted(rows.read_text().splitlines()[1:]) == sorted(line.rstrip("\n") for line in lines[1:])


def test_a_changed_draft_is_another_experiment(tmp_path: Path) -> None:
    draft, rows = tmp_path / "mine", tmp_path / "rows.jsonl"
    shutil.copytree(tiny_directory() / "draft", draft)
    options = ["--target", "tiny", *SMALL, "--output", str(rows)]
    run_eval(str(draft), *options)
    before = rows.read_bytes()
    weights = draft / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    with refuses(UsageError, "settings-differ", path=rows, field="draft_digest"):
        run_eval(str(draft), *options, "--resume")
    data[-2] ^= 1
    weights.write_bytes(data)
    edit_config(draft, rope_theta=10_000.0)
    with refuses(UsageError, "settings-differ", path=rows, field="draft_digest"):
        run_eval(str(draft), *options, "--resume")
    (draft / "config.json").write_text((tiny_directory() / "draft" / "config.json").read_text())
    run_eval(str(draft), *options, "--resume")
    assert rows.read_bytes() == before


def test_a_draft_is_known_by_whatever_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_directory() / "draft", tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    options = ["--target", "tiny", *SMALL, "--output", "rows.jsonl"]
    run_eval("mine", *options)
    for path in ("./mine", str(tmp_path / "mine")):
        done = run_main("eval-acceptance", path, *options, "--resume")
        assert done.code == 0
        assert " steps, " not in done.err  # nothing was generated


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--draft-sampling", "probabilistic"], "draft_sampling"), (["--dtype", "float64"], "dtype"),
     (["-k", "3"], "num_speculative_tokens"), (["--temperature", "0.5"], "temperature")],
)  # fmt: skip
def test_settings_that_decide_a_result_are_compared(options: list[str], name: str, rows: Path) -> None:
    with refuses(UsageError, "settings-differ", path=rows, field=name):
        run_eval(*SMALL, "--output", str(rows), "--resume", *options)


def test_another_device_and_template_option_are_another_experiment(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--chat-template-kwargs", '{"enable_thinking": false}']
    with refuses(UsageError, "settings-differ", field="chat_template_kwargs", found=None) as caught:
        run_eval(*SMALL, "--output", str(rows), "--resume", *options)
    assert "enable_thinking" in str(caught.value.expected)
    monkeypatch.setattr(loaded_pair, "device_name", lambda device: "NVIDIA H200")
    rows.write_bytes(b"".join(rows.read_bytes().splitlines(keepends=True)[:-1]))  # an answer is missing
    with refuses(UsageError, "settings-differ", field="device_name", expected="'NVIDIA H200'"):
        run_eval(*SMALL, "--output", str(rows), "--resume")


def test_a_smaller_resumed_run_deletes_no_answer(enough: Path, tmp_path: Path) -> None:
    rows, whole = Path(shutil.copy(enough, tmp_path)), json.loads(enough.with_name("result.json").read_text())
    before = rows.read_bytes()
    smaller = json.loads(run_eval(*SMALL, "--output", str(rows), "--resume", "--json").stdout)
    assert rows.read_bytes() == before
    assert (smaller["num_conversations"], whole["num_conversations"]) == (4, 64)


def test_a_finished_run_loads_no_model(rows: Path, answered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same result as of the run itself; a missing answer or another setting loads the pair."""
    whole = json.loads(answered.with_name("result.json").read_text())
    monkeypatch.setattr("dflash_cli.workers.open_crew.load_session", refuse_to_load)
    before = rows.read_bytes()
    again = json.loads(run_eval(*SMALL, "--output", str(rows), "--resume", "--json").stdout)
    assert rows.read_bytes() == before
    for part in ("seconds", "measured"):
        first, second = whole.pop(part), again.pop(part)
        if part == "measured":
            assert {key for key in first if first[key] != second[key]} <= {"argv", "date"}
    assert again == whole
    for options in (
        ["--seed", "1"], ["--dtype", "float64"], ["--max-model-len", "512"], ["--causality", "causal"],
        ["--kv-dtype", "fp8"], ["--tensor-parallel", "2"],
    ):  # fmt: skip
        with pytest.raises(AssertionError, match="loads"):
            run_eval(*SMALL, "--output", str(rows), "--resume", *options)
    lines = before.splitlines(keepends=True)
    for stored in (lines[:-1], [lines[0].replace(b'"seed"', b'"disaggregated": true, "seed"', 1), *lines[1:]]):
        rows.write_bytes(b"".join(stored))
        with pytest.raises(AssertionError, match="loads"):
            run_eval(*SMALL, "--output", str(rows), "--resume")


def refuse_to_load(*_: object, **__: object) -> None:
    raise AssertionError("loads a model")


def test_resuming_under_other_settings_is_refused(rows: Path) -> None:
    with refuses(UsageError, "settings-differ", field="seed", found=0, expected="1"):
        run_eval(*SMALL, "--output", str(rows), "--resume", "--seed", "1")


def test_an_output_is_replaced_only_on_demand(tmp_path: Path) -> None:
    """Refused before anything is measured."""
    path = tmp_path / "rows.jsonl"
    with pytest.raises(UsageError):
        run_eval(*SMALL, "--output", str(tmp_path / "absent" / path.name))
    path.write_text("old")
    with refuses(UsageError, "output-exists", path=path):
        run_eval(*SMALL, "--output", str(path))
    assert path.read_text() == "old"
    run_eval(*SMALL, "--output", str(path), "--force")
    lines = path.read_text().splitlines()
    assert (len(lines), "old" in lines) == (5, False)
