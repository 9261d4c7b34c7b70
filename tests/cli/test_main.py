"""The command line as a program: start-up, the command table, one-line messages, -q and -v."""

import contextlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dflash_cli import __version__
from dflash_cli.checkpoints.references import BUNDLED_DRAFTS, tiny_directory
from dflash_cli.main import COMMANDS, app
from dflash_cli.terminal import completion
from dflash_cli.terminal.command_line import all_commands
from dflash_runtime.documents import to_json
from dflash_runtime.kv_transfer.handoff import Handoff, HandoffHeader, TensorSpec
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.paths import ROOT

PATHS = os.pathsep.join(str(ROOT / folder) for folder in (".", "runtime", "kernels"))


def python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": PATHS, **(env or {})}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=env, cwd=cwd)


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


PROMPTED = ("generate", "bench", "tune", "eval-acceptance")
"""Commands that run prompts with a pair."""

REFUSED: Mapping[int, tuple[list[str], ...]] = {
    2: (
        ["generate", "x", "-k", "8"], ["generate", "x", "--verify-width", "9"],
        ["generate", "x", "--stop-token-id", "99999"], ["generate", "x", "--max-model-len", "9999"],
        ["bench", "-k", "8"], ["tune", "-k", "3,8"], ["eval-acceptance", "-k", "8"],
        ["eval-acceptance", "--workers", "0"], ["dump", "tiny", "--taps", "6", "--output", "dump"],
        ["generate", "x", "--device", "cudaa"], ["bench", "--device", "tpu"], ["generate", "x", "--dtype", "float16"],
        ["generate", "x", "--top-p", "3"], ["generate", "--dataset", "humanevl"], ["tune", "-e", "vlm"],
        ["eval-acceptance", "--context-lengths", "2048"], ["eval-acceptance", "--verify-width", "99"],
        ["validate", "tiny", "-e", "vlm"], ["convert", "tiny", "there.jsonl", "--to", "native"],
        ["serve-command", "tiny", "-e", "vlm"], ["probe", "http://127.0.0.1:9", "-e", "vlm"], ["explain", "C999"],
        # a pair that is not complete, or not of these roles
        *([name, "-t", "tiny"] for name in ("bench", "tune", "eval-acceptance")), ["generate", "x", "-t", "tiny"],
        ["generate", "x", "-d", "copy"], ["bench", "copy"], ["tune", "copy"], ["eval-acceptance", "copy"],
        ["diagnose", "copy"], ["validate", "copy", "--level", "run"],
        ["generate", "x", "-d", "copy", "-t", "tiny:dspark"],
        # options that exclude or need each other
        ["generate", "x", "--tree", "8", "--draft-sampling", "probabilistic"],
        ["generate", "x", "-k", "0", "--tree", "4"],
        ["eval-acceptance", "--tree", "8", "--draft-sampling", "probabilistic"], ["tune", "--tree", "8", "--budget"],
        ["eval-acceptance", "--gate", "lower"], ["probe", "http://127.0.0.1:9", "--gate", "lower"],
        ["generate", "x", "--thinking", "on"], ["eval-acceptance", "--exact-match", "both"],
        ["bench", "--temperature", "1"], ["bench", "--min-speedup", "-1"], ["eval-acceptance", "--min-acceptance", "0"],
        # files that cannot be read or written
        *([name, "-p", "bad.jsonl"] for name in PROMPTED), ["diagnose", "tiny", "-p", "bad.jsonl"],
        ["probe", "http://127.0.0.1:9", "-p", "bad.jsonl"], ["probe", "http://127.0.0.1:9", "--output", "absent/x"],
        ["generate", "x", "--output", "absent/rows.jsonl"], ["generate", "x", "--output", "bad", "--force"],
        ["eval-acceptance", "--output", "there.jsonl"], ["eval-acceptance", "--output", "bad", "--force"],
        ["eval-acceptance", "--min-acceptance", "2", "--gate-out", "absent/x"],
        ["bench", "--min-speedup", "2", "--gate-out", "absent/x"],
        ["tune", "--output", "absent/x"], ["tune", "--output", "there.jsonl"], ["tune", "--output", "tuned"],
        ["tune", "--step-times", "there.jsonl"], ["tune", "--what-if", "draft=int3"],
        # prompts that no target takes, and a folder without hand-offs
        *([name, "-p", "empty.jsonl"] for name in PROMPTED), ["generate", ""], ["generate", "--handoff-in", "copy"],
        ["generate", "x", "--handoff-out", "absent/x"], ["generate", "x", "--handoff-out", "there.jsonl"],
        ["eval-acceptance", "--prefix-store", "there.jsonl"], ["report", "there.jsonl"],
        ["report", "none.json", "-o", "absent/x.html"], ["compare", "there.jsonl", "there.jsonl"],
        # a target without a tokenizer, devices that no machine has, addresses, and more positions than a pair has
        ["generate", "x", "-d", "copy", "-t", "mute"], ["eval-acceptance", "copy", "-t", "mute"],
        ["generate", "x", "--device-map", "gpus"], ["generate", "x", "--device-map", "empty.json"],
        ["generate", "x", "--handoff-in", "gloo://host"], ["generate", "x", "--handoff-out", "nccl://host:x"],
        ["inspect", "copy", "--target", "whole", "--max-model-len", "99999"],
    ),
    3: (
        ["generate", "--handoff-in", "garbled"],
        ["generate", "x", "--draft", "bad"], ["bench", "bad"], ["convert", "bad", "out", "--to", "vllm"],
        ["diagnose", "bad", "--target", "tiny"], ["bench", "wide", "-t", "tiny"],
        # a draft without a tensor
        ["generate", "x", "-d", "lacking", "-t", "tiny"],
        ["eval-acceptance", "--disaggregated", "--prefill-draft", "lacking"],
        *([name, "lacking", "-t", "tiny"] for name in ("bench", "tune", "eval-acceptance")),
        # a target without weights
        ["generate", "x", "-d", "copy", "-t", "bare"], ["dump", "bare", "--taps", "1", "--output", "dump"],
        *([name, "copy", "-t", "bare"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        # a target without one tensor, with one of integers, and with a tokenizer that is not JSON
        *([name, "copy", "-t", "halved"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        ["generate", "x", "-k", "0", "-t", "halved"], ["dump", "halved", "--taps", "1", "--output", "dump"],
        ["generate", "x", "-d", "copy", "-t", "integers"], ["generate", "x", "-d", "copy", "-t", "mumbling"],
        ["generate", "--handoff-in", "damaged"],
    ),
    4: (
        *([name, "-p", "none.jsonl"] for name in PROMPTED), ["diagnose", "tiny", "-p", "none.jsonl"],
        ["validate", "tiny", "--level", "run", "-p", "none.jsonl"], ["generate", "x", "--draft", "org/none"],
        *([name, "org/none"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        *([name, "org/none", "-t", "tiny"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        ["eval-acceptance", "--mode", "replay", "--dump", "none"],
        ["dump", "org/none", "--taps", "1", "--output", "dump"], ["validate", "org/none", "--level", "run"],
        ["generate", "x", "--tools", "none.json"], ["generate", "x", "--json-schema", "none.json"],
        ["generate", "x", "--handoff-in", "none"], ["generate", "x", "--device-map", "none.json"],
        ["tune", "--step-times", "none.json"], ["diagnose", "tiny", "--expected", "none.json"],
        ["eval-acceptance", "--disaggregated", "--prefill-draft", "org/none"],
        ["eval-acceptance", "--lock", "none.lock"],
        ["probe", "http://127.0.0.1:9", "--result", "none.json"], ["report", "none.json"],
        ["compare", "none.json", "none.json"],
    ),
    5: (
        ["eval-acceptance", "--workers", "2"], ["generate", "x", "--tree", "4", "--draft", "tiny:dspark"],
        ["tune", "tiny:dspark", "--tree", "4"], ["diagnose", "copy", "-t", "copy"],
        # a target that nothing runs here, and settings that no kernels compute
        ["generate", "x", "-d", "copy", "-t", "unknown"], ["dump", "unknown", "--taps", "1", "--output", "dump"],
        *([name, "copy", "-t", "unknown"] for name in ("bench", "tune", "eval-acceptance", "diagnose")),
        *([name, "--kernels", "triton", "--dtype", "float64"] for name in ("bench", "tune", "eval-acceptance")),
        ["generate", "x", "--tensor-parallel", "3"],
        ["generate", "x", "--target-runtime", "transformers-cache", "--tree", "4"],
    ),
}  # fmt: skip
"""Exit code -> commands that are refused before anything is loaded."""


def make_targets(home: Path) -> None:
    """Write copies of the bundled target, each with one fault, and one without faults."""
    name = b"model.layers.1.self_attn.k_proj.weight"
    whole = shutil.copytree(tiny_directory() / "target", home / "whole")
    weights = (whole / "model.safetensors").read_bytes()
    start = weights.index(b'"BF16"', weights.index(name))
    for folder, changed in {
        "halved": weights.replace(name, name.replace(b"k_proj", b"x_proj"), 1),
        "integers": weights[:start] + b' "I16"' + weights[start + 6 :],
    }.items():
        shutil.copytree(whole, home / folder)
        (home / folder / "model.safetensors").write_bytes(changed)
    shutil.copytree(whole, home / "mute", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(whole, home / "mumbling")
    (home / "mumbling" / "tokenizer.json").write_text('{"version": ')


def make_damaged_handoff(folder: Path) -> None:
    """Write a hand-off with a sound header and unreadable tensors."""
    handoff = Handoff(key="a", fingerprint={}, prompt_token_ids=(1,), output_token_ids=(2,), params=SamplingParams(),
                      seed=0)  # fmt: skip
    header = HandoffHeader(handoff=handoff, tensors={"target": TensorSpec("float32", (1,), 0)}).sealed
    folder.mkdir(parents=True)
    (folder / "handoff.json").write_text(json.dumps(to_json(header)))
    (folder / "kv.safetensors").write_text("no tensors in here")


def test_refusals_come_before_torch(tmp_path: Path) -> None:
    """One process without torch and Ray. A command that imports torch ends in another error than the expected one.

    No command says that it loads a pair, because nothing is loaded.
    """
    script = "\n".join([
        "import json, sys, time", "sys.modules |= dict.fromkeys(('torch', 'ray'))", "from dflash_cli.main import main",
        "for arguments in json.loads(sys.argv[1]):", "    sys.argv = ['dflash', *arguments]",
        "    started = time.process_time()", "    try: main()", "    except SystemExit as end:",
        "        print(json.dumps([arguments, end.code, time.process_time() - started]))",
    ])  # fmt: skip
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    (tmp_path / "there.jsonl").write_text("x")
    (tmp_path / "bad.jsonl").write_text('{"promp": "x"}')
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n{"prompt_token_ids": [99999]}')
    (tmp_path / "garbled" / "a").mkdir(parents=True)
    (tmp_path / "garbled" / "a" / "handoff.json").write_text("{")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"block_size": ')
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "whole-7.jsonl").touch()
    shutil.copytree(tiny_directory() / "draft", tmp_path / "copy")
    wide = shutil.copytree(tmp_path / "copy", tmp_path / "wide")
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    lacking = shutil.copytree(tmp_path / "copy", tmp_path / "lacking")
    tensors = (lacking / "model.safetensors").read_bytes()
    (lacking / "model.safetensors").write_bytes(tensors.replace(b'"norm.weight"', b'"nurm.weight"', 1))
    unknown = shutil.copytree(tiny_directory() / "target", tmp_path / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "hyena"}))
    make_targets(tmp_path)
    make_damaged_handoff(tmp_path / "damaged" / "a")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps(config))
    wanted = [[arguments, code] for code, commands in REFUSED.items() for arguments in commands]
    done = python("-c", script, json.dumps([arguments for arguments, _ in wanted]), env=environment, cwd=tmp_path)
    assert [json.loads(line)[:2] for line in done.stdout.splitlines()] == wanted, done.stderr
    told = [
        line for line in done.stderr.splitlines() if "needs torch" in line or line.startswith(("loading", "asking"))
    ]
    assert not told
    slow = [line for line in done.stdout.splitlines() if json.loads(line)[2] > 2.0]
    assert not slow, "processor seconds, of which the first command imports most modules"


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("dflash generate --help-", {"--help-all"}),
        ("dflash convert a b --to ml", {"mlx"}),
        ("dflash docs loc", {"lock"}),
        ("dflash validate tiny --level h", {"headers"}),
        ("dflash validate tiny -e vllm@0.3", {f"vllm@0.3{digit}" for digit in "0123"}),
        ("dflash validate tiny -e sg", {"sglang", "sglang@0.5.23"}),
        ("dflash validate tiny -e sglang,tr", {"sglang,transformers", "sglang,transformers@5.23"}),
        ("dflash explain C0", {f"C0{digit}" for digit in range(10)}),
        ("dflash validate tiny --ignore C01,V9", set()),
        ("dflash bench --dataset m", {"math500", "mbpp", "mt-bench"}),
        ("dflash bench --dataset-format spec", {"specdec-bench", "specforge"}),
        ("dflash validate tiny:", {"tiny:reduced", "tiny:dflash2", "tiny:dspark"}),
        ("dflash bench -d tiny:d", {"tiny:dflash2", "tiny:dspark"}),
        ("dflash bench -t t", {"tiny"}),
        ("dflash schema vali", {"validate", "validate-handoff"}),
        ("dflash validate tiny : d", {"dflash2", "dspark"}),
        ("dflash validate tiny :", {"reduced", "dflash2", "dspark"}),
        ("dflash validate tiny : dspark -e vllm @ 0.33", {"0.33"}),
        ("dflash validate tiny --engine = sg", {"sglang", "sglang@0.5.23"}),
        ("dflash validate --target =", {"tiny"}),
        ("dflash bench --draft = tiny : d", {"dflash2", "dspark"}),
    ],
)
def test_words_are_completed(typed: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """bash splits words at colons and at signs, and replaces only the last part."""
    values = {"_DFLASH_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    monkeypatch.setattr(os, "environ", os.environ | values)
    assert set(support.run_main().out.split()) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("dflash inspect tiny:d", {"tiny:dflash2", "tiny:dspark"}),
        ("dflash validate tiny -e vllm@0.3", {f"vllm@0.3{digit}" for digit in "0123"}),
        ("dflash explain C1", {f"C1{digit}" for digit in range(10)}),
        ("dflash bench --dataset m", {"math500", "mbpp", "mt-bench"}),
        ("dflash generate --draft-sa", {"--draft-sampling"}),
        ("dflash prob", {"probe"}),
    ],
)
def test_zsh_and_fish_are_given_words(
    shell: str, typed: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The protocol of both shells: the line in a variable, words and their help as text. zsh reads escaped colons."""
    monkeypatch.setenv("_DFLASH_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", typed)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    offered = support.run_main().out
    zsh = {word.replace("\\\\:", ":") for word in re.findall(r'(?:[(][(]|\n)"([^"]+)"', offered)}
    assert (zsh if shell == "zsh" else {line.partition("\t")[0] for line in offered.splitlines()}) >= expected
    assert len(offered.splitlines()) <= 2 * len(expected)
    if typed == "dflash prob":
        assert COMMANDS["probe"].summary[:15] in offered


def test_words_come_from_what_is_registered() -> None:
    """Each source of words is a function that lists them."""
    for source in completion.WORDS.values():
        assert completion._words(source)
    assert {*completion._words(completion.WORDS["DRAFT"])} == {*BUNDLED_DRAFTS}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_a_name_with_a_colon(tmp_path: Path) -> None:
    """An interactive bash on a terminal of its own, as a user has it."""
    import pty

    script = tmp_path / "completion.bash"
    program = tmp_path / "dflash"
    program.write_text(f"#!{sys.executable}\nfrom dflash_cli.main import main\nmain()\n")
    program.chmod(0o755)
    environment = os.environ | {"PYTHONPATH": PATHS, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    shown = subprocess.run(
        [program], env=environment | {"_DFLASH_COMPLETE": "source_bash"}, capture_output=True, text=True, check=True
    )
    script.write_text(shown.stdout)
    master, other = pty.openpty()
    typed = f"source {script}; cd {tmp_path}\ndflash inspect tiny:ds\t > found; exit\n"
    process = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"], stdin=other, stdout=other, stderr=other,
        env=environment | {"TERM": "dumb"}, start_new_session=True,
    )  # fmt: skip
    os.close(other)
    os.write(master, typed.encode())
    with contextlib.suppress(OSError):  # the terminal closes with bash
        while os.read(master, 4096):
            pass
    process.wait(60)
    os.close(master)
    assert "DSpark" in (tmp_path / "found").read_text()


def processor_seconds(*arguments: str) -> float:
    """Processor time of one run. Other work on the machine changes it less than the elapsed time."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": PATHS},
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
    done = support.run_main(*arguments)
    assert (done.code, done.out, done.error_id, done.field) == (2, "", id, field)
    first, *rest = done.err.splitlines()
    assert first.startswith("error: ")
    assert guess in ("", *first.split())
    assert all(item.startswith("hint: ") for item in rest)


@pytest.mark.parametrize(
    "arguments", [["list"], ["models"], ["profile"], *(["generate", "x", flag] for flag in ("--stream", "--tokenizer"))]
)
def test_a_name_that_is_only_alike_by_chance_is_not_guessed(arguments: list[str]) -> None:
    done = support.run_main(*arguments)
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
