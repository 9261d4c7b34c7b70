"""The command line: a table of commands over Typer.

Typer splits the arguments, calls the command and completes words. The code here does what Typer cannot do:

- `CommandTable` imports the module of a command when it is called. Typer would import all commands for `dflash --help`,
  and guesses mistyped names only among imported commands.
- `read_request` reads values by the request class, so that Python and the command line check values alike. A wrong
  value is an error with id, field, found and expected.
- `AsTyped` saves the import of pydantic (0.1 s), which Typer needs for types of values.
- `help_page` shows examples and essential options first, and all options with --help-all. Typer shows all at once.
- `_moved_up` takes the draft as the first argument or by --draft. In Typer a parameter is an argument or an option.
- `CommandTable.parse_args` reads `dflash help COMMAND`, and exits with 2 after the help of a bare `dflash`.
- `turned_into_errors` reports interruptions. Typer ends silently.
"""

import inspect
import json
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from functools import lru_cache
from importlib import import_module
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from dflash_cli.terminal import console, help_page
from dflash_cli.terminal.completion import completion_of
from dflash_cli.terminal.defaults import VARIABLE, find_settings, find_unknown, set_defaults
from dflash_cli.terminal.interruption import turned_into_errors
from dflash_cli.terminal.parameters import OUTPUT, Option, Parameter
from dflash_cli.terminal.requests import Request, json_value, parameters_of, with_defaults
from dflash_runtime.errors import UsageError
from dflash_runtime.notices import Notice
from dflash_runtime.phrases import closest


def _switch(name: str, flag: str, text: str, short: str = "") -> Parameter:
    option = Option(flag=flag, short=short, help=text, group=OUTPUT, is_setting=False)
    return Parameter(name, bool, option, is_list=False, is_optional=False, default=False)


JSON = _switch("as_json", "--json", "Print one JSON document instead of text.")
COMMON = (
    _switch("quiet", "--quiet", "Print only results, warnings and errors.", "-q"),
    _switch("verbose", "--verbose", "Log to stderr what is read and decided.", "-v"),
    _switch("debug", "-vv", "Log every detail to stderr."),
)
"""The switches that every command takes, before or after its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A line of the command table.

    `docs` is the topic of `dflash docs` about the command. `also` are other names that people type for it.
    """

    section: str
    summary: str
    examples: tuple[str, ...] = ()
    docs: str | None = None
    has_json: bool = True
    also: tuple[str, ...] = ()


class AsTyped:
    """Leaves values as Typer split them: text, lists of text, and booleans. The request class reads them.

    Typer's own class for this imports pydantic, even if the option is not given.
    """

    def coerce(self, value: Any, **_: Any) -> Any:
        return value


def _as_typed(parameters: list[Any]) -> list[Any]:
    """The parameters of a Typer command, with values left as typed. Other releases of Typer ignore the attribute."""
    for item in parameters:
        item._runtime_param = AsTyped()
    return parameters


