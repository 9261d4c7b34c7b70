"""The command line as a program: start-up, the command table, one-line messages, -q and -v."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dflash_cli import __version__
from dflash_cli.main import COMMANDS, app
from dflash_cli.terminal.command_line import all_commands
from dflash_testing.command_line import IMPORT_PATHS, run_main


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | IMPORT_PATHS
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=env)


def dflash(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "dflash_cli", *arguments)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_line_of_the_table_names_a_function(name: str) -> None:
    module = importlib.import_module(f"dflash_cli.commands.{name.replace('-', '_')}")
    assert callable(module.command)


def test_every_module_of_a_command_is_in_the_table() -> None:
    assert sorted(COMMANDS) == sorted(all_commands())


def test_help_imports_nothing_that_takes_long() -> None:
    """One process prints all help pages, the command table first, and the imported modules after each page."""
    names = list(COMMANDS)
    script = "\n".join([
        "import json, sys", "from dflash_cli.main import main", "for arguments in json.loads(sys.argv[1]):",
        "    sys.argv = ['dflash', *arguments, '--help']", "    try: main()",
        "    except SystemExit as end: assert not end.code",
        "    sys.stderr.write(json.dumps([arguments, [*sys.modules]]) + chr(10))",
    ])  # fmt: skip
    done = python("-c", script, json.dumps([[], *([name] for name in names)]))
    first, *others = [json.loads(line) for line in done.stderr.splitlines()]
    assert [arguments for arguments, _ in others] == [[name] for name in names]
    for arguments, found in (first, *others):
        slow = {"rich", "pydantic", "asyncio", "torch", "transformers", "numpy", "huggingface_hub"} & {*found}
        assert not slow, arguments
    assert not {name for name in first[1] if name.startswith("dflash_cli.commands")}


def processor_seconds(*arguments: str) -> float:
    """Processor time of one run. Other work on the machine changes it less than the elapsed time."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | IMPORT_PATHS,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, code, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(("arguments", "limit"), [([], 2), (["generate"], 3.5), (["convert"], 4.5)])
def test_help_is_there_at_once(arguments: list[str], limit: float) -> None:
    """Compared with an import of Typer by processor time beyond a bare interpreter, in the best of five tries."""

    def beyond_bare(*command: str) -> float:
        return processor_seconds(*command) - processor_seconds("-c", "pass")

    tries = (
        beyond_bare("-m", "dflash_cli", *arguments, "--help") / beyond_bare("-c", "import typer.main") for _ in range(5)
    )
    assert any(ratio < limit for ratio in tries)


FLAGS = {
    "--batch-size": "--concurrency", "--bs": "--concurrency", "--limit": "--num-prompts",
    "--num-samples": "--num-prompts",
    "--max_new_tokens": "--max-new-tokens", "--max-tokens": "--max-new-tokens", "--model": "--target",
    "--MODEL": "--target", "--out": "--output", "--tp": "--tensor-parallel", "--cuda": "--device",
    "--format": "--json", "--speculative-model": "--draft", "--gpu-memory": "--gpu-memory-utilization",
}  # fmt: skip
WORDS = {
    "eval": "eval-acceptance", "evaluate": "eval-acceptance", "serve": "serve-command", "check": "validate",
    "run": "generate", "publish": "report", "version": "env", "Validate": "validate", "benchmark": "bench",
    "gen": "generate", "compare-results": "compare", "download": "pull",
}  # fmt: skip
"""Flags and commands as people type them -> the ones that they mean."""


