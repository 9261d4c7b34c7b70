"""The command table, the Typer app over it, and the one place that turns errors into messages."""

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.command_line import CommandTable, Entry, make_app
from dflash_cli.terminal.completion import words_for, words_of_bash
from dflash_cli.terminal.interruption import (
    ReaderGone,
    discard,
    open_closed_streams,
    signal_exit_code,
    signals_raise,
    turned_into_errors,
)
from dflash_cli.version import __version__
from dflash_runtime.errors import CapacityError, DFlashError, UnsupportedError, UsageError, unreadable
from dflash_runtime.phrases import closest
from dflash_runtime.whole_files import NotWritten

RUN = "Run a pair"
CHECK = "Look at a draft"
DEPLOY = "Convert and serve"
ABOUT = "About"

COMMANDS = {
    "generate": Entry(
        section=RUN,
        summary="Generate text with a pair: a target and the draft made for it.",
        examples=(
            'dflash generate "def fibonacci(n):" -n 64',
            "dflash generate -d org/draft -t org/model --chat -p prompts.jsonl -o out.jsonl",
            "dflash generate -d org/draft -p prompts.jsonl --handoff-out handed",
        ),
        docs="prompts",
        also=("run", "chat", "complete"),
    ),
    "eval-acceptance": Entry(
        section=RUN,
        summary="Measure how many tokens a pair commits in each step.",
        examples=(
            "dflash eval-acceptance tiny --num-prompts 12",
            "dflash eval-acceptance org/draft -p prompts.jsonl --chat -o answers.jsonl",
            "dflash eval-acceptance org/draft --mode replay --dump D --head-from org/model",
            "dflash eval-acceptance org/draft -p prompts.jsonl --workers 8",
            "dflash eval-acceptance org/draft --disaggregated",
        ),
        docs="definitions",
        also=("eval", "evaluate", "acceptance", "measure"),
    ),
    "compare": Entry(
        section=RUN,
        summary="Compare measured acceptance lengths, paired by prompt.",
        examples=(
            "dflash compare old.json new.json",
            "dflash compare old.json new.json --tolerance 0.1 --gate no-regression",
        ),
        docs="comparing",
        also=("diff",),
    ),
    "report": Entry(
        section=RUN,
        summary="Write a report on measured acceptance: HTML, SVG, PDF, PNG, Markdown or CSV.",
        examples=(
            "dflash report result.json -o report.html",
            "dflash report old.json new.json -o report.csv",
            "dflash report old.json new.json --figure positions -o figure.pdf",
        ),
        docs="publishing",
        also=("publish", "plot"),
    ),
    "dump": Entry(
        section=RUN,
        summary="Keep a target's text and hidden states to judge drafts without the target.",
        examples=(
            "dflash dump org/model --taps-from org/draft -p prompts.jsonl -o dump",
            "dflash dump org/model --taps 1,9,17,25,33 -p prompts.jsonl -o dump",
        ),
        docs="replay",
        also=("capture", "extract"),
    ),
    "probe": Entry(
        section=RUN,
        summary="Check whether a running server's draft is engaged, and its acceptance length.",
        examples=(
            "dflash probe http://localhost:8000",
            "dflash probe http://localhost:8000 -p prompts.jsonl --result own.jsonl",
            "dflash probe http://localhost:30000 --beside http://localhost:8000",
        ),
        docs="probe",
        also=("server", "ping"),
    ),
    "bench": Entry(
        section=RUN,
        summary="Measure how much faster a pair decodes with its draft.",
        examples=(
            "dflash bench tiny --concurrency 1,4",
            "dflash bench org/draft -p prompts.jsonl --chat --min-speedup 1.5",
        ),
        docs="tuning",
        also=("benchmark", "speedup"),
    ),
    "tune": Entry(
        section=RUN,
        summary="Find out how many tokens to draft, and whether drafting pays.",
        examples=(
            "dflash tune tiny --concurrency 1,4",
            "dflash tune org/draft -p prompts.jsonl --chat --step-times vllm.json",
            "dflash tune org/draft -p prompts.jsonl --what-if draft=fp8,kv=fp8,target=int4",
        ),
        docs="tuning",
        also=("search", "optimize"),
    ),
    "diagnose": Entry(
        section=CHECK,
        summary="Find out why few of a draft's tokens are accepted.",
        examples=("dflash diagnose org/draft --target org/model",),
        docs="checks",
        also=("debug", "why", "doctor"),
    ),
    "validate": Entry(
        section=CHECK,
        summary="Check a draft, alone or with its target.",
        examples=(
            "dflash validate org/draft --target org/model --engine vllm,sglang",
            "dflash validate org/draft --target org/model --level run",
        ),
        docs="checks",
        also=("check", "verify", "lint"),
    ),
    "validate-handoff": Entry(
        section=CHECK,
        summary="Check two servers that hand KV over: does the draft's context arrive?",
        examples=("dflash validate-handoff prefill.json decode.json --engine vllm",),
        docs="hand-offs",
    ),
    "inspect": Entry(
        section=CHECK,
        summary="Describe a draft or a target, or compare two.",
        examples=("dflash inspect org/draft", "dflash inspect ./checkpoint-1000 ./checkpoint-2000"),
        docs="formats",
        also=("show", "describe", "info"),
    ),
    "explain": Entry(
        section=CHECK,
        summary="Explain a rule that validate checks.",
        examples=("dflash explain C20",),
        docs="checks",
        also=("rule", "rules"),
    ),
    "convert": Entry(
        section=DEPLOY,
        summary="Convert a draft to another dialect, a checkpoint format.",
        examples=(
            "dflash convert tiny ./out --to speculators --target-name org/model",
            "dflash convert org/draft ./draft-vllm --to vllm --target org/model --dry-run",
        ),
        docs="formats",
    ),
    "serve-command": Entry(
        section=DEPLOY,
        summary="Print the command that serves a pair with an engine such as vLLM.",
        examples=("dflash serve-command org/draft --target org/model --engine vllm",),
        docs="tutorial",
        also=("serve", "launch"),
    ),
    "lock": Entry(
        section=DEPLOY,
        summary="Pin a draft and a target by revision and hash.",
        examples=(
            "dflash lock org/draft --target org/model",
            "dflash eval-acceptance org/draft --lock dflash.lock",
        ),
        docs="lock",
        also=("pin", "freeze"),
    ),
    "card": Entry(
        section=DEPLOY,
        summary="Write a model-card section with measured acceptance.",
        examples=("dflash card result.json", "dflash card result.json --insert README.md"),
        docs="publishing",
        also=("model-card", "readme"),
    ),
    "export": Entry(
        section=DEPLOY,
        summary="Write a measured acceptance in the form of another program.",
        examples=(
            "dflash export result.json --to speculation-profile -o profile.json",
            "dflash export result.json --to vllm-rates",
        ),
        docs="publishing",
    ),
    "pull": Entry(
        section=DEPLOY,
        summary="Download a draft from the hub into a folder, and verify it.",
        examples=("dflash pull org/draft", "dflash pull org/draft@v2 -o ./draft"),
        docs="publishing",
        also=("download", "fetch", "get"),
    ),
    "push": Entry(
        section=DEPLOY,
        summary="Upload a checked draft to the hub, with its card and profile.",
        examples=(
            "dflash push ./draft my-org/draft --result result.json --dry-run",
            "dflash push ./draft my-org/draft --result result.json --private --yes",
        ),
        docs="publishing",
        also=("upload",),
    ),
    "schema": Entry(
        section=ABOUT,
        summary="Print the JSON Schema of a command's --json document.",
        examples=("dflash schema eval-acceptance",),
        docs="schemas",
        has_json=False,
    ),
    "docs": Entry(
        section=ABOUT,
        summary="Show a page of the documentation.",
        examples=("dflash docs tutorial", "dflash docs checks | grep S09"),
        docs="index",
        has_json=False,
        also=("man", "manual"),
    ),
    "env": Entry(
        section=ABOUT,
        summary="Show versions, GPUs and settings.",
        examples=("dflash env --json",),
        docs="env",
        also=("version", "environment"),
    ),
}