class CommandTable(TyperGroup):
    """A group with the commands of `table`, an attribute that subclasses set."""

    table: Mapping[str, Entry] = {}
    examples: tuple[str, ...] = ()
    docs: str | None = None

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.table)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = self.table.get(cmd_name)
        if entry is None:
            return None
        defaults = {} if ctx.resilient_parsing else self.read_defaults(cmd_name)
        return load_command(cmd_name, entry, defaults)

    def read_defaults(self, command: str) -> dict[str, tuple[Any, str]]:
        """Field -> default and origin, from dflash.toml and variables.

        Raises:
            UsageError: a file cannot be read, a key is unknown, or a value is wrong.
        """
        settings = find_settings(self.table)
        if not settings:
            return {}
        for setting, error in find_unknown(command, settings, [*self.table], parameters_of_command):
            if setting.source != VARIABLE:
                raise error
            console.warn(Notice(f"ignored: {error.message}; {error.hint}", id="unknown-variable", field=setting.origin))
        return set_defaults(command, parameters_of_command(command), settings)

    def get_params(self, ctx: Any) -> Any:
        return _as_typed(super().get_params(ctx))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Turn interruptions into errors, because Typer ends silently on an interruption."""
        with turned_into_errors():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Turn interruptions into errors; see `make_context`."""
        with turned_into_errors():
            return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read `help COMMAND` as `COMMAND --help`. Without arguments, print help and exit with 2."""
        if args[:1] == ["help"] and not ctx.resilient_parsing:
            args = [*args[1:], "--help"]
        if not args and not ctx.resilient_parsing:
            for line in self.get_help(ctx).split("\n"):
                console.error_text(line)
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first argument names.

        Raises:
            UsageError: there is no such command.
        """
        name = args[0]
        if name not in self.table and not ctx.resilient_parsing:
            words = {word: meant for meant, entry in self.table.items() for word in (meant, *entry.also)}
            close = closest(name, words)
            raise UsageError(
                f"unknown command {name!r}" + (f"; did you mean {words[close]}?" if close else ""),
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

    def get_params(self, ctx: Any) -> Any:
        return _as_typed(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(self.page(ctx.command_path, is_full=False))

    def page(self, command: str, *, is_full: bool) -> str:
        """The help page with the essential options, or with all of them."""
        entry = self.entry
        return help_page.draw_command(
            command, self.help or "", self.parameters, entry.examples, entry.docs, is_full=is_full
        )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return help_page.usage_pieces(self.parameters)


def all_commands() -> list[str]:
    """The names of all commands, by their modules."""
    folder = import_module("dflash_cli.commands")
    return [item.name.replace("_", "-") for item in pkgutil.iter_modules(folder.__path__)]


def _function(name: str) -> Callable[..., None]:
    """The function of a command. Modules have the names of their commands."""
    found: Callable[..., None] = import_module(f"dflash_cli.commands.{name.replace('-', '_')}").command
    return found


def parameters_of_command(name: str) -> tuple[Parameter, ...]:
    """The parameters of a command, with their built-in defaults."""
    return parameters_of(request_class(_function(name)))


def load_command(name: str, entry: Entry, defaults: Mapping[str, tuple[Any, str]] | None = None) -> RequestCommand:
    """Import a command's module and make the command that Typer runs. `defaults` are as in `with_defaults`."""
    function = _function(name)
    kind = with_defaults(request_class(function), defaults or {})
    return _make_command(name, entry, function, kind)  # type: ignore[arg-type]  # mypy takes a class for unhashable


@lru_cache(maxsize=64)
def _make_command(name: str, entry: Entry, function: Callable[..., None], kind: type[Request]) -> RequestCommand:
    app = _plain_app(add_completion=False)
    app.command(name, cls=RequestCommand, help=kind.__doc__, short_help=entry.summary)(_callback(entry, function, kind))
    command = typer.main.get_command(app)
    assert isinstance(command, RequestCommand)
    command.entry, command.kind = entry, kind
    return command


def make_app(table: type[CommandTable], name: str, text: str, version: str) -> typer.Typer:
    """The app of a table of commands. It takes the common switches and --version before a command."""

    def show_version(is_asked: bool | None) -> None:
        if is_asked:
            console.result(f"{name} {version}")
            raise typer.Exit

    def root(**values: Any) -> None:
        console.configure(quiet=False, verbosity=0)
        _configure(values)

    option = typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    app = _plain_app(name=name, cls=table, help=text)
    parameters = [*(found for item in COMMON for found in _for_typer(item)), _keyword("version", bool | None, option)]
    app.callback()(_with_parameters(root, parameters))
    return app


def _plain_app(**options: Any) -> typer.Typer:
    """An app of Typer that neither draws help nor tracebacks with Rich."""
    return typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


def _configure(values: dict[str, Any]) -> None:
    """Take the common switches out of `values`, and apply the ones that were given."""
    quiet, verbose, debug = (values.pop(item.name) for item in COMMON)
    verbosity = 2 if debug else 1 if verbose else None
    console.configure(quiet=quiet or None, verbosity=verbosity)


def request_class(function: Callable[..., None]) -> type[Request]:
    """The request class that a command's function takes."""
    found: type[Request] = get_type_hints(function)["request"]
    return found


NOT_TYPED: tuple[Any, ...] = (None, (), [])
"""Values of Typer for a parameter that is not typed."""


def read_request(kind: type[Request], typed: Mapping[str, Any]) -> Request:
    """The request of typed texts by parameter name. None or an empty list means that an option is not given.

    Raises:
        UsageError: a text cannot be read, an argument is missing, or options contradict each other.
    """
    parameters = parameters_of(kind)
    given = _moved_up(parameters, typed)
    values = {}
    for item in parameters:
        if given[item.name] not in NOT_TYPED:
            values[item.name] = item.read(given[item.name])
        elif item.is_required:
            raise UsageError(
                f"{item.title} is missing: {item.option.text[:1].lower()}{item.option.text[1:].rstrip('.')}",
                id="missing-argument",
                field=item.title,
                found=MISSING,
            )
    try:
        return kind(**values)
    except UsageError as error:
        origin = next(
            (item.origin for item in _untyped(parameters, given) if error.field in (item.title, item.name)), ""
        )
        if origin and not error.hint:
            error.hint = f"{error.field} is set in {origin}"
        raise


def _moved_up(parameters: tuple[Parameter, ...], typed: Mapping[str, Any]) -> dict[str, Any]:
    """Texts by name. An argument that is given by its flag comes first, and the other arguments move up by one."""
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
                hint=f"leave out {item.flag}",
            )
        given.update(dict.fromkeys(names, None) | dict(zip(names, texts, strict=False)))
    return given


BY_FLAG = "by_flag_"
"""The prefix of Typer's name for an argument that is given by its flag."""


def _callback(entry: Entry, function: Callable[..., None], kind: type[Request]) -> Callable[..., None]:
    """The function that Typer calls."""

    def run(**values: Any) -> None:
        del values[HELP_ALL.name]
        _configure(values)
        console.configure(json=bool(values.pop(JSON.name, None)))
        try:
            request = read_request(kind, values)
        except UsageError as error:
            if error.id == "missing-argument" and entry.examples:
                error.hint = f"as in: {console.as_typed(entry.examples[0])}"
            raise
        _tell_defaults(request, values)
        function(request)

    items = (*parameters_of(kind), *([JSON] if entry.has_json else []), *COMMON)
    return _with_parameters(run, [*(found for item in items for found in _for_typer(item)), HELP_ALL])


def _tell_defaults(request: Request, typed: Mapping[str, Any]) -> None:
    """Print the options that dflash.toml or a variable decided."""
    found = _untyped(parameters_of(type(request)), _moved_up(parameters_of(type(request)), typed))
    used = [f"{_as_option(item)} ({item.origin})" for item in found if getattr(request, item.name) == item.default]
    if used:
        console.note(Notice(f"defaults: {', '.join(used)}", id="defaults-used"))


def _untyped(parameters: Iterable[Parameter], given: Mapping[str, Any]) -> list[Parameter]:
    """The parameters with a default of dflash.toml or of a variable that are not typed."""
    return [item for item in parameters if item.origin and given[item.name] in NOT_TYPED]


def _as_option(item: Parameter) -> str:
    """`--dtype float32`, `--no-graphs`."""
    if item.is_switch:
        return item.flag if item.default else item.option.off or f"{item.flag} off"
    value = json_value(item.default)
    text = ",".join(map(str, value)) if isinstance(value, list) else json.dumps(value)
    return f"{item.flag} {value if isinstance(value, str) else text}"


def _show_all(ctx: typer.Context, is_asked: bool | None) -> None:
    """Print the help page with all options, and exit."""
    if is_asked and not ctx.resilient_parsing:
        assert isinstance(ctx.command, RequestCommand)
        console.result_text(ctx.command.page(ctx.command_path, is_full=True))
        raise typer.Exit


def _with_parameters(function: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """The function with these parameters in its signature, which Typer reads."""
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {item.name: item.annotation for item in parameters}
    return function


def _keyword(name: str, kind: Any, info: Any) -> inspect.Parameter:
    """A parameter of a function that Typer calls. None stands for an option that is not given."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])


HELP_ALL = _keyword(
    "help_all", bool | None, typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options.")
)


def _for_typer(item: Parameter) -> list[inspect.Parameter]:
    """A parameter for Typer, with its flags and text as its value. An argument with a flag is two parameters."""
    text: Any = list[str] | None if item.is_list else str | None
    option, found, completion = item.option, [], completion_of(item)
    if item.is_argument:
        info = typer.Argument(metavar=item.metavar, help=option.text, autocompletion=completion)
        found.append((item.name, text, info))
    if item.is_switch:
        flags = ["/".join(filter(None, (item.flag, option.off))), *filter(None, [option.short])]
        found.append((item.name, bool | None, typer.Option(*flags, help=option.text)))
    elif item.flags:
        name = (BY_FLAG if item.is_argument else "") + item.name
        info = typer.Option(*item.flags, metavar=item.metavar, help=option.text, autocompletion=completion)
        found.append((name, text, info))
    return [_keyword(*item) for item in found]
