"""The documents name things that exist, generated pages are current, and the shown commands run."""

import ast
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from dflash_cli.main import COMMANDS
from dflash_cli.terminal import documentation
from dflash_cli.terminal.command_line import COMMON, JSON, load_command
from dflash_cli.terminal.requests import Verb, parameters_of
from dflash_testing import hub_server
from dflash_testing.command_line import IMPORT_PATHS, Outcome, run_main
from dflash_testing.hub_uploads import WRITER
from dflash_testing.paths import ROOT
from dflash_testing.searches import shorten_search

README_LINES = 150
OTHER_PROJECTS = {"gemma4_causal.py", "model.py", "models/dflash/core.py"}
"""Files of SGLang, z-lab's 0.1.0 and speculators that pages name."""
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MIN_COMMANDS = {"docs/explanation/shapes.md": 1, "docs/how-to/tuning.md": 2}
"""Least number of commands of a page, if fewer than 3."""
SHELL = set("|<>;&$`")
"""A command line with one of these characters needs a shell."""


@dataclass(frozen=True)
class Shown:
    """A command of a console block: the line after `$ `, the documented exit code, and the lines of its output."""

    line: str
    code: int
    output: tuple[str, ...] = ()


def console_commands(text: str) -> list[Shown]:
    """Every `$ ` line of the fenced `console` blocks, in order. Lines that end with a backslash are joined.

    A comment states an exit code other than 0: `$ dflash validate draft  # exit 3`.
    """
    shown = []
    for block in re.findall(r"^```console\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
            line, *output = part.splitlines()
            ended = re.search(r"\s# exit (\d+)$", line)
            shown.append(Shown(line, int(ended[1]) if ended else 0, tuple(item for item in output if item != "...")))
    return shown


def suite() -> set[str]:
    """The name of every test function of the suite."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^ *def (test_\w+)\(", file.read_text(), re.MULTILINE)}


def test_every_failure_has_a_test_that_exists() -> None:
    text = documentation.text("failures")
    named = set(re.findall(r"`(test_\w+)`", text))
    assert len(named) >= 40
    assert named <= suite(), sorted(named - suite())


def test_architecture_names_every_module() -> None:
    """The page names each module of the runtime's folder, each folder of `dflash_cli` and of its probe."""
    text = documentation.text("architecture")
    modules = [file.name for file in (ROOT / "runtime" / "dflash_runtime").glob("*.py") if file.name != "__init__.py"]
    product = ROOT / "dflash_cli"
    folders = [
        f"{item.relative_to(product)}/"
        for item in (*product.iterdir(), *(product / "probing").iterdir())
        if item.is_dir() and item.name[0] not in "._"
    ]
    missing = [name for name in [*modules, *folders] if name not in text]
    assert not missing


def test_the_drawing_of_the_architecture_names_no_absent_path() -> None:
    """Every file and folder in the drawing exists, in the package under which it stands."""
    drawing = re.findall(r"^```\n(dflash_cli/.*?)^```$", documentation.text("architecture"), re.MULTILINE | re.DOTALL)[
        0
    ]
    home, absent, num_seen = ROOT, [], 0
    for line in drawing.splitlines():
        paths = re.findall(r"[\w/]+(?:/|\.py)(?=\s|$)", re.split(r" {3,}", line.strip())[0])
        if not line.startswith(" "):
            home = ROOT / paths[0]
        absent += [path for path in paths[not line.startswith(" ") :] if not (home / path).exists()]
        num_seen += len(paths)
        assert home.is_dir(), line
    assert num_seen > 40
    assert not absent


def test_tests_and_modules_that_pages_name_exist() -> None:
    """Every `file.py` in a code span is the end of a path of this repository, or a file of another project."""
    files = [f"/{file.relative_to(ROOT)}" for file in ROOT.rglob("*.py")]
    for document in DOCUMENTS:
        for name in re.findall(r"`([\w/-]+\.py)(?:::\w+)*`", document.read_text(encoding="utf-8")):
            assert name in OTHER_PROJECTS or any(file.endswith(f"/{name}") for file in files), f"{document}: {name}"


def python_blocks() -> list[tuple[str, str]]:
    """Page and code of every fenced Python block."""
    return [
        (str(document.relative_to(ROOT)), block)
        for document in DOCUMENTS
        for block in re.findall(
            r"^```python\n(.*?)^```$", document.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        )
    ]


@pytest.mark.parametrize(("document", "code"), python_blocks(), ids=lambda value: value.partition("\n")[0][:40])
def test_python_blocks_import_and_call_what_exists(document: str, code: str) -> None:
    """Imported names exist, and their calls fit their signatures or request classes."""
    tree = ast.parse(code)
    names: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            names.update({item.name: getattr(module, item.name) for item in node.names})
    assert names, document
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            called = names[node.func.id]
            keywords = {item.arg: None for item in node.keywords if item.arg is not None}
            if isinstance(called, Verb):
                assert not node.args
                assert keywords.keys() <= {item.name for item in parameters_of(cast(Any, called.kind))}
            else:
                inspect.signature(called).bind(*node.args, **keywords)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("document", "code"), python_blocks(), ids=lambda value: value.partition("\n")[0][:40])
