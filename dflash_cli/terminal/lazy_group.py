"""Commands in a table: a name, where its function is, and a line about it. A module is imported when its command is
asked for, so that `--help` costs no more than the table."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from dflash_cli.terminal import console
from dflash_cli.terminal.help_page import usage_pieces, write_examples, write_page, write_rows, write_text
from dflash_cli.terminal.interruption import turned_into_errors
from dflash_cli.terminal.parameters import COMMON, DRAFT_OPTION, Parameter, Signature, read_signature
from dflash_runtime.errors import UsageError

IS_COMMAND = "dflash_cli.is_command"
"""The key of a context under which is kept whether a command follows, with nothing but switches before it."""
SWITCHES = {flag for item in COMMON for flag in item.flags}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the command table.

    `function` is `module:name`. `draft` is the argument that `--draft` may stand for. A hidden entry is an old name.
    """

    function: str
    section: str
    summary: str
    examples: tuple[str, ...] = ()
    docs: str | None = None
    draft: str | None = None
    is_hidden: bool = False


class LazyGroup(TyperGroup):
    """A group whose commands come from a table; a subclass sets it."""

    table: Mapping[str, Entry] = {}
    examples: tuple[str, ...] = ()
    docs: str | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        """The names that help and completion show."""
        return [name for name, entry in self.table.items() if not entry.is_hidden]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, its module imported; None where the table has no such name."""
        entry = self.table.get(cmd_name)
        return load_command(cmd_name, entry) if entry is not None else None

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """As Typer does, which must not see an interruption: it would end without a word."""
        with turned_into_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """As Typer does; see `make_context`."""
        with turned_into_errors():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """With nothing typed, show help, and exit as for wrong use; `help COMMAND` is `COMMAND --help`."""
        if args[:1] == ["help"] and not ctx.resilient_parsing:
            args = [*args[1:], "--help"]
        if not args and not ctx.resilient_parsing:
            console.error_text(self.get_help(ctx))
            raise typer.Exit(2)
        command = next((word for word in args if word not in SWITCHES), None)
        ctx.meta[IS_COMMAND] = command in self.table
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        """The group's own options; before a command only its switches, so that Typer has no text to read.

        For reading text it imports pydantic, which takes longer than a help page.
        """
        everything = super().get_params(ctx)
        if not ctx.meta.get(IS_COMMAND):
            return everything
        return [item for item in everything if SWITCHES & set(item.opts)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names.

        Raises:
            UsageError: there is none.
        """
        name = args[0]
        if name not in self.table and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            guess = f"; did you mean {close[0]}?" if close else ""
            raise UsageError(f"no command {name!r}{guess}", hint=f"{ctx.command_path} --help lists the commands")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Commands by section, from the table alone."""
        formatter.write_usage(ctx.command_path, "[OPTIONS] COMMAND [ARGS]...")
        write_text(formatter, self.help or "")
        write_examples(formatter, self.examples)
        for section in dict.fromkeys(entry.section for entry in self.table.values()):
            rows = [
                (name, entry.summary)
                for name, entry in self.table.items()
                if entry.section == section and not entry.is_hidden
            ]
            write_rows(formatter, section, rows)
        records = (item.get_help_record(ctx) for item in self.get_params(ctx))
        write_rows(formatter, "Options", [record for record in records if record is not None])
        if self.docs is not None:
            write_text(formatter, f"More: {self.docs}", indent=0)


class PlainCommand(TyperCommand):
    """A command that reads its values and draws its help from its own signature."""

    entry: Entry
    signature: Signature

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the arguments as Typer does, then read each value.

        Raises:
            UsageError: a value that cannot be read, or one that is missing.
        """
        typed = list(args)
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            ctx.params.update(read_values(self.signature, ctx.params, typed))
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The page that `help_page` draws."""
        write_page(
            formatter,
            command=ctx.command_path,
            text=self.help or "",
            signature=self.signature,
            examples=self.entry.examples,
            docs=self.entry.docs,
        )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The pieces of the usage line, as the help page draws them."""
        return usage_pieces(self.signature.parameters)


def load_command(name: str, entry: Entry) -> PlainCommand:
    """Import a command's module and make Typer's form of its function."""
    module, _, attribute = entry.function.partition(":")
    signature = read_signature(getattr(import_module(module), attribute), draft=entry.draft)
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    kind = attribute.replace("_", "-")
    app.command(name, cls=PlainCommand, help=signature.function.__doc__)(_callback(signature, kind))
    command = typer.main.get_command(app)
    assert isinstance(command, PlainCommand)
    command.entry, command.signature = entry, signature
    return command


def read_values(signature: Signature, typed: Mapping[str, Any], arguments: list[str]) -> dict[str, Any]:
    """Values by parameter name, from what Typer split the arguments into.

    Raises:
        UsageError: a value that cannot be read, or one that is missing.
    """
    given = dict(typed)
    if signature.draft is not None and given[DRAFT_OPTION] is not None:
        _shift_arguments(signature, given, given[DRAFT_OPTION])
    values: dict[str, Any] = {}
    for item in signature.parameters:
        spelling = item.spelling(arguments)
        values[item.name] = item.read(given[item.name], spelling)
        if item.is_required and values[item.name] is None:
            raise UsageError(f"{spelling} is missing{_expectation(item)}")
    return values


def _shift_arguments(signature: Signature, given: dict[str, Any], draft: str) -> None:
    """Put a draft that came by `--draft` before the other arguments, each of which moves one place on."""
    names = [item.name for item in signature.parameters if not item.flags]
    texts = [draft, *(given[name] for name in names if given[name] is not None)]
    if len(texts) > len(names):
        raise UsageError(f"the draft is given twice: {texts[1]} as an argument and {draft} by --draft")
    given.update(dict.fromkeys(names, None) | dict(zip(names, texts, strict=False)))


def _expectation(item: Parameter) -> str:
    if item.choices:
        return f": expected one of {item.metavar.replace('|', ', ')}"
    return f": {item.help[0].lower()}{item.help[1:].rstrip('.')}" if item.help else ""


def _is_typed(ctx: typer.Context, name: str, value: object) -> bool:
    """Whether a parameter stands in the command line. Typer 0.26 says so of arguments that do not, without a value."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE" and value not in (None, (), [])


def _callback(signature: Signature, kind: str) -> Any:
    """The function that Typer calls; its signature is what Typer sees of the command, `kind` that of its documents."""
    import inspect

    def run(ctx: typer.Context, **values: Any) -> None:
        if signature.draft is not None:
            del values[DRAFT_OPTION]
        # What stands before the command's name has been set by now; here it is only added to.
        quiet, verbose, debug = (values.pop(item.name) for item in COMMON)
        console.configure(quiet=quiet or None, verbosity=2 if debug else 1 if verbose else None, kind=kind)
        signature.call(values, {name for name, value in values.items() if _is_typed(ctx, name, value)})

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *(item.for_typer() for item in signature.parameters)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.__doc__ = signature.function.__doc__
    return run