class DFlashCommands(CommandTable):
    """The commands of dflash."""

    table = COMMANDS
    examples = (
        'dflash generate "def fibonacci(n):"     run the bundled pair',
        "dflash eval-acceptance org/draft        measure a draft with its target",
        "dflash COMMAND --help                   options and examples of one command",
    )
    docs = ""


app = make_app(
    DFlashCommands, "dflash", "Convert, validate, run and measure DFlash speculative decoding drafts.", __version__
)


PROGRAMS = {"__main__": "python -m dflash_cli", "dflash-cli": "dflash-cli"}
"""Name of the started file -> the name that the user typed."""
RUNS_MODELS = ("torch", "transformers", "numpy", "tokenizers")
INSTALL = "pip install 'dflash-cli[gpu]', or on a machine without a GPU: pip install torch transformers"
OUTPUT_FAULTS: dict[int, tuple[type[DFlashError], str, str]] = {
    errno.ENOSPC: (CapacityError, "disk-full", "no space left on the device"),
    errno.EDQUOT: (CapacityError, "quota-used-up", "the disk quota is used up"),
    errno.EFBIG: (CapacityError, "file-too-large", "larger than a file may be here"),
    errno.EROFS: (UsageError, "read-only", "is on a read-only file system"),
    errno.ENOTDIR: (UsageError, "parent-is-a-file", "a parent in this path is a file"),
    errno.ENAMETOOLONG: (UsageError, "name-too-long", "a name in this path is too long"),
    errno.EIO: (CapacityError, "device-fails", "the device does not read or write"),
}
"""Errors of the system about files -> error, id and text."""
LOST_NAMES = (
    "ESTALE", "ETIMEDOUT", "ENOTCONN", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO", "EUCLEAN", "ENODEV", "ENXIO",
    "ENOMEDIUM", "ELOOP", "EMFILE", "ENFILE",
)  # fmt: skip
LOST = frozenset(getattr(errno, name) for name in LOST_NAMES if hasattr(errno, name))
"""Errors of a disk, a network disk or a system at its limit, which no program causes. Not every system has them all."""
OUTPUT_HINT = "make room there, or name an output on another disk"
TYPER_USAGE_ERROR: Any = typer.BadParameter.__base__
"""The base class of Typer's usage errors, which Typer does not export."""