def test_python_blocks_run(document: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that names a path or an address of the reader's own is not run."""
    if "path/to" in code or "://" in code:
        pytest.skip(f"{document} needs files or a peer of the reader's own")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, document, "exec"), {})


def test_console_blocks_are_found() -> None:
    text = "```console\n$ dflash a \\\n  --b\nout\n$ c | d  # exit 3\n```\n```sh\n$ not run\n```\n"
    assert console_commands(text) == [Shown("dflash a    --b", 0, ("out",)), Shown("c | d  # exit 3", 3)]


def test_shown_output_is_compared_but_for_its_numbers() -> None:
    assert is_printed("3.4 [3.2, 4] of 8, vllm serve .../tiny", "5.1 [1, 2.75] of 8, vllm serve /a/b/tiny --k")
    assert not is_printed("3.4 of 8", "3.4, at most 8")


@pytest.mark.parametrize(
    ("document", "is_whole"),
    [
        ("README.md", False),
        pytest.param("docs/tutorial.md", False, marks=pytest.mark.slow),
        ("docs/how-to/replay.md", False),
        ("docs/how-to/lock.md", False),
        ("docs/how-to/gguf.md", False),
        ("docs/how-to/memory.md", False),
        ("docs/reference/kv-transfer.md", False),
        *(
            pytest.param(document, True, marks=pytest.mark.slow)
            for document in (
                "README.md",
                "docs/tutorial.md",
                "docs/how-to/replay.md",
                "docs/how-to/publishing.md",
                "docs/how-to/hand-offs.md",
                "docs/how-to/comparing.md",
                "docs/how-to/prompts.md",
                "docs/how-to/tuning.md",
                "docs/how-to/structured-output.md",
                "docs/how-to/other-targets.md",
                "docs/explanation/shapes.md",
            )
        ),
    ],
)
def test_documents_run_when_pasted(
    document: str, is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command of a page's console blocks runs, in order, in one empty directory, on fewer prompts by default."""
    monkeypatch.chdir(tmp_path)
    if not is_whole:
        shorten_search(monkeypatch, "rope")
    provide_files(document, tmp_path)
    run_page(document, tmp_path, is_whole=is_whole)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the hub's library
@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_release_is_checked_and_uploaded_as_its_page_says(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub then holds the draft's files, the card with the result's section, and the profile, in one commit."""
    page, tiny, work = "docs/how-to/release.md", ROOT / "dflash_cli" / "tiny", tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    shutil.copy(tiny / "prompts.jsonl", work)
    with hub_server.serving() as hub:
        env = hub_server.environment(hub, tmp_path / "home") | {"HF_TOKEN": WRITER}
        for repo, folder in {"draft-next": "draft", "draft": "draft-reduced", "target": "target"}.items():
            hub.add(f"acme/{repo}", tiny / folder)
        with hub_server.connected(env | {"HF_HUB_DISABLE_UPDATE_CHECK": "1"}):
            run_page(page, work, is_whole=is_whole)
        stored, subjects = hub.repos["acme/draft"], hub.uploads.subjects
    own = {item.name: item.read_bytes() for item in (tiny / "draft").iterdir()}
    made = {name: stored[name] for name in stored.keys() - own.keys()}
    assert stored == own | made
    assert made.keys() == {"README.md", "speculation_profile.json"}
    assert len(subjects) == 1
    result = json.loads((work / "result.json").read_text())
    length = f"{result['acceptance_len']:.3f}"
    assert made["README.md"] == (work / "draft" / "README.md").read_bytes()
    assert f"acceptance length {length} [" in made["README.md"].decode()
    assert "dflash eval-acceptance acme/draft --target acme/target" in made["README.md"].decode()
    profile = json.loads(made["speculation_profile.json"])
    assert profile["mean_accept_length"] == pytest.approx(result["acceptance_len"], abs=1e-6)


def run_page(document: str, home: Path, *, is_whole: bool) -> None:
    """Run every command of a page in `home`, and compare exit codes and shown lines."""
    commands = console_commands((ROOT / document).read_text())
    assert len(commands) >= MIN_COMMANDS.get(document, 3)
    for shown in commands:
        outcome = paste(shown.line if is_whole else with_fewer_prompts(shown), home)
        assert outcome.code == shown.code, f"{shown.line}\n{outcome.err}"
        for line in shown.output:
            assert is_printed(line, outcome.out + outcome.err), f"{line}\n{outcome.out}{outcome.err}"


def provide_files(document: str, home: Path) -> None:
    """Write the files that a page takes as given: another program's result, rows of a dataset, a draft with a fault."""
    if document == "docs/how-to/comparing.md":
        result = {"request_throughput": 2.5, "model_id": "org/tiny", "spec_decode_acceptance_length": 3.412}
        counts = {"spec_decode_num_drafts": 2366, "spec_decode_accepted_tokens": 5707}
        rates = {"spec_decode_per_position_acceptance_rates": [0.77, 0.57, 0.42, 0.3, 0.19, 0.11, 0.05]}
        (home / "vllm.json").write_text(json.dumps(result | counts | rates))
    elif document == "docs/how-to/prompts.md":
        shutil.copytree(ROOT / "dflash_cli" / "tiny" / "target", home / "other")
        rows = [{"question": f"What is {n} plus {n}?", "answer": f"Add them. #### {n + n}"} for n in range(16)]
        (home / "made").mkdir()
        (home / "made" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif document == "docs/how-to/other-targets.md":
        shutil.copy(ROOT / "dflash_cli" / "tiny" / "prompts.jsonl", home)
        shutil.copytree(ROOT / "examples", home / "examples", ignore=shutil.ignore_patterns("benchmarks"))
    elif document == "docs/how-to/structured-output.md":
        page = (ROOT / document).read_text()
        (home / "piece.json").write_text(page.partition("```json\n")[2].partition("```")[0])
    elif document == "docs/how-to/tuning.md":
        shutil.copy(ROOT / "examples" / "step_times" / "qwen3-8b-h200.json", home)
    elif document == "docs/explanation/shapes.md":
        run_main("convert", "tiny", str(home / "off"), "--to", "native")
        config = home / "off" / "config.json"
        config.write_text(config.read_text().replace("1000000", "10000"))


def is_printed(shown: str, printed: str) -> bool:
    """Whether the printed text contains the shown line. Numbers may differ, and `...` stands for any text."""
    pieces = [re.escape(piece) for piece in without_numbers(shown).split("...")]
    return re.search(".*".join(pieces), without_numbers(printed)) is not None


def without_numbers(text: str) -> str:
    return re.sub(r"[-+]?\d+(\.\d+)?", "N", text)


def with_fewer_prompts(shown: Shown) -> str:
    """The command with fewer prompts or checks. A gate that the page shows as met gets a threshold that is met."""
    words = shlex.split(shown.line, comments=True)
    if "dump" in words:
        return f"{shown.line} -n 12"
    if "replay" in words:
        return shown.line
    if "eval-acceptance" in words:
        gate = " --min-acceptance 1" if "--min-acceptance" in words and shown.code == 0 else ""
        return f"{shown.line.partition(' #')[0]} -n 12{gate}"
    if "bench" in words:
        return shown.line.replace("-n 32", "-n 12")
    if "diagnose" in words:
        return shown.line.partition(" #")[0].replace("--num-prompts 8", "--num-prompts 6 -n 16")
    if "push" in words:
        return f"{shown.line} --level headers"
    if "--level run" in shown.line:
        return f"{shown.line.partition(' #')[0]} --num-prompts 4"
    return shown.line


def paste(line: str, home: Path) -> Outcome:
    """Run one command: `dflash` in this process, also with its output in a file, unless the line needs a shell."""
    words = shlex.split(line, comments=True)
    quoted = re.sub(r"'[^']*'", "", line.partition(" # exit ")[0])
    if words[0] == "dflash" and not SHELL & set(quoted):
        return run_main(*words[1:])
    if words[0] == "dflash" and words.count(">") == 1 and not SHELL & set(quoted.replace(">", "", 1)):
        at = words.index(">")
        outcome = run_main(*words[1:at], *words[at + 2 :])
        (home / words[at + 1]).write_text(outcome.out)
        return replace(outcome, out="")
    script = home / ".bin" / "dflash"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dflash_cli "$@"\n')
    script.chmod(0o755)
    folders = os.pathsep.join([str(script.parent), os.environ["PATH"], str(Path(sys.executable).parent)])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env={**os.environ, **IMPORT_PATHS, "PATH": folders},
        capture_output=True,
        text=True,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_pictures_are_small_and_free_of_paths() -> None:
    """`scripts/pictures.py` draws the README's pictures."""
    shown = re.findall(r"\((docs/pictures/[^)]+)\)", (ROOT / "README.md").read_text())
    assert sorted(shown) == sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs" / "pictures").iterdir())
    for name in shown:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert len(text) < 100_000
        assert not re.search(r"/(home|tmp|work|root|Users)/", text)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link names a file or folder of the repository, and its anchor a heading of that file."""
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    for link in links:
        name, _, anchor = link.partition("#")
        if not re.match(r"[a-z]+:", link):
            page = document.parent / name if name else document
            assert page.exists(), link
            assert not anchor or anchor in anchors(page), link


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    ("script", "topic"),
    [("command_table.py", "commands"), ("exit_codes.py", "exit-codes"), ("schema_table.py", "schemas")],
)
def test_generated_pages_are_current(script: str, topic: str) -> None:
    """The pages of checks and targets are compared in `test_explain.py` and `test_targets.py`."""
    assert runpy.run_path(str(ROOT / "scripts" / script))["render"]() == documentation.text(topic)


def documented_commands(text: str) -> list[tuple[str, list[str]]]:
    """Command and long flags of every `dflash COMMAND ...` in the code blocks and code spans of a page."""
    blocks = "\n".join(re.findall(r"^ *```\w*\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL))
    lines = [*blocks.replace("\\\n", " ").splitlines(), *re.findall(r"`([^`\n]+)`", text)]
    found = [re.search(r"(?:^|&& |\$ |: |fix )dflash ([a-z][a-z-]+)((?: .*)?)$", line) for line in lines]
    return [(item[1], re.findall(r"(?<=\s)--[a-z][\w-]*", item[2])) for item in found if item is not None]


def test_documented_commands_are_found() -> None:
    text = "Use `dflash tune D --rounds 6`.\n```sh\npip install . && dflash generate \\\n  --trace 3\n```\n"
    assert documented_commands(text) == [("generate", ["--trace"]), ("tune", ["--rounds"])]


def test_documented_flags_exist() -> None:
    """Every long flag that a page shows after `dflash COMMAND` is a flag of that command."""
    flags = {
        name: {
            flag
            for item in (*parameters_of(load_command(name, entry).kind), JSON, *COMMON)
            for flag in (*item.flags, item.option.off)
        }
        for name, entry in COMMANDS.items()
    }
    unknown, num_seen = [], 0
    for document in DOCUMENTS:
        for name, shown in documented_commands(document.read_text(encoding="utf-8")):
            num_seen += 1
            unknown += [f"{document.name}: dflash {name} {flag}" for flag in shown if flag not in flags.get(name, ())]
            unknown += [f"{document.name}: dflash {name}"] * (name not in flags)
    assert num_seen > 150
    assert not unknown


def test_the_table_of_exit_codes_is_complete() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "exit_codes.py"))
    assert {kind.exit_code for kind in script["errors"]()} <= script["MEANINGS"].keys()


def test_the_index_leads_to_every_page() -> None:
    links = re.findall(r"\]\(([^)#\s]+)", documentation.text("index"))
    linked = {Path(link).stem for link in links}
    assert linked >= documentation.topics().keys() - {"index"}


def test_paths_of_pages_in_the_code_exist() -> None:
    """Docstrings, messages and help name pages by their path. Other projects' paths are not checked."""
    own = {*documentation.topics(), *documentation.SECTIONS}
    for folder in ("dflash_cli", "runtime", "kernels", "examples", "scripts", "tests"):
        for file in (ROOT / folder).rglob("*.py"):
            for path in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
                is_own = path.split("/")[1].removesuffix(".md") in own
                assert not is_own or (ROOT / path).exists(), f"{file}: {path}"
