"""The words that a shell completes."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_cli.checkpoints.references import BUNDLED_DRAFTS
from dflash_cli.main import COMMANDS
from dflash_cli.terminal import completion
from dflash_testing.command_line import IMPORT_PATHS, run_main


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
    assert set(run_main().out.split()) == expected


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
    offered = run_main().out
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
    environment = os.environ | IMPORT_PATHS | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
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