def main() -> None:
    """Run the command line. Every foreseen error becomes one line and its documented exit code."""
    open_closed_streams()
    # transformers would warn about texts that are too long. The engine refuses these with an error of its own.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with signals_raise():
        try:
            code = _run()
        except KeyboardInterrupt:  # a second one, while the first is reported
            code = signal_exit_code()
    sys.exit(code)


def _run() -> int:
    """Run the app and return the exit code: 0 also if the reader of stdout ends early, as `head` does."""
    try:
        console.name_commands(PROGRAMS.get(Path(sys.argv[0]).stem, "dflash"), [*COMMANDS, "COMMAND"])
        with turned_into_errors(), words_of_bash():
            return app(standalone_mode=False) or 0
    except ReaderGone:
        discard(sys.stdout)
        return 0
    except Exception as error:
        foreseen = _foreseen(error)
        if foreseen is None:
            raise
        _report(foreseen)
        return foreseen.exit_code


def _report(error: DFlashError) -> None:
    """Print why the command stops, if stderr can be written."""
    try:
        console.error(_with_option(error), error.hint)
    except OSError:
        discard(sys.stderr)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        discard(sys.stdout)


def _with_option(error: DFlashError) -> str:
    """The message, with the option that the user typed in place of the field of the engine's config that it sets."""
    from dflash_cli.terminal.engine_options import options_of_config

    option = options_of_config().get(error.field or "")
    is_named = option is not None and error.message.startswith(f"{error.field}: ")
    return f"{option}{error.message.removeprefix(str(error.field))}" if is_named else error.message


