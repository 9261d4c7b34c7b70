"""The parameters of a command: what its signature says, as flags to Typer, and typed text as values.

Typer sees every value as plain text. Names, metavars and bounds are taken from the signature here, because releases of
Typer differ in what they derive from them, and because a wrong value is then answered in one line of our own.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from dflash_runtime.errors import UsageError

ESSENTIALS = "Essentials"
OPTIONS = "Options"
SAMPLING = "Sampling"
DRAFTING = "Drafting"
MEASURING = "Measuring"
ENGINE = "Engine"
OUTPUT = "Output"
DRAFT_OPTION = "draft_option"
"""The name under which `--draft` reaches a command whose draft is an argument."""


class Typed(frozenset[str]):
    """The titles of the parameters that stand on the command line, those that say what is so anyway among them.

    A command that has a parameter of this type is told.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument or option of a command. An argument has no `flags`; `off_flags` belong to a switch.

    `kind` is what one value is read as: str, int, float, bool, Path, or a tuple of choices. `low` and `high` bound a
    number. `is_pair` asks for two values after one flag. `callback` takes a value that was typed and returns what the
    command gets.
    """

    name: str
    kind: Any
    flags: tuple[str, ...] = ()
    off_flags: tuple[str, ...] = ()
    metavar: str = ""
    help: str = ""
    default: Any = None
    is_required: bool = False
    is_list: bool = False
    is_pair: bool = False
    panel: str = OPTIONS
    low: float | None = None
    high: float | None = None
    is_hidden: bool = False
    shows_default: bool = True
    callback: Callable[[Any], Any] | None = None
    completion: Callable[..., Any] | None = None

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def title(self) -> str:
        """What messages call it: its long flag, or the metavar of an argument."""
        return next((flag for flag in self.flags if flag.startswith("--")), self.metavar)

    @property
    def choices(self) -> tuple[Any, ...]:
        return self.kind if isinstance(self.kind, tuple) else ()

    def for_typer(self) -> inspect.Parameter:
        """The parameter as Typer is to see it: explicit flags, and text for a value."""
        if not self.flags:
            kind: Any = list[str] | None if self.is_list else str | None
            info: Any = typer.Argument(metavar=self.metavar, help=self.help)
            return self._annotated(kind, info, None)
        if self.is_switch:
            decls = ["/".join(pair) for pair in zip(self.flags, self.off_flags, strict=False)] or list(self.flags)
            # A switch whose default is None says whether it was typed at all.
            return self._annotated(bool | None, typer.Option(*decls, help=self.help), self.default)
        choices = [str(choice) for choice in self.choices]
        info = typer.Option(
            *self.flags,
            metavar=self.metavar,
            help=self.help,
            autocompletion=self.completion or ((lambda: choices) if choices else None),
        )
        typed: Any = tuple[str, str] | None if self.is_pair else list[str] | None if self.is_list else str | None
        return self._annotated(typed, info, None)

    def spelling(self, arguments: Sequence[str]) -> str:
        """The flag as it stands in the arguments, or its title."""
        for argument in arguments:
            for flag in self.flags:
                is_joined = argument.startswith(flag) if flag[:2] != "--" else argument.startswith(f"{flag}=")
                if argument == flag or is_joined:
                    return flag
        return self.title

    def read(self, typed: Any, spelling: str) -> Any:
        """The value of what Typer handed over, or the default where nothing was typed.

        Raises:
            UsageError: the text is no such value; `spelling` is what the line calls the parameter.
        """
        if typed is None or (self.is_list and not typed):
            return self.default
        if self.is_pair and any(text.startswith("--") for text in typed):
            raise UsageError(f"{spelling} {' '.join(typed)}: expected two values, {self.metavar}")
        if self.is_list or self.is_pair:
            values = [self._read_one(text, spelling) for text in typed]
            value = tuple(values) if self.is_pair else values
        else:
            value = self._read_one(typed, spelling)
        return value if self.callback is None else self.callback(value)

    def _read_one(self, text: Any, spelling: str) -> Any:
        if not isinstance(text, str) or self.kind is str:
            return text
        if self.choices:
            return _choose(text, self.choices, spelling)
        if self.kind is Path:
            return Path(text)
        try:
            value = self.kind(text)
        except ValueError:
            expected = "a whole number" if self.kind is int else "a number"
            raise UsageError(f"{spelling} {text}: expected {expected}") from None
        self._check_bounds(value, text, spelling)
        return value

    def _check_bounds(self, value: float, text: str, spelling: str) -> None:
        # Written so that nan, which compares false with everything, is outside of any bound.
        if self.low is not None and not value >= self.low:
            raise UsageError(f"{spelling} {text}: expected {_number(self.low)} or more")
        if self.high is not None and not value <= self.high:
            raise UsageError(f"{spelling} {text}: expected {_number(self.high)} or less")

    def _annotated(self, kind: Any, info: Any, default: Any) -> inspect.Parameter:
        return inspect.Parameter(
            self.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
        )


COMMON = (
    Parameter(
        name="quiet",
        kind=bool,
        flags=("--quiet", "-q"),
        help="Print only results, warnings and errors.",
        default=False,
        panel=OUTPUT,
    ),
    Parameter(
        name="verbose",
        kind=bool,
        flags=("--verbose", "-v"),
        help="Log to stderr what is being done.",
        default=False,
        panel=OUTPUT,
    ),
    # A switch of its own and not a count, for which Typer would import pydantic even to show a help page.
    Parameter(
        name="debug",
        kind=bool,
        flags=("-vv",),
        help="Log every detail to stderr.",
        default=False,
        panel=OUTPUT,
    ),
)
"""What every command takes, before or after its name."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A command's parameters, and how to call it: a group's fields are handed over as one object of the group.

    `typed` names the parameter, if there is one, that takes what stands on the command line.
    """

    function: Callable[..., None]
    parameters: tuple[Parameter, ...]
    groups: Mapping[str, tuple[type[Any], tuple[str, ...]]]
    draft: Parameter | None = None
    typed: str | None = None

    def call(self, values: Mapping[str, Any], typed: Collection[str] = ()) -> None:
        """Run the command on values by parameter name; `typed` names those that stand on the command line."""
        rest = dict(values)
        if self.typed is not None:
            rest[self.typed] = Typed(item.title for item in self.parameters if item.name in typed)
        built = {
            name: kind(**{key: rest.pop(key) for key in keys if key in rest})
            for name, (kind, keys) in self.groups.items()
        }
        self.function(**rest, **built)


def read_signature(function: Callable[..., None], *, draft: str | None = None) -> Signature:
    """The parameters of a command, those of its groups in their place.

    A group is a dataclass whose fields are annotated as parameters are. `draft` names the argument that `--draft` may
    stand for, unless the command has a `--draft` of its own.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    groups: dict[str, tuple[type[Any], tuple[str, ...]]] = {}
    typed = next((name for name, kind in hints.items() if kind is Typed), None)
    for item in inspect.signature(function).parameters.values():
        kind = hints[item.name]
        if item.name == typed:
            continue
        if isinstance(kind, type) and is_dataclass(kind):
            members = list(_read_group(kind))
            groups[item.name] = (kind, tuple(member.name for member in members))
            parameters += members
        else:
            parameters.append(_read_parameter(item.name, kind, item.default))
    stand_in = None
    if draft is not None and not any("--draft" in item.flags for item in parameters):
        argument = next(item for item in parameters if item.name == draft)
        stand_in = Parameter(
            name=DRAFT_OPTION,
            kind=str,
            flags=("--draft", "-d"),
            metavar=argument.metavar,
            help=f"Another way to give {argument.metavar}.",
            panel=argument.panel,
        )
        place = 1 + max(index for index, item in enumerate(parameters) if not item.flags)
        parameters.insert(place, stand_in)
    return Signature(function, (*parameters, *COMMON), groups, stand_in, typed)