@pytest.mark.parametrize(
    ("arguments", "id", "field", "guess"),
    [
        (["generat"], "unknown-command", None, "generate?"),
        (["generate", "x", "-n", "0"], "usage-error", "--max-new-tokens", "1"),
        (["generate", "x", "--drat", "y"], "unknown-option", "--drat", "--draft?"),
        *((["generate", "x", flag, "8"], "unknown-option", flag, f"{meant}?") for flag, meant in FLAGS.items()),
        *(([word], "unknown-command", None, f"{meant}?") for word, meant in WORDS.items()),
        (["generate", "x", "-k"], "missing-value", "-k", ""),
        (["generate", "x", "--device"], "missing-value", "--device", ""),
        (["env", "a", "b"], "unexpected-argument", None, "a"),
        (["inspect"], "missing-argument", "REF", "directory,"),
        (["eval-acceptance", "tiny", "--gate", "lowr"], "usage-error", "--gate", "lower"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_plain_line_and_exit_2(arguments: list[str], id: str, field: str | None, guess: str) -> None:
    done = run_main(*arguments)
    assert (done.code, done.out, done.error_id, done.field) == (2, "", id, field)
    first, *rest = done.err.splitlines()
    assert first.startswith("error: ")
    assert guess in ("", *first.split())
    assert all(item.startswith("hint: ") for item in rest)


@pytest.mark.parametrize(
    "arguments", [["list"], ["models"], ["profile"], *(["generate", "x", flag] for flag in ("--stream", "--tokenizer"))]
)
def test_a_name_that_is_only_alike_by_chance_is_not_guessed(arguments: list[str]) -> None:
    done = run_main(*arguments)
    assert (done.code, "?" in done.err) == (2, False)


def test_nothing_typed_shows_help_as_wrong_use() -> None:
    done = dflash()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: ")


@pytest.mark.parametrize("name", [[], ["generate"], ["convert"]])
def test_help_of_a_command_may_be_asked_for_by_name(name: list[str]) -> None:
    asked, shown = CliRunner().invoke(app, ["help", *name]), CliRunner().invoke(app, [*name, "--help"])
    assert asked.exit_code == 0
    assert asked.stdout == shown.stdout
    assert asked.stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["inspect", "tiny"], "inspect"),
        (["inspect", "tiny", "tiny:reduced"], "inspect"),
        (["validate", "tiny"], "validate"),
        (["explain"], "explain"),
        (["env"], "env"),
        (["serve-command", "tiny", "--engine", "vllm"], "serve-command"),
        (["convert", "tiny", "out", "--to", "speculators", "--target-name", "a/b", "--dry-run"], "convert"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_document_says_what_it_is(arguments: list[str], kind: str) -> None:
    document = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert list(document)[:2] == ["schema_version", "kind"]
    assert document["kind"] == kind


@pytest.mark.parametrize("arguments", [["tiny"], ["--draft", "tiny"], ["-d", "tiny"]])
@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_a_draft_is_an_argument_or_an_option(command: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, [command, *arguments, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)


@pytest.mark.parametrize("arguments", [["-q", "inspect", "tiny"], ["inspect", "tiny", "-q"]])
def test_quiet_may_stand_before_or_after_the_command(arguments: list[str]) -> None:
    from dflash_cli.terminal import console

    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert console.is_quiet()
    assert CliRunner().invoke(app, ["inspect", "tiny"]).exit_code == 0
    assert not console.is_quiet()


def test_commands_are_shown_with_the_name_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyPI's dflash brings a script of that name too, which a printed command must not start."""
    from dflash_cli.main import main
    from dflash_cli.terminal import console

    typed = {"/bin/dflash": "dflash", "/bin/dflash-cli": "dflash-cli", "dflash_cli/__main__.py": "python -m dflash_cli"}
    for path, name in typed.items():
        monkeypatch.setattr(sys, "argv", [path, "eval-acceptance", "--mode", "replay"])
        with pytest.raises(SystemExit):
            main()
        assert f"hint: write one with {name} dump\n" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["/bin/dflash-cli", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert '  dflash-cli generate "def' in capsys.readouterr().out
    kept = "dflash 0.1.0, org/dflash convert, my-dflash convert, dflash is not on PATH"
    assert console.as_typed(kept) == kept
    console.name_commands("dflash", [])


def test_version() -> None:
    assert dflash("--version").stdout == f"dflash {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["generate", "x"], "torch"),
        (["generate", "x"], "tokenizers"),
        (["generate", "x", "--target-runtime", "transformers"], "transformers"),
    ],
)
def test_a_missing_library_is_named_with_how_to_install_it(arguments: list[str], module: str) -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name.split('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.argv = ['dflash', *{arguments!r}]\n"
        "from dflash_cli.main import main\nmain()\n"
    )
    done = python("-c", code)
    assert done.returncode == 5, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("loading ")]
    assert len(said) == 2
    assert said[0].startswith("error: ")
    assert module in said[0]
    assert "'dflash-cli[gpu]'" in said[1]
