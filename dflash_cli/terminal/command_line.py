"""The command line: a table of commands over Typer.

Typer splits the arguments, runs the callback and completes words. The code here does what Typer does not:

- It imports a command's module when the command is called, so that `dflash --help` reads the table alone.
- It reads values by the request class, so that Python and the command line check them alike and a wrong value is one
  line with the field, the value and the expected form. Typer would import pydantic to convert them.
- It draws help pages as plain text: examples and essential options first, all options with --help-all.
- It takes a draft as the first argument or by --draft.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from dflash_cli.terminal import console, help_page
from dflash_cli.terminal.interruption import turned_into_errors
from dflash_cli.terminal.requests import OUTPUT, Option, Parameter, Request, parameters_of
from dflash_runtime.errors import UsageError

IS_COMMAND = "dflash_cli.is_command"
"""The context's key that says whether a command follows, with only switches before it."""
HELP_ALL = "--help-all"


def _switch(name: str, flag: str, text: str, short: str = "") -> Parameter:
    option = Option(flag=flag, short=short, help=text, group=OUTPUT, is_setting=False)
    return Parameter(name, bool, option, is_list=False, is_optional=False, default=False)


JSON = _switch("as_json", "--json", "Print one JSON document instead of text.")
COMMON = (
    _switch("quiet", "--quiet", "Print only results, warnings and errors.", "-q"),
    _switch("verbose", "--verbose", "Log to stderr what is read and decided.", "-v"),
    # A switch and not a count: for a count Typer imports pydantic.
    _switch("debug", "-vv", "Log every detail to stderr."),
)
"""The switches that every command takes, before or after its name."""
SWITCHES = {flag for item in COMMON for flag in item.flags}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the command table: `function` is `module:name`, `docs` the topic of `dflash docs` about it."""

    function: str
    section: str
    summary: str
    examples: tuple[str, ...] = ()
    docs: str | None = None
    has_json: bool = True


class CommandTable(TyperGroup):
    """A group whose commands come from `table`, which a subclass sets."""

    table: Mapping[str, Entry] = {}
    examples: tuple[str, ...] = ()
    docs: str | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.table.get(cmd_name)
        return load_command(cmd_name, entry) if entry is not None else None

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """As Typer, which ends silently when it sees an interruption: so interruptions become errors first."""
        with turned_into_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """See `make_context`."""
        with turned_into_errors():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without arguments, print help and exit as for wrong use; `help COMMAND` is `COMMAND --help`."""
        if args[:1] == ["help"] and not ctx.resilient_parsing:
            args = [*args[1:], "--help"]
        if not args and not ctx.resilient_parsing:
            console.error_text(self.get_help(ctx))
            raise typer.Exit(2)
        command = next((word for word in args if word not in SWITCHES), None)
        ctx.meta[IS_COMMAND] = command in self.table
        return super().parse_args(ctx, args)

    def get_params(self, ctx: Any) -> Any:
        """The group's own options; before a command only its switches, for which Typer does not import pydantic."""
        everything = super().get_params(ctx)
        if not ctx.meta.get(IS_COMMAND):
            return everything
        return [item for item in everything if SWITCHES & set(item.opts)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names.

        Raises:
            UsageError: there is no such command.
        """
        name = args[0]
        if name not in self.table and not ctx.resilient_parsing:
            close = difflib.get_close_matches(name, self.table, n=1)
            raise UsageError(
                f"unknown command {name!r}" + (f"; did you mean {close[0]}?" if close else ""),
                id="unknown-command",
                found=name,
                hint=f"{ctx.command_path} --help lists the commands",
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, entry in self.table.items():
            sections.setdefault(entry.section, []).append((name, entry.summary))
        records = [item.get_help_record(ctx) for item in self.get_params(ctx)]
        sections["Options"] = [record for record in records if record is not None]
        usage = f"{ctx.command_path} [OPTIONS] COMMAND [ARGS]..."
        formatter.write(
            help_page.draw(usage, self.help or "", self.examples, sections, help_page.more(self.docs, ctx.command_path))
        )


class RequestCommand(TyperCommand):
    """A command that reads its request from the arguments."""

    entry: Entry
    kind: type[Request]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*parameters_of(self.kind), *([JSON] if self.entry.has_json else []), *COMMON)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        if HELP_ALL in own and not ctx.resilient_parsing:
            console.result(self._page(ctx, is_full=True), end="")
            raise typer.Exit
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(self._page(ctx, is_full=False))

    def _page(self, ctx: Any, *, is_full: bool) -> str:
        return help_page.draw_command(
            ctx.command_path, self.help or "", self.parameters, self.entry.examples, self.entry.docs, is_full=is_full
        )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return help_page.usage_pieces(self.parameters)


def load_command(name: str, entry: Entry) -> RequestCommand:
    """Import a command's module and make the command that Typer runs."""
    module, _, attribute = entry.function.partition(":")
    function = getattr(import_module(module), attribute)
    kind = request_class(function)
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command(name, cls=RequestCommand, help=kind.__doc__)(_callback(name, entry, function, kind))
    command = typer.main.get_command(app)
    assert isinstance(command, RequestCommand)
    command.entry, command.kind = entry, kind
    return command


def request_class(function: Callable[..., None]) -> type[Request]:
    """The request class that a command's function takes."""
    found: type[Request] = get_type_hints(function)["request"]
    return found


def read_request(kind: type[Request], typed: Mapping[str, Any]) -> Request:
    """The request of typed texts by parameter name; None or an empty list stands for an absent text.

    Raises:
        UsageError: a text cannot be read, an argument is missing, or options contradict each other.
    """
    parameters = parameters_of(kind)
    given = _moved_up(parameters, typed)
    values = {}
    for item in parameters:
        if given[item.name] not in (None, (), []):
            values[item.name] = item.read(given[item.name])
        elif item.is_required:
            raise UsageError(
                f"{item.title} is missing: {item.option.text[:1].lower()}{item.option.text[1:].rstrip('.')}",
                id="missing-argument",
                field=item.title,
                found=MISSING,
            )
    return kind(**values)


def _moved_up(parameters: tuple[Parameter, ...], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Texts by name, with an argument that came by its flag put before the others, which move up by one."""
    given = {name: value for name, value in typed.items() if not name.startswith(BY_FLAG)}
    for item in parameters:
        text = typed.get(BY_FLAG + item.name)
        if text is None:
            continue
        names = [other.name for other in parameters if other.is_argument]
        texts = [text, *(given[name] for name in names if given[name] is not None)]
        if len(texts) > len(names):
            raise UsageError(
                f"the draft is given twice: {texts[1]} as an argument and {text} by {item.flag}",
                id="draft-given-twice",
                field=item.flag,
                found=text,
            )
        given.update(dict.fromkeys(names, None) | dict(zip(names, texts, strict=False)))
    return given


BY_FLAG = "by_flag_"
"""The prefix of the name under which Typer hands over an argument that came by its flag."""


def _callback(name: str, entry: Entry, function: Callable[..., None], kind: type[Request]) -> Any:
    """The function that Typer calls. Its signature is the command's options as Typer sees them."""

    def run(**values: Any) -> None:
        # Switches before the command's name are set by now; here they are only added to.
        quiet, verbose, debug = (values.pop(item.name) for item in COMMON)
        verbosity = 2 if debug else 1 if verbose else None
        console.configure(quiet=quiet or None, verbosity=verbosity, json=bool(values.pop(JSON.name, None)))
        function(read_request(kind, values))

    parameters: list[inspect.Parameter] = []
    for item in (*parameters_of(kind), *([JSON] if entry.has_json else []), *COMMON):
        parameters += _for_typer(item)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _for_typer(item: Parameter) -> list[inspect.Parameter]:
    """A parameter as Typer sees it: explicit flags, and text as the value. An argument with a flag is two."""
    text: Any = list[str] | None if item.is_list else str | None
    option, found = item.option, []
    if item.is_argument:
        found.append((item.name, text, typer.Argument(metavar=item.metavar, help=option.text)))
    if item.is_switch:
        flags = ["/".join(filter(None, (item.flag, option.off))), *filter(None, [option.short])]
        found.append((item.name, bool | None, typer.Option(*flags, help=option.text)))
    elif item.flags:
        name = (BY_FLAG if item.is_argument else "") + item.name
        info = typer.Option(*item.flags, metavar=item.metavar, help=option.text, autocompletion=_completion(item))
        found.append((name, text, info))
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])
        for name, kind, info in found
    ]


def _completion(item: Parameter) -> Callable[..., Any] | None:
    choices = list(item.choices)
    return item.option.complete or ((lambda: choices) if choices else None)
