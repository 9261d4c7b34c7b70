"""`dflash probe` against servers on this machine: figures, faults of the connection, exit codes and kept answers."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dflash_cli
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_cli.probing import probe_options
from dflash_cli.probing.runs import counter_watch
from dflash_cli.probing.servers import http_client
from dflash_testing.command_line import Outcome, invoke
from dflash_testing.fake_engines import FakeEngine, make_text, prompt_rows, texts_of_rows
from dflash_testing.inference_servers import serving
from dflash_testing.paths import ROOT
from dflash_testing.scripted_servers import Script, ScriptedClient

ENV = os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in (".", "runtime", "kernels"))}
FEW = ("--concurrency", "1", "-n", "40", "--no-questions")


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(counter_watch, "COUNTER_PAUSE_S", 0.002)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in prompt_rows(14)))
    return path


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with serving(FakeEngine(reports="summary")) as engine:
        yield engine


def probe(engine: FakeEngine, *args: object) -> dict[str, Any]:
    """The document of a probe with exit code 0."""
    done = invoke("probe", engine.url, *args, "--json")
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    return document


def own_result(engine: FakeEngine, prompts: Path, **changes: Any) -> Path:
    """A file in the form of `eval-acceptance --output`, with answers of a fake engine."""
    path = prompts.with_name("own.jsonl")
    with serving(FakeEngine(reports="detailed", **changes)) as other:
        probe(other, "-p", prompts, *FEW, "--output", path)
    return path.with_name("own.1.jsonl")


def test_a_probe_equals_our_own_evaluation_step_for_step(tmp_path: Path) -> None:
    """Our engine answers for the server with the bundled pair, and reports its steps in the form of vLLM."""
    own, seen = tmp_path / "own.jsonl", tmp_path / "seen.jsonl"
    sample = ("--num-prompts", "12", "-n", "12")
    evaluated = json.loads(invoke("eval-acceptance", "tiny", *sample, "--output", own, "--json").out)
    tokenizer = Tokenizer(ROOT / "dflash_cli" / "tiny" / "target")
    engine = FakeEngine(reports="detailed", texts=texts_of_rows(own), encode=tokenizer.encode)
    on_bundled = ("-p", ROOT / "dflash_cli" / "tiny" / "prompts.jsonl")
    with serving(engine):
        document = probe(
            engine, *sample, *on_bundled, "--concurrency", "1,4", "--output", seen, "--result", own, "-d", "tiny"
        )
    for run in document["runs"]:
        for name in ("num_drafts", "per_pos_accepted", "acceptance_len", "acceptance_len_interval", "histogram"):
            assert run[name] == evaluated[name], name
        assert run["definitions"] == pytest.approx(evaluated["definitions"])
    for name in ("seen.1.jsonl", "seen.4.jsonl"):
        rows = [[json.loads(line) for line in path.read_text().splitlines()[1:]] for path in (own, tmp_path / name)]
        first, second = ({row["index"]: row for row in side} for side in rows)
        for index, row in first.items():
            for field in ("prompt_token_ids", "token_ids", "acceptance_lengths", "finish_reason"):
                assert second[index][field] == row[field]
    assert [item["num_same"] for item in document["equalities"]] == [12, 12]
    assert document["comparisons"][-1]["difference"] == 0
    assert document["attribution"]["owner"] == "none"


def test_the_page_names_server_lengths_and_cause(engine: FakeEngine, prompts: Path) -> None:
    done = invoke("probe", engine.url, "-p", prompts, "-n", "40")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].startswith("vllm 0.33.0 serves org/model")
    assert " 7 tokens" in lines[0]
    assert lines[1].startswith("acceptance length 3.")
    assert [line for line in lines if " 14 of 14 " in line] != []
    assert [line for line in lines if line.startswith("cause: undecided (rule 9): ")] != []
    unwrapped = ("position", "average", "  next: ")
    assert all(len(line) <= 80 for line in lines if "▇" not in line and not line.startswith(unwrapped))


def test_prompts_are_asked_as_ids_and_at_the_concurrency_that_is_said(engine: FakeEngine, prompts: Path) -> None:
    probe(engine, "-p", prompts, "--concurrency", "2", "-n", "24", "--no-questions")
    assert engine.num_answers == 1 + 14
    assert {tuple(body["ids"]) for body in engine.bodies} == {(7, 8, 9 + index) for index in range(14)}
    assert {body["temperature"] for body in engine.bodies} == {0.0}


@pytest.mark.parametrize("fault", ["500", "timeout"])
def test_temporary_faults_are_retried(engine: FakeEngine, prompts: Path, fault: Any) -> None:
    engine.faults = {1: fault, 4: fault, 5: fault}
    document = probe(engine, "-p", prompts, *FEW, "--timeout", "0.15")
    assert document["runs"][0]["failed"] == []
    assert document["runs"][0]["num_conversations"] == 14


def test_a_prompt_that_is_not_answered_is_named_and_left_out(engine: FakeEngine, prompts: Path) -> None:
    engine.faults = {3: "400"}
    done = invoke("probe", engine.url, "-p", prompts, *FEW)
    assert done.code == 2
    assert "prompts-failed" in done.notices
    assert f"prompts.jsonl:3: {engine.url}/v1/completions: answered 400: " in done.err
    engine.faults = {engine.num_answers + 3: "400"}
    assert invoke("probe", engine.url, "-p", prompts, *FEW, "--allow-failed").code == 0


def test_a_server_that_ends_is_one_line_and_resume_asks_the_rest(engine: FakeEngine, prompts: Path) -> None:
    rows = prompts.with_name("rows.jsonl")
    engine.faults = dict.fromkeys(range(6, 40), "500")
    done = invoke("probe", engine.url, "-p", prompts, *FEW, "--output", rows, "--retries", "0")
    assert (done.code, done.error_id) == (4, "no-answer")
    assert re.search(r" 500\b.* 1 try\b.* 5 answers ", done.err)
    assert "--resume" in done.err
    assert not done.out
    assert len(prompts.with_name("rows.1.jsonl").read_text().splitlines()) == 1 + 5
    engine.faults = {}
    time.sleep(0.1)  # for a request that was running
    before = engine.num_answers
    document = probe(engine, "-p", prompts, *FEW, "--output", rows, "--resume")
    assert engine.num_answers - before == 1 + 14 - 5
    assert document["runs"][0]["num_conversations"] == 14
    whole = probe(engine, "-p", prompts, *FEW)
    assert document["runs"][0]["per_pos_accepted"] == whole["runs"][0]["per_pos_accepted"]


def test_rows_with_other_settings_are_not_resumed(engine: FakeEngine, prompts: Path) -> None:
    rows = prompts.with_name("rows.jsonl")
    probe(engine, "-p", prompts, *FEW, "--output", rows)
    done = invoke("probe", engine.url, "-p", prompts, "--concurrency", "1", "-n", "8", "--output", rows, "--resume")
    assert (done.code, done.error_id, done.field) == (2, "settings-differ", "max_new_tokens")


@pytest.mark.parametrize("options", [("ftp://x",), ("http://127.0.0.1:9", "--beside", "ftp://x")])
def test_a_malformed_url_is_refused_before_anything_is_asked(options: tuple[str, ...]) -> None:
    done = invoke("probe", *options)
    assert (done.code, done.field, "asking" in done.err) == (2, "URL", False)


def test_a_refused_connection_is_one_line() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = invoke("probe", f"http://127.0.0.1:{port}")
    assert (done.code, done.error_id) == (4, "connection-refused")
    assert f"error: http://127.0.0.1:{port}/v1/models: " in done.err
    assert "Traceback" not in done.err


def test_a_server_without_models_is_refused(prompts: Path) -> None:
    with serving(FakeEngine(metrics_text="x")) as engine:
        done = invoke("probe", f"{engine.url}/elsewhere", "-p", prompts)
    assert (done.code, done.error_id) == (5, "unknown-server")


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({"style": "vllm"}, "--speculative-config, and without --disable-log-stats"),
        ({"style": "vllm", "has_metrics": False}, "--speculative-config, and without --disable-log-stats"),
        ({"style": "sglang"}, "--speculative-algorithm DFLASH"),
        ({"style": "llama.cpp"}, "--model-draft and --metrics"),
    ],
)
def test_a_server_without_speculative_decoding_is_one_line(changes: dict[str, Any], how: str, prompts: Path) -> None:
    with serving(FakeEngine(has_draft=False, **changes)) as engine:
        done = invoke("probe", engine.url, "-p", prompts, *FEW)
    assert done.code == 5
    assert done.error_id == "no-speculation"
    assert done.error is not None
    assert how in str(done.error.hint)
    assert not done.out


@pytest.mark.parametrize("style", ["vllm", "sglang", "llama.cpp"])
def test_a_draft_that_is_configured_and_not_engaged_is_said(style: Any, prompts: Path) -> None:
    with serving(FakeEngine(style=style, is_engaged=False)) as engine:
        done = invoke("probe", engine.url, "-p", prompts, *FEW)
    assert done.code == 3
    assert "org/model" in done.out.splitlines()[0]
    assert "(rule 1)" in cause(done)


@pytest.mark.parametrize(("num_before", "notice"), [(0, "requests-not-counted"), (30, "server-restarted")])
def test_counters_that_begin_anew_are_not_used(num_before: int, notice: str, prompts: Path) -> None:
    with serving(FakeEngine(resets_at=8)) as engine:
        for index in range(num_before):
            engine.count(make_text((index,)))
        done = invoke("probe", engine.url, "-p", prompts, "--concurrency", "4", "-n", "40", "--json")
    document = json.loads(done.out)
    (run,) = document["runs"]
    assert (run["origin"], run["counted"]) == ("nothing", None)
    assert done.notices[0] == notice
    assert len(run["notes"]) == 1
    assert (run["is_engaged"], document["is_engaged"], document["attribution"]["owner"]) == (None, None, "undecided")


def test_traffic_of_others_is_noticed(prompts: Path) -> None:
    with serving(FakeEngine(is_shared=True)) as engine:
        together = invoke("probe", engine.url, "-p", prompts, "--concurrency", "4", "-n", "40", "--json")
        alone = invoke("probe", engine.url, "-p", prompts, *FEW, "--json")
    for done, notices in (
        (together, {"other-clients-counted"}),
        (alone, {"other-clients-counted", "steps-of-other-clients"}),
    ):
        (run,) = json.loads(done.out)["runs"]
        assert run["origin"] == "counters"
        assert set(done.notices) - {"intervals-need-steps"} == notices
        assert all(
            any(word in note for note in run["notes"]) for word in ("14 requests", *["14 answers"] * (done is alone))
        )


@pytest.mark.parametrize("style", ["vllm", "llama.cpp"])
def test_a_request_of_others_that_does_not_end_is_noticed(style: Any, prompts: Path) -> None:
    """Its tokens and steps are counted, but no request. At one request at a time, steps of other answers stay exact."""
    with serving(FakeEngine(style=style)) as engine:
        (sound,) = probe(engine, "-p", prompts, *FEW)["runs"]
    with serving(FakeEngine(style=style, runs_beside=True)) as engine:
        together = invoke("probe", engine.url, "-p", prompts, "--concurrency", "4", "-n", "40", "--json")
        alone = invoke("probe", engine.url, "-p", prompts, *FEW, "--json", "-q")
    assert "other-clients-counted" in together.notices
    assert {"other-clients-counted", "steps-of-other-clients"} <= set(alone.notices)
    assert "other clients" in alone.err, "--quiet keeps it, because the counted figure is unsafe"
    (run,) = json.loads(alone.out)["runs"]
    assert run["origin"] == "answers"
    assert (run["num_conversations"], run["counted"]["num_drafts"] > sound["num_drafts"]) == (7, True)
    assert run["num_drafts"] < sound["num_drafts"]


def test_answers_and_counters_that_disagree_are_noticed(prompts: Path) -> None:
    with serving(FakeEngine(reports="summary", is_shared=True)) as engine:
        done = invoke("probe", engine.url, "-p", prompts, *FEW, "--json")
    (run,) = json.loads(done.out)["runs"]
    assert run["origin"] == "answers"
    assert "step-counts-differ" in done.notices
    assert run["counted"]["num_drafts"] == 2 * run["num_drafts"]


def test_counters_without_positions_and_requests_give_the_length_alone(prompts: Path) -> None:
    with serving(FakeEngine(missing=("per_pos", "request_success"))) as engine:
        (run,) = probe(engine, "-p", prompts, "--concurrency", "4", "-n", "40")["runs"]
        page = invoke("probe", engine.url, "-p", prompts, *FEW).out
    assert (run["origin"], run["per_pos_accepted"], run["counted"]["num_requests"]) == ("counters", [], None)
    assert run["acceptance_len"] == 1 + run["num_accepted_tokens"] / run["num_drafts"]
    assert "by position" not in page


def test_counters_that_have_no_text_are_one_line(prompts: Path) -> None:
    with serving(FakeEngine(metrics_text='a{b="\n')) as engine:
        done = invoke("probe", engine.url, "-p", prompts, *FEW)
    assert (done.code, done.error_id) == (5, "not-prometheus")
    assert "/metrics: " in done.err


def test_prompts_without_time_are_left_out_and_the_probe_ends(prompts: Path) -> None:
    with serving(FakeEngine(reports="summary", pause_s=0.25)) as engine:
        done = invoke("probe", engine.url, "-p", prompts, "-n", "40", "--max-time", "3", "--json")
    assert done.code == 0
    document = json.loads(done.out)
    assert "time-is-up" in done.notices
    assert 0 < document["runs"][0]["num_conversations"] < 14
    assert document["questions"]
    assert document["findings"] == []


def test_a_server_that_hangs_ends_the_probe_in_its_time(prompts: Path) -> None:
    with serving(FakeEngine(reports="summary", pause_s=3)) as engine:
        done = invoke("probe", engine.url, "-p", prompts, "--max-time", "1")
    assert (done.code, done.error_id) == (4, "time-is-up")


def test_an_error_of_a_question_is_an_exit_code_and_a_line(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(style="sglang", split_nats=3.0)
    monkeypatch.setattr(probe_options, "HttpClient", lambda *args, **kwargs: ScriptedClient(script))
    done = invoke("probe", "scripted", "-p", prompts, "-n", "40")
    assert done.code == 3
    assert "\nerror answers-not-greedy: 14 of 14 greedy answers " in done.out
    assert "\nasked plain-decoding (15 requests, " in done.out
    assert invoke("probe", "scripted", "-p", prompts, "-n", "40", "--no-questions").code == 0


def test_a_key_is_sent_and_never_shown(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "very-secret")
    with serving(FakeEngine(reports="summary", key="very-secret")) as engine, serving(FakeEngine()) as other:
        refused = invoke("probe", engine.url, "-p", prompts, *FEW)
        assert (refused.code, "answered 401" in refused.err, "--api-key-env" in refused.err) == (4, True, True)
        done = invoke(
            "probe", engine.url, "-p", prompts, *FEW, "--api-key-env", "MY_KEY", "--beside", other.url, "--json"
        )
        assert done.code == 0
    assert "very-secret" not in done.out + done.err
    assert not any("Authorization" in headers for headers in other.headers)
    missing = invoke("probe", engine.url, "--api-key-env", "ABSENT_KEY")
    assert (missing.code, "ABSENT_KEY" in missing.err) == (2, True)


def cause(done: Outcome) -> str:
    """The line that names the cause and the rule."""
    return next(line for line in done.out.splitlines() if line.startswith("cause: "))


def test_a_length_below_our_own_is_a_fault_of_the_engine(engine: FakeEngine, prompts: Path) -> None:
    own = own_result(engine, prompts, rate=0.7)
    with serving(FakeEngine(reports="summary", rate=0.4)) as worse:
        done = invoke("probe", worse.url, "-p", prompts, *FEW, "--result", own)
    assert done.code == 3
    assert "(rule 4)" in cause(done)
    assert "own.1.jsonl: 3." in done.out


def test_a_length_as_low_as_our_own_is_a_fault_of_the_checkpoint(prompts: Path) -> None:
    with serving(FakeEngine(reports="summary", rate=0.1)) as engine:
        own = own_result(engine, prompts, rate=0.1)
        done = invoke("probe", engine.url, "-p", prompts, *FEW, "--result", own)
    assert done.code == 3
    assert "(rule 7)" in cause(done)


def test_another_server_is_compared(engine: FakeEngine, prompts: Path) -> None:
    with serving(FakeEngine(style="sglang", release="0.5.23")) as other:
        document = probe(engine, "-p", prompts, *FEW, "--beside", other.url)
    assert document["beside"]["server"]["engine"] == "sglang"
    assert document["comparisons"][0]["difference"] == 0
    assert document["equalities"][0]["num_same"] == 14
    assert document["attribution"]["owner"] == "none"


def test_lower_acceptance_under_load_is_a_fault_of_the_engine(prompts: Path) -> None:
    with serving(FakeEngine(reports="summary", worse_loaded=1, pause_s=0.01)) as engine:
        done = invoke("probe", engine.url, "-p", prompts, "--concurrency", "1,8", "-n", "40")
    assert done.code == 3
    assert "(rule 5)" in cause(done)
    assert [word in done.out for word in ("acceptance-falls-with-load", "draft-off-under-load")] == [True, False]


@pytest.mark.parametrize(("gap", "code"), [(0.05, 0), (2.0, 3)])
def test_answers_that_change_under_load_are_near_ties_or_faults(prompts: Path, gap: float, code: int) -> None:
    options = ("--concurrency", "1,8", "-n", "40", "--no-questions", "--json")
    with serving(FakeEngine(reports="summary", changes_at=5, gap=gap, pause_s=0.05)) as engine:
        done = invoke("probe", engine.url, "-p", prompts, *options)
    assert done.code == code
    (equality,) = json.loads(done.out)["equalities"]
    assert equality["num_near_ties" if code == 0 else "num_unexplained"] == len(equality["differences"]) > 8
    assert {item["position"] for item in equality["differences"]} == {5}


def test_a_length_below_the_gate_is_an_exit_code(engine: FakeEngine, prompts: Path) -> None:
    assert invoke("probe", engine.url, "-p", prompts, *FEW, "--min-acceptance", "3").code == 0
    done = invoke("probe", engine.url, "-p", prompts, *FEW, "--min-acceptance", "5")
    assert (done.code, done.error_id, done.field) == (3, "acceptance-too-low", "acceptance length")


def test_a_result_of_other_prompts_is_refused_before_anything_is_asked(engine: FakeEngine, prompts: Path) -> None:
    own = own_result(engine, prompts)
    prompts.write_text('{"prompt_token_ids": [1, 2]}\n')
    done = invoke("probe", engine.url, "-p", prompts, *FEW, "--result", own)
    assert (done.code, engine.num_answers, done.error_id) == (2, 0, "other-prompts")


def test_conversations_are_rendered_by_the_server_and_go_on_with_its_answers(
    engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"turns": ["one", "two"]}) + "\n")
    (run,) = probe(engine, "-p", path, *FEW)["runs"]
    assert (run["num_requests"], run["num_conversations"]) == (2, 1)


@pytest.mark.parametrize("text", ["0", "1,1", "x", ""])
def test_numbers_of_requests_are_checked(text: str) -> None:
    done = invoke("probe", "http://localhost", "--concurrency", text)
    assert (done.code, "--concurrency" in done.err) == (2, True)


def test_known_faults_of_the_engine_are_said(prompts: Path) -> None:
    with serving(FakeEngine(style="sglang", release="0.5.23.post1")) as engine:
        faults = probe(engine, "-p", prompts, *FEW, "-d", "tiny:reduced")["known_faults"]
        page = invoke("probe", engine.url, "-p", prompts, *FEW, "-d", "tiny:reduced").out
    assert {fault.split()[0] for fault in faults} >= {"S09", "S10"}
    assert re.search(r"\nknown of sglang: S10 .*1024 .*2048 ", page)


def test_a_program_asks_as_the_command_does(engine: FakeEngine, prompts: Path, tmp_path: Path) -> None:
    found = dflash_cli.probe(
        url=engine.url,
        concurrency=(2, 4),
        prompts=[row["prompt_token_ids"] for row in map(json.loads, prompts.read_text().splitlines())],
        max_new_tokens=40,
        output=tmp_path / "rows.jsonl",
    )
    assert [run.concurrency for run in found.runs] == [2, 4]
    by_command = probe(engine, "-p", prompts, *FEW)["runs"][0]
    assert found.runs[0].total.counts.per_pos_accepted == by_command["per_pos_accepted"]
    assert (tmp_path / "rows.4.jsonl").exists()


def test_asking_a_server_takes_no_torch(engine: FakeEngine, prompts: Path) -> None:
    arguments = ["dflash", "probe", engine.url, "-p", str(prompts), *FEW, "--min-acceptance", "1", "-q"]
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'transformers', 'tokenizers')); "
        f"sys.argv = {arguments!r}; from dflash_cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=ENV)
    assert (done.returncode, done.stderr) == (0, "")
    assert "cause: undecided" in done.stdout


def test_a_file_that_a_later_run_would_overwrite_is_refused_before_the_first(
    engine: FakeEngine, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows.2.jsonl").touch()
    for more, name in ((["--concurrency", "1,2"], "rows.2.jsonl"), (["--output", tmp_path / "no" / "r.jsonl"], "no")):
        outcome = invoke("probe", engine.url, "-p", prompts, "--output", tmp_path / "rows.jsonl", *more)
        assert outcome.code == 2
        assert f"error: {tmp_path / name}: " in outcome.err
    assert engine.num_answers <= 2  # the requests that test whether a draft is served
    assert not (tmp_path / "rows.1.jsonl").exists()


def test_keys_engines_and_prompts_are_refused_by_what_was_typed(
    engine: FakeEngine, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    own = own_result(engine, prompts)
    for more, field in (
        (["--beside", engine.url, "--beside-api-key-env", "NO_SUCH_KEY"], "--beside-api-key-env"),
        (["--engine", "vlm"], "--engine"),
        (["--result", own], "--result"),
    ):
        outcome = invoke("probe", engine.url, *more)
        assert (outcome.code, outcome.field) == (2, field), outcome.err