def _read_group(kind: type[Any]) -> Iterator[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    for item in fields(kind):
        yield _read_parameter(item.name, hints[item.name], item.default)


def _read_parameter(name: str, annotation: Any, default: Any) -> Parameter:
    annotation, info = _split(name, annotation)
    kind, is_list = _value_kind(annotation)
    is_pair = any(get_origin(item) is tuple for item in (annotation, *get_args(annotation)))
    is_required = default is inspect.Parameter.empty
    decls = () if isinstance(info, ArgumentInfo) else _declarations(name, info, is_switch=kind is bool)
    return Parameter(
        name=name,
        kind=kind,
        flags=tuple(decl.split("/")[0].strip() for decl in decls),
        off_flags=tuple(decl.split("/")[1].strip() for decl in decls if "/" in decl),
        metavar=_metavar(info.metavar, name, kind, is_argument=not decls),
        help=" ".join((info.help or "").split()),
        default=None if is_required else default,
        is_required=is_required,
        is_list=is_list,
        is_pair=is_pair,
        panel=info.rich_help_panel or (OPTIONS if decls else ESSENTIALS),
        low=info.min,
        high=info.max,
        is_hidden=info.hidden,
        shows_default=bool(info.show_default),
        callback=info.callback,
        completion=info.autocompletion,
    )


def _split(name: str, annotation: Any) -> tuple[Any, ParameterInfo]:
    """The type of a parameter and Typer's description of it."""
    if get_origin(annotation) is Annotated:
        kind, *notes = get_args(annotation)
        infos = [note for note in notes if isinstance(note, ParameterInfo)]
        if infos:
            return kind, infos[0]
    raise TypeError(f"parameter {name} has no typer.Option or typer.Argument")


def _declarations(name: str, info: ParameterInfo, *, is_switch: bool) -> tuple[str, ...]:
    """The flags of an option; in an annotation the first of them is what Typer calls the default."""
    assert isinstance(info, OptionInfo)
    first = () if info.default is ... else (str(info.default),)
    given = (*first, *(info.param_decls or ()))
    long = name.replace("_", "-")
    return given or ((f"--{long}/--no-{long}",) if is_switch else (f"--{long}",))


def _value_kind(annotation: Any) -> tuple[Any, bool]:
    """What one value is, and whether there may be several."""
    members = [item for item in get_args(annotation) if item is not NoneType]
    if NoneType in get_args(annotation) and get_origin(annotation) is not Literal:
        return _value_kind(members[0])
    if get_origin(annotation) is Literal:
        return tuple(members), False
    if get_origin(annotation) is list:
        return _value_kind(members[0])[0], True
    if get_origin(annotation) is tuple:
        return _value_kind(members[0])[0], False
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return tuple(annotation), False
    if annotation in (str, int, float, bool, Path):
        return annotation, False
    raise TypeError(f"a parameter of type {annotation} cannot be read from text")


def _metavar(given: str | None, name: str, kind: Any, *, is_argument: bool) -> str:
    """The word for a value. Brackets and dots of an argument are drawn by the usage line, not written in it."""
    if is_argument:
        return (given or name.upper()).strip("[].")
    if isinstance(kind, tuple):
        return given or "|".join(_text(choice) for choice in kind)
    return given or {int: "N", float: "X", Path: "FILE"}.get(kind, "TEXT")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _choose(text: str, choices: Sequence[Any], spelling: str) -> Any:
    by_text = {_text(choice): choice for choice in choices}
    if text in by_text:
        return by_text[text]
    close = difflib.get_close_matches(text, by_text, n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(f"{spelling} {text}: expected {' or '.join(_comma(list(by_text)))}{guess}")


def _comma(names: list[str]) -> list[str]:
    """`[a, b, c]` as `["a, b", "c"]`, to be joined by `or`."""
    return [", ".join(names[:-1]), names[-1]] if len(names) > 1 else names


def _text(choice: Any) -> str:
    return str(choice.value) if isinstance(choice, Enum) else str(choice)


def parse_size(text: str, option: str) -> int:
    """Bytes of `512M`, `20GB`, `1.5GiB` or a plain number of bytes; every unit is a power of 1,024.

    Raises:
        UsageError: anything else.
    """
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    factor = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(number[-1:], 1)
    try:
        size = float(number.rstrip("KMGT")) * factor
    except ValueError:
        size = 0.0
    if not 1 <= size < 2**63:
        raise UsageError(f"{option} {text!r}, expected a size such as 512M or 20G, in units of 1,024")
    return int(size)
