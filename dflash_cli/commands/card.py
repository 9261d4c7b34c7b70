"""`dflash card`: the part of a model card that says what a draft gives, and how it is served."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ForceOption, JsonOption
from dflash_runtime.errors import CheckpointNotFound, DFlashError, UsageError

if TYPE_CHECKING:
    from dflash_cli.comparing.stored_evaluation import StoredEvaluation
    from dflash_cli.publishing.card_insertion import Insertion

HERE = re.compile(r"""[\s"']/\w""")
"""How a command shows that it names a folder of the machine it was made on."""

ResultArg = Annotated[Path, typer.Argument(metavar="RESULT", help="A file that eval-acceptance --json has written.")]
OutputOption = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write a card to FILE. Default: stdout.")
]
InsertOption = Annotated[
    Path | None,
    typer.Option(
        "--insert",
        metavar="README",
        help="Put block and metadata into a card that is there, in place of those of an earlier time; the rest stays.",
        show_default=False,
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="ORG/REPO", help="The draft's name on the Hub. Default: as measured.", show_default=False
    ),
]
BaseModelOption = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        metavar="ORG/REPO",
        help="The target's name on the Hub. Default: as measured.",
        show_default=False,
    ),
]
EngineOption = Annotated[
    str, typer.Option("--engine", "-e", metavar="NAME,...", help="Engines whose command is shown; none for no engine.")
]


def card(
    result: ResultArg,
    output: OutputOption = None,
    insert: InsertOption = None,
    name: NameOption = None,
    base_model: BaseModelOption = None,
    engine: EngineOption = "vllm,sglang",
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the part of a model card that says what a draft gives: figures, conditions, and how it is served.

    Its head is YAML metadata with a model-index, as the Hub reads it.
    """
    if output is not None and insert is not None:
        raise UsageError("--output and --insert name two cards, expected one")
    from dflash_cli.comparing.stored_evaluation import read_evaluations
    from dflash_cli.documents.atomic_file import check_output, write_whole
    from dflash_cli.publishing.card_insertion import insert_card
    from dflash_cli.publishing.model_card import make_card

    if output is not None:
        check_output(output, force=force)
    if insert is not None and not insert.is_file():
        raise CheckpointNotFound(f"{insert}: no such file", hint=f"write one with: dflash card {result} -o {insert}")
    stored = read_evaluations([result])[0]
    made = make_card(stored, _serve_commands(stored, engine, name, base_model), name=name, base_model=base_model)
    written = insert_card(_read(insert) if insert is not None else "", made)
    _tell(written, insert)
    place = insert or output
    if place is not None:
        write_whole(place.resolve(), written.text.encode())
    if as_json:
        document = {"metadata": dict(made.metadata), "block": made.block, "left": list(written.left)}
        console.result_json({"output": None if place is None else str(place), **document})
    else:
        console.result(written.text if place is None else f"{place}\n", end="")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 at byte {error.start}") from error


def _tell(written: "Insertion", insert: Path | None) -> None:
    if written.left:
        console.note(f"{insert} states {', '.join(written.left)} itself, which is left as it is")


def _serve_commands(
    stored: "StoredEvaluation", engine: str, name: str | None, base_model: str | None
) -> dict[str, str]:
    """The command of each engine that serves the pair; a pair that cannot be looked at has none, and that is said."""
    if engine == "none":
        return {}
    from dflash_cli.engines.pair_serving import find_serve_commands
    from dflash_cli.engines.serving_engine import parse_engines

    settings, engines = stored.evaluation.settings, parse_engines(engine)
    num_drafted = stored.evaluation.total.counts.num_speculative_tokens
    try:
        commands, refusals = find_serve_commands(
            settings.get("draft"), settings.get("target"), engines, num_drafted, names=(name, base_model)
        )
    except DFlashError as error:
        console.warn(f"no command to serve it: {error.message}")
        return {}
    if (name is None or base_model is None) and any(HERE.search(command) for command in commands.values()):
        console.note("the commands name folders of this machine; --name and --base-model say what others call them")
    for text in refusals:
        console.note(f"no command of an engine that does not serve it: {text}")
    return commands
