"""`dflash card`: a model-card section with measured acceptance and the commands that serve the draft."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dflash_cli.terminal import console
from dflash_cli.terminal.options import ResultOptions
from dflash_cli.terminal.parameters import ESSENTIALS, Option
from dflash_cli.terminal.requests import verb
from dflash_cli.terminal.shown import Shown
from dflash_runtime.errors import CheckpointNotFound, DFlashError, UsageError
from dflash_runtime.notices import Notice

if TYPE_CHECKING:
    from dflash_cli.comparing.stored_evaluation import StoredEvaluation
    from dflash_cli.publishing.card_insertion import Insertion
    from dflash_cli.publishing.model_card import CardDocument, ModelCard

HERE = re.compile(r"""[\s"']/\w""")
"""Matches a command with an absolute path, which exists only on this machine."""


@dataclass(frozen=True, kw_only=True)
class CardRequest(ResultOptions):
    """Write a model-card section with measured acceptance: figures, conditions, and how the draft is served.

    The card starts with YAML metadata for the Hub, including a model-index.
    """

    output: Annotated[
        Path | None,
        Option(
            is_per_run=True,
            short="-o",
            metavar="FILE",
            group=ESSENTIALS,
            is_setting=False,
            help="Write a card to FILE. Default: stdout.",
        ),
    ] = None
    insert: Annotated[
        Path | None,
        Option(
            is_per_run=True, metavar="README", group=ESSENTIALS, is_setting=False,
            help="Insert section and metadata into an existing card, and replace earlier ones. Other text stays.",
        ),
    ] = None  # fmt: skip
    draft_name: Annotated[
        str | None,
        Option(metavar="ORG/REPO", group=ESSENTIALS, help="The draft's name on the Hub. Default: as measured."),
    ] = None
    target_name: Annotated[
        str | None,
        Option(metavar="ORG/REPO", group=ESSENTIALS, help="The target's name on the Hub. Default: as measured."),
    ] = None
    engine: Annotated[
        tuple[str, ...],
        Option(short="-e", metavar="NAME,...", group=ESSENTIALS, help="Engines whose command is shown, or none."),
    ] = ("vllm", "sglang")

    def check(self) -> None:
        from dflash_cli.checkpoints.references import check_hub_names

        super().check()
        if self.output is not None and self.insert is not None:
            raise UsageError(
                "--output and --insert name two cards", id="options-exclude-each-other", field="--insert",
                expected="one card", hint="leave out one of them",
            )  # fmt: skip
        check_hub_names({"--draft-name": self.draft_name, "--target-name": self.target_name})


@dataclass(frozen=True, kw_only=True, repr=False)
class WrittenCard(Shown):
    """A card: the section and its metadata, and the whole text with the existing card around them."""

    made: "ModelCard"
    written: "Insertion"
    path: Path | None

    @property
    def text(self) -> str:
        return self.written.text

    @property
    def document(self) -> "CardDocument":
        """The document of `dflash card --json`."""
        from dflash_cli.publishing.model_card import CardDocument

        return CardDocument(
            output=None if self.path is None else str(self.path),
            metadata=self.made.metadata,
            block=self.made.block,
            left=tuple(self.written.left),
        )

    def summary(self) -> list[str]:
        return [f"{self.path or 'not written'}: {len(self.text.splitlines())} lines of a model card"]

    def _repr_markdown_(self) -> str:
        return self.made.block


@verb(CardRequest)
def card(request: CardRequest) -> WrittenCard:
    """Make a card, and write it if `output` or `insert` is given.

    Raises:
        CheckpointNotFound, CheckpointError, UsageError: a file is absent or is not a result, or the output exists.
    """
    from dflash_cli.comparing.stored_evaluation import read_evaluations, refuse_without_draft
    from dflash_cli.documents.atomic_file import check_output, write_whole
    from dflash_cli.documents.reading import read_text
    from dflash_cli.publishing.card_insertion import insert_card
    from dflash_cli.publishing.model_card import make_card

    insert = request.insert
    if request.output is not None:
        check_output(request.output, force=request.force)
    if insert is not None and not insert.is_file():
        raise CheckpointNotFound(
            "no such file", path=insert, id="card-not-found", field="--insert",
            hint=f"write one with: dflash card {request.result} -o {insert}",
        )  # fmt: skip
    stored = read_evaluations([request.result])[0]
    refuse_without_draft(stored)
    commands = _serve_commands(stored, ",".join(request.engine), request.draft_name, request.target_name)
    made = make_card(stored, commands, name=request.draft_name, base_model=request.target_name)
    written = insert_card(read_text(insert) if insert is not None else "", made, insert)
    _tell(written, insert)
    path = insert or request.output
    if path is not None:
        write_whole(path.resolve(), written.text.encode())
    return WrittenCard(made=made, written=written, path=path)


def command(request: CardRequest) -> None:
    """Write the card and print its path, or print the card."""
    found = card(request)
    console.show(found, lambda: console.result_text(found.text if found.path is None else f"{found.path}\n"))


def _tell(written: "Insertion", insert: Path | None) -> None:
    if written.left:
        text = f"{insert} states {', '.join(written.left)} itself, which is left as it is"
        console.note(Notice(text, id="entries-kept"))


def _serve_commands(
    stored: "StoredEvaluation", engine: str, name: str | None, base_model: str | None
) -> dict[str, str]:
    """The serve command of each engine that serves the pair. A pair that cannot be read gives a note instead."""
    if engine == "none":
        return {}
    from dflash_cli.engines.engine_names import parse_engines
    from dflash_cli.engines.pair_serving import find_serve_commands

    settings, engines = stored.evaluation.settings, parse_engines(engine)
    num_drafted = stored.evaluation.total.counts.num_speculative_tokens
    try:
        commands, refusals = find_serve_commands(
            settings.get("draft"), settings.get("target"), engines, num_drafted, names=(name, base_model)
        )
    except DFlashError as error:
        console.warn(Notice(f"no command to serve it: {error.message}", id="no-serve-command"))
        return {}
    if (name is None or base_model is None) and any(HERE.search(command) for command in commands.values()):
        told = "the serve commands name folders of this machine; give --draft-name and --target-name of the Hub"
        console.note(Notice(told, id="folders-in-commands"))
    for text in refusals:
        console.note(Notice(f"the card lacks the command of an engine: {text}", id="engine-left-out"))
    return commands