def _foreseen(error: Exception) -> DFlashError | None:
    """The error that is reported as one line, or None for a bug, which shows its traceback."""
    if isinstance(error, DFlashError):
        return error
    if isinstance(error, TYPER_USAGE_ERROR):
        return _usage_error(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in RUNS_MODELS:
        return UnsupportedError(
            f"this command runs models and needs {error.name}, which is not installed",
            id="missing-package",
            found=error.name,
            hint=INSTALL,
        )
    if isinstance(error, OSError) and _is_of_reading(error):
        return unreadable(error.filename, error)
    if isinstance(error, NotWritten) or (isinstance(error, OSError) and error.errno in OUTPUT_FAULTS):
        reason = str(error.strerror or type(error.__cause__).__name__).lower()
        other = (UsageError, "output-not-writable", f"cannot be written: {reason}")
        kind, id, text = OUTPUT_FAULTS.get(error.errno or 0, other)
        notes = getattr(error, "__notes__", [OUTPUT_HINT])
        return kind(text, id=id, path=error.filename or "stdout", hint=notes[0])
    is_of_torch = isinstance(error, RuntimeError) and type(error).__name__ == "OutOfMemoryError"
    if is_of_torch or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        text = str(error).splitlines()[0] if is_of_torch else "out of memory"
        return CapacityError(text, id="out-of-memory", hint="lower --concurrency or --max-model-len")
    return None


def _is_of_reading(error: OSError) -> bool:
    """Whether the system refused to give a file. A writer raises NotWritten, and an error of stdout names no file."""
    is_named = error.filename is not None and error.errno in (errno.EIO, errno.ENOMEM)
    return not isinstance(error, NotWritten) and (isinstance(error, PermissionError) or error.errno in LOST or is_named)


def _usage_error(error: Any) -> UsageError:
    """The error for wrong use that Typer found, on one line."""
    hint = f"{error.ctx.command_path} --help lists the options" if error.ctx is not None else None
    if hasattr(error, "possibilities"):
        name = error.option_name
        known: dict[str, str] = {}
        for item in getattr(getattr(error.ctx, "command", None), "parameters", ()):
            known = {word.lstrip("-"): item.flag for word in item.words} | known
        known |= {flag.lstrip("-"): flag for flag in error.possibilities or ()}
        close = closest(name.lstrip("-").replace("_", "-"), known)
        guess = f"; did you mean {known[close]}?" if close else ""
        return UsageError(f"unknown option {name}{guess}", id="unknown-option", field=name, hint=hint)
    if hasattr(error, "option_name"):
        return UsageError(
            f"{error.option_name}: expected a value", id="missing-value", field=error.option_name, hint=hint
        )
    text = " ".join(error.format_message().split()).rstrip(".")
    surplus = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", text)
    if surplus:
        option = _option_of(getattr(error.ctx, "command", None), surplus[1])
        return UsageError(
            f"unexpected argument: {surplus[1]}", id="unexpected-argument", found=surplus[1], expected=option,
            hint=hint if option is None else f"did you mean {option}?",
        )  # fmt: skip
    return UsageError(text[:1].lower() + text[1:], hint=hint)


def _option_of(command: Any, text: str) -> str | None:
    """The option that a surplus argument is probably a value of: one that knows the word, or the target."""
    parameters = getattr(command, "parameters", ())
    names = [item.name for item in parameters if item.is_argument]
    others = [item for item in parameters if not item.is_argument and item.metavar != "DRAFT"]
    chosen = next((item.flag for item in others if {*text.split(",")} <= {*words_for(item)}), None)
    if chosen is None and names == ["draft"]:
        chosen = next((item.flag for item in parameters if item.name == "target"), None)
    return None if chosen is None or " " in text else f"{chosen} {text}"


if __name__ == "__main__":
    main()
