"""dflash.toml and DFLASH_* variables: precedence, origins, and refusals of unknown keys and wrong values."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.main import COMMANDS
from dflash_cli.terminal.command_line import (
    RequestCommand,
    load_command,
    parameters_of_command,
    read_request,
)
from dflash_cli.terminal.defaults import VARIABLE, find_settings, find_unknown, list_defaults, set_defaults
from dflash_cli.terminal.requests import Request, parameters_of
from dflash_runtime.errors import UsageError
from dflash_testing.command_line import run_main
from dflash_testing.refusals import refuses


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory below an empty project, without a user's file and variables."""
    for name in [name for name in os.environ if name.startswith("DFLASH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    monkeypatch.chdir(folder / "sub")
    return folder


def write(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dflash.toml").write_text(text)


def command(name: str) -> RequestCommand:
    return load_command(name, COMMANDS[name], set_defaults(name, parameters_of_command(name), find_settings(COMMANDS)))


def request(name: str, **typed: Any) -> Any:
    kind = command(name).kind
    return read_request(kind, {item.name: typed.get(item.name) for item in parameters_of(kind)})


def test_the_strongest_setting_decides(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step adds a stronger setting, which then decides."""
    assert request("generate").max_new_tokens == 128
    write(tmp_path / "config" / "dflash", "[generate]\nmax-new-tokens = 1")
    assert request("generate").max_new_tokens == 1
    write(project, "max-new-tokens = 2")
    assert request("generate").max_new_tokens == 2
    write(project, "max-new-tokens = 2\n[generate]\nmax-new-tokens = 3")
    assert request("generate").max_new_tokens == 3
    assert request("eval-acceptance").max_new_tokens == 2
    write(project / "sub", "[generate]\nmax-new-tokens = 4")
    assert request("generate").max_new_tokens == 4, "the nearest file"
    monkeypatch.setenv("DFLASH_MAX_NEW_TOKENS", "5")
    assert request("generate").max_new_tokens == 5
    monkeypatch.setenv("DFLASH_GENERATE_MAX_NEW_TOKENS", "6")
    assert (request("generate").max_new_tokens, request("bench").max_new_tokens) == (6, 5)
    assert request("generate", max_new_tokens="7").max_new_tokens == 7


def test_engine_options_are_between_the_top_and_a_command(project: Path) -> None:
    write(project, 'dtype = "float64"\n[engine]\ndtype = "float32"\n[bench]\ndtype = "bfloat16"')
    assert (request("generate").dtype, request("bench").dtype) == ("float32", "bfloat16")


def test_values_of_every_type_are_read(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        project,
        'draft = "./here"\nstop-token-id = [1, 2]\ntemperature = 1\n[engine]\nkv-memory = "2M"\ngraphs = false\n'
        '[eval-acceptance]\nlock = "pair.lock"\nchat-template-kwargs = { a = 1 }\nthinking = "on,off"\n',
    )
    found = request("eval-acceptance")
    assert (found.draft, found.lock) == (str(project / "here"), project / "pair.lock")
    assert (found.kv_memory, found.graphs, found.temperature) == (2**21, False, 1)
    assert found.stop_token_ids == (1, 2)
    assert (found.chat_template_kwargs, found.thinking) == ({"a": 1}, ("on", "off"))
    monkeypatch.setenv("DFLASH_GRAPHS", "yes")
    monkeypatch.setenv("DFLASH_BENCH_CONCURRENCY", "1,4")
    assert (request("eval-acceptance").graphs, request("bench").concurrency) == (True, (1, 4))


def test_a_default_is_not_a_typed_option(project: Path) -> None:
    """validate refuses typed options of the run level at other levels."""
    write(project, "num-prompts = 8")
    assert request("validate", draft="tiny").num_prompts == 8
    with refuses(UsageError, "options-exclude-each-other", field="--num-prompts"):
        request("validate", draft="tiny", num_prompts="9")


@pytest.mark.parametrize(
    ("text", "id", "field", "found", "line"),
    [
        ("dtpye = 'float32'", "unknown-setting", "dtpye", "float32", 1),
        ("\n[engine]\ntemperature = 0.5", "unknown-setting", "temperature", 0.5, 3),
        ("[generate]\nrounds = 3", "unknown-setting", "rounds", 3, 2),
        ("[enigne]\ndtype = 'auto'", "unknown-setting", "enigne", {"dtype": "auto"}, 1),
        ("[generate]\n\nmax-new-tokens = 0", "wrong-setting", "max-new-tokens", 0, 3),
        ("concurrency = '8'", "wrong-setting", "concurrency", "8", 1),
        ("concurrency = [1, 4]", "wrong-setting", "concurrency", [1, 4], 1),
        ("graphs = 1", "wrong-setting", "graphs", 1, 1),
        ("graphs = 'yes'", "wrong-setting", "graphs", "yes", 1),
        ("dtype = 'float16'", "wrong-setting", "dtype", "float16", 1),
        ("kv-memory = '5 apples'", "wrong-setting", "kv-memory", "5 apples", 1),
        ("chat-template-kwargs = 3", "wrong-setting", "chat-template-kwargs", 3, 1),
        ("stop-token-id = ['a']", "wrong-setting", "stop-token-id", ["a"], 1),
        ("'max-new-tokens' = true", "wrong-setting", "max-new-tokens", True, 1),
        ("output = 'x'", "setting-of-one-run", "output", "x", 1),
        ("force = true", "setting-of-one-run", "force", True, 1),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_key(
    text: str, id: str, field: str, found: Any, line: int, project: Path
) -> None:
    write(project, text)
    done = run_main("generate", "x")
    assert (done.code, done.out, done.error_id, done.field) == (2, "", id, field)
    assert done.error is not None
    assert (done.error.path, done.error.found) == (f"../dflash.toml:{line}", found)
    assert done.error.expected
    assert len([line for line in done.err.splitlines() if line.startswith("error: ")]) == 1


@pytest.mark.parametrize("content", [b"a = ", b"\xff\xfe", b"[a]\n[a]"])
def test_a_file_that_is_not_toml_is_refused(content: bytes, project: Path) -> None:
    (project / "dflash.toml").write_bytes(content)
    done = run_main("inspect", "tiny")
    assert (done.code, done.error_id, done.error and done.error.path) == (2, "settings-not-toml", "../dflash.toml")


def test_a_wrong_variable_is_refused_and_an_unknown_one_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_DTPYE", "x")
    monkeypatch.setenv("DFLASH_HANDOFF_SECRET", "x")
    done = run_main("inspect", "tiny")
    assert (done.code, done.notices) == (0, ("unknown-variable",))
    monkeypatch.setenv("DFLASH_LEVEL", "x")
    done = run_main("validate", "tiny")
    assert (done.code, done.error_id, done.error and done.error.path) == (2, "wrong-setting", "DFLASH_LEVEL")


def test_tables_of_other_commands_are_not_read(project: Path) -> None:
    write(project, "[generate]\nnothing = 1\nmax-new-tokens = 0")
    assert run_main("inspect", "tiny").code == 0
    assert run_main("env").error_id == "unknown-setting"


def test_a_similar_key_is_named(project: Path) -> None:
    write(project, "max_new_tokens = 3\nbatch-size = 4\nno-graphs = true")
    errors = [error for _, error in find_unknown(None, find_settings(COMMANDS), [*COMMANDS], parameters_of_command)]
    guesses = {error.field: (error.hint or "").rpartition(" ")[2].rstrip("?") for error in errors}
    assert guesses == {"max_new_tokens": "max-new-tokens", "batch-size": "concurrency", "no-graphs": "graphs"}


def test_the_environment_lists_each_default_with_its_origin(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(project, "max-new-tokens = 8\n[engine]\ndtype = 'float32'\n")
    monkeypatch.setenv("DFLASH_BENCH_MAX_NEW_TOKENS", "9")
    found = {item.origin: item for item in list_defaults([*COMMANDS], parameters_of_command)}
    assert {origin: (item.option, item.value) for origin, item in found.items()} == {
        "../dflash.toml:1": ("max-new-tokens", 8),
        "../dflash.toml:3": ("dtype", "float32"),
        "DFLASH_BENCH_MAX_NEW_TOKENS": ("max-new-tokens", "9"),
    }
    assert found["DFLASH_BENCH_MAX_NEW_TOKENS"].commands == ("bench",)
    assert "bench" not in found["../dflash.toml:1"].commands
    document = json.loads(run_main("env", "--json").out)
    assert {item["origin"] for item in document["defaults"]} == {*found}


def test_keys_on_one_line_have_their_own_values(project: Path) -> None:
    """Also after the byte order mark with which editors of Windows begin a file."""
    write(project, '\ufeffengine = { dtype = "float32", graphs = false }')
    found = {(item.option, item.value, item.origin) for item in list_defaults([*COMMANDS], parameters_of_command)}
    assert found == {("dtype", "float32", "../dflash.toml:1"), ("graphs", False, "../dflash.toml:1")}


def test_a_run_says_which_defaults_it_uses(project: Path) -> None:
    write(project, "target = 'tiny'\nstrict = true\ndraft = 'tiny'")
    done = run_main("validate", "tiny")
    assert "defaults-used" in done.notices
    assert "../dflash.toml:3" not in done.err, "the draft is typed"
    assert {"../dflash.toml:1", "../dflash.toml:2"} <= {word.strip("(),") for word in done.err.split()}
    assert run_main("inspect", "tiny", "--json").err == "", "--target of inspect is for the memory estimate"
    assert "../dflash.toml:2" in run_main("validate", "--help").out


def test_an_error_about_a_default_names_its_origin(project: Path) -> None:
    write(project, "[eval-acceptance]\nverify-width = 1")
    done = run_main("eval-acceptance")
    assert (done.code, done.field) == (2, "--verify-width")
    assert done.error is not None
    assert "../dflash.toml:2" in (done.error.hint or "")
    typed = run_main("eval-acceptance", "--verify-width", "1").error
    assert typed is not None
    assert "dflash.toml" not in (typed.hint or "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_can_be_set_by_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option is either taken from its variable, or belongs to one run."""
    for item in parameters_of_command(name):
        if not item.flag:
            continue
        option = item.flag.lstrip("-")
        monkeypatch.setenv(variable := f"DFLASH_{name}-{option}".upper().replace("-", "_"), SAMPLES.get(option, "3"))
        settings = [item for item in find_settings(COMMANDS) if item.source == VARIABLE]
        if item.option.is_per_run:
            with refuses(UsageError, "setting-of-one-run", field=item.flag):
                set_defaults(name, [item], settings)
        elif item.choices:
            with refuses(UsageError, "wrong-setting", path=variable):
                set_defaults(name, [item], settings)
        else:
            text = "on" if item.is_switch else SAMPLES.get(option, "3")
            monkeypatch.setenv(variable, text)
            found = set_defaults(name, [item], find_settings(COMMANDS))
            assert found == {item.name: (item.check(True if item.is_switch else item.read(text)), variable)}
        monkeypatch.delenv(variable)


SAMPLES = {"confidence": "0.8", "gpu-memory-utilization": "0.8", "top-p": "0.8", "num-prompts": "8",
           "chat-template-kwargs": '{"a": 1}', "what-if": "kv=fp8", "max-model-len": "64",
           "max-new-tokens": "8", **dict.fromkeys(("kv-memory", "prefix-store-size", "snapshot-memory",
           "max-shard-size"), "3G")}  # fmt: skip
"""Option -> a valid value, if 3 is not valid."""


def test_a_request_class_with_other_defaults_stays_the_same_otherwise(project: Path) -> None:
    write(project, "[generate]\nseed = 3")
    plain = load_command("generate", COMMANDS["generate"]).kind
    changed: type[Request] = command("generate").kind
    assert issubclass(changed, plain)
    assert [item.name for item in parameters_of(changed)] == [item.name for item in parameters_of(plain)]
    assert [item.name for item in parameters_of(changed) if item.origin] == ["seed"]
