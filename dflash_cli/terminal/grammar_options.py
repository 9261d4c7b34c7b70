"""Options that make answers follow a grammar or offer tools to the target, as a base of request classes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dflash_cli.documents.reading import read_text
from dflash_cli.terminal.options import refuse_beside
from dflash_cli.terminal.parameters import PROMPTS, SAMPLING, Option
from dflash_cli.terminal.requests import Request
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.errors import UsageError

if TYPE_CHECKING:
    from dflash_runtime.scheduling.grammar import Grammar

OF_GRAMMAR = ("json_schema", "regex", "grammar")
"""The options that give a grammar. A run has at most one."""


@dataclass(frozen=True, kw_only=True)
class GrammarOptions(Request):
    """The form that answers must have, and the tools that the target may call."""

    json_schema: Annotated[
        str | None,
        Option(
            metavar="FILE|JSON", group=SAMPLING, is_setting=False,
            help="Answer in JSON that is valid by this schema: a file, or the schema itself. Needs llguidance (extra: "
            "grammar).",
        ),
    ] = None  # fmt: skip
    regex: Annotated[
        str | None,
        Option(
            metavar="REGEX", group=SAMPLING, is_setting=False,
            help="Answer with a text that this regular expression matches as a whole.",
        ),
    ] = None  # fmt: skip
    grammar: Annotated[
        Path | None,
        Option(
            metavar="FILE", group=SAMPLING, is_setting=False, help="Answer with a text of the Lark grammar in FILE."
        ),
    ] = None
    tools: Annotated[
        Path | None,
        Option(
            metavar="FILE", group=PROMPTS, is_setting=False,
            help="Pass the JSON list of tools in FILE to the chat template, for prompts without tools of their own.",
        ),
    ] = None  # fmt: skip

    def check(self) -> None:
        super().check()
        given = [f"--{name.replace('_', '-')}" for name in OF_GRAMMAR if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(
                f"{' and '.join(given)} exclude each other", id="options-exclude-each-other", field=given[1],
                hint=f"leave out {given[1]}",
            )  # fmt: skip
        if given:
            refuse_beside(self, ("ignore_eos",), f"{given[0]}, because a stop token ends the answer")
            refuse_beside(self, ("tensor_parallel",), f"{given[0]}, which runs on one GPU")

    @property
    def has_grammar(self) -> bool:
        """Whether answers follow a grammar."""
        return any(getattr(self, name) is not None for name in OF_GRAMMAR)

    @property
    def answer_grammar(self) -> "Grammar | None":
        """The grammar that answers follow, or None.

        Raises:
            CheckpointNotFound: a file does not exist.
            UsageError: a file cannot be read, or the schema is not a JSON object.
        """
        from dflash_runtime.scheduling.grammar import Grammar

        if self.json_schema is not None:
            return Grammar("json_schema", _schema_text(self.json_schema))
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return Grammar("lark", read_text(self.grammar)) if self.grammar is not None else None

    @property
    def given_tools(self) -> Sequence[Mapping[str, Any]] | None:
        """The tools of --tools, or None.

        Raises:
            CheckpointNotFound: the file does not exist.
            UsageError: it cannot be read, or is not a JSON list of objects.
        """
        if self.tools is None:
            return None
        try:
            tools = loads(read_text(self.tools))
        except ValueError:
            tools = None
        if not (isinstance(tools, list) and tools and all(isinstance(item, dict) for item in tools)):
            found, expected = str(self.tools), "a file with a JSON list of one or more tools"
            raise UsageError(id="tools-not-a-list", field="--tools", found=found, expected=expected)
        return tools


def _schema_text(given: str) -> str:
    """The text of a schema, which is given itself or as a file."""
    is_text = given.lstrip()[:1] in ("{", "")
    text = given if is_text else read_text(Path(given))
    try:
        schema = loads(text)
    except ValueError:
        schema = None
    if not isinstance(schema, dict):
        raise UsageError(
            id="schema-not-an-object", field="--json-schema", found=given, expected="a JSON object, or a file with one"
        )
    return text
