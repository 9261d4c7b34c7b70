"""Defaults of options from `dflash.toml` and from DFLASH_* variables.

Settings from the weakest to the strongest: the user's file, the project's file, variables. In a file, keys before the
first table are for every command that has the option, keys of [engine] too, and keys of [COMMAND] for one command.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from dflash_cli.terminal.parameters import ENGINE, Parameter
from dflash_runtime.errors import UsageError
from dflash_runtime.phrases import closest

FILE_NAME = "dflash.toml"
PREFIX = "DFLASH_"
ENGINE_TABLE = ENGINE.lower()
OTHER_VARIABLES = frozenset({"DFLASH_HANDOFF_SECRET"})
"""Variables that are not defaults of options."""
SWITCH_WORDS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
USER, PROJECT, VARIABLE = range(3)

ParametersOf = Callable[[str], tuple[Parameter, ...]]
"""Name of a command -> its parameters. A call may import the module of the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A default that the user has set.

    source   USER, PROJECT or VARIABLE
    table    the table of the file; empty for keys before the first table and for variables
    key      the key of the file, or the name of the variable without prefix, with dashes: `generate-max-new-tokens`
    origin   `dflash.toml:3` or `DFLASH_DTYPE`
    folder   the folder of the file, to which its paths are relative; None for a variable
    """

    source: int
    table: str = ""
    key: str
    value: Any
    origin: str
    folder: Path | None = None

    def is_for(self, command: str, option: str) -> bool:
        """Whether it sets this option of this command."""
        if self.source == VARIABLE:
            return self.key in (option, f"{command}-{option}")
        return self.key == option and self.table in ("", ENGINE_TABLE, command)

    def is_shared(self, option: str) -> bool:
        """Whether it sets this option of all commands that have it."""
        return self.key == option and self.table in ("", ENGINE_TABLE)

    def strength(self, option: str) -> tuple[int, int]:
        """The place in the order of precedence among the settings of one option."""
        if self.source == VARIABLE:
            return self.source, int(self.key != option)
        return self.source, ("", ENGINE_TABLE).index(self.table) if self.table in ("", ENGINE_TABLE) else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDefault:
    """A default that the user has set, as `dflash env` shows it."""

    option: Annotated[str, "the long option, without dashes"]
    value: Annotated[Any, "the value, as in the file or the variable"]
    origin: Annotated[str, "the file and the line, or the variable"]
    commands: Annotated[tuple[str, ...], "the commands for which no stronger setting decides"]


def find_settings(commands: Iterable[str]) -> list[Setting]:
    """All settings of the user's file, the project's file and the environment.

    Raises:
        UsageError: a file cannot be read or is not TOML.
    """
    tables = {*commands, ENGINE_TABLE}
    found = [
        setting for source, path in ((USER, _user_file()), (PROJECT, _project_file())) if path is not None
        for setting in _settings_of_file(path, source, tables)
    ]  # fmt: skip
    for name, text in sorted(os.environ.items()):
        if name.startswith(PREFIX) and name not in OTHER_VARIABLES:
            key = name.removeprefix(PREFIX).lower().replace("_", "-")
            found.append(Setting(source=VARIABLE, key=key, value=text, origin=name))
    return found


def set_defaults(
    command: str, parameters: Sequence[Parameter], settings: Iterable[Setting]
) -> dict[str, tuple[Any, str]]:
    """Field name -> default and origin, for the parameters of a command that a setting changes.

    Raises:
        UsageError: a value has the wrong type or is outside its limits, or the option belongs to one run.
    """
    chosen = [(item, _strongest(command, item, settings)) for item in parameters]
    return {item.name: (_read(found, item), found.origin) for item, found in chosen if found is not None}


def _strongest(command: str, item: Parameter, settings: Iterable[Setting]) -> Setting | None:
    """The setting that decides the default of an option of a command, or None."""
    option = item.flag.lstrip("-")
    fitting = [setting for setting in settings if option and setting.is_for(command, option)]
    if item.option.ignores_shared:
        fitting = [setting for setting in fitting if not setting.is_shared(option)]
    return max(fitting, key=lambda setting: setting.strength(option), default=None)


def list_defaults(commands: Sequence[str], parameters_of: ParametersOf) -> list[SetDefault]:
    """Every default that the user has set, checked for all commands.

    Raises:
        UsageError: a file cannot be read, a key is unknown, or a value is wrong.
    """
    settings = find_settings(commands)
    unknown = [error for item, error in find_unknown(None, settings, commands, parameters_of) if item.folder]
    if unknown:
        raise unknown[0]
    decided: dict[tuple[str, str], tuple[Setting, list[str]]] = {}
    for command in commands if settings else ():
        parameters = parameters_of(command)
        for item in parameters:
            setting = _strongest(command, item, settings)
            if setting is not None:
                _read(setting, item)
                option = item.flag.lstrip("-")
                decided.setdefault((setting.origin, option), (setting, []))[1].append(command)
    return [
        SetDefault(option=option, value=setting.value, origin=origin, commands=tuple(found))
        for (origin, option), (setting, found) in decided.items()
    ]


def find_unknown(
    command: str | None, settings: Iterable[Setting], commands: Sequence[str], parameters_of: ParametersOf
) -> Iterator[tuple[Setting, UsageError]]:
    """Settings of options that no command has, with the error about each.

    Tables of other commands are not looked at, unless `command` is None. Modules of other commands are imported only if
    a setting is not for `command`.
    """
    rest = list(settings)
    for name in ([command] if command is not None else []) + [name for name in commands if name != command]:
        if command is not None:
            rest = [item for item in rest if item.table in ("", ENGINE_TABLE, command)]
        if not rest:
            return
        rest = [item for item in rest if not any(_is_of(item, name, option) for option in parameters_of(name))]
    if rest:
        options = [(name, option) for name in commands for option in parameters_of(name) if option.flag]
        for item in rest:
            yield item, _unknown(item, options, commands)


def _is_of(setting: Setting, command: str, item: Parameter) -> bool:
    """Whether a setting is for an option, and stands in a table for it."""
    is_placed = setting.table != ENGINE_TABLE or item.option.group == ENGINE
    return is_placed and bool(item.flag) and setting.is_for(command, item.flag.lstrip("-"))


def _unknown(setting: Setting, options: Iterable[tuple[str, Parameter]], commands: Sequence[str]) -> UsageError:
    known: dict[str, str] = {}
    for command, item in options:
        if setting.table == ENGINE_TABLE and item.option.group != ENGINE:
            continue
        if setting.table in ("", ENGINE_TABLE, command):
            name = item.flag.lstrip("-")
            for word in (*item.words, item.option.off):
                known.setdefault(word.lstrip("-"), name)
    if isinstance(setting.value, dict):
        known |= {name: f"[{name}]" for name in (*commands, ENGINE_TABLE)}
    close = closest(setting.key.replace("_", "-"), known)
    expected = f"an option of {setting.table}" if setting.table else "an option of a command"
    return UsageError(
        id="unknown-setting",
        path=setting.origin,
        field=setting.key,
        found=setting.value,
        expected=f"{expected}, by its long name",
        hint=f"did you mean {known[close]}?" if close else "dflash COMMAND --help-all lists the options",
    )


def _read(setting: Setting, item: Parameter) -> Any:
    """The value of a setting in the type of its option."""
    field = item.flag if setting.source == VARIABLE else setting.key
    if item.option.is_per_run:
        raise UsageError(
            f"{setting.key} belongs to one run and has no default", id="setting-of-one-run", path=setting.origin,
            field=field, found=setting.value, expected=f"{item.flag} on the command line",
            hint=f"remove it, and type {item.flag} where it is meant",
        )  # fmt: skip
    try:
        return item.check(_typed(setting, item))
    except UsageError as error:
        raise UsageError(
            id="wrong-setting", path=setting.origin, field=field, found=setting.value, expected=error.expected,
            hint=error.hint,
        ) from error  # fmt: skip


def _typed(setting: Setting, item: Parameter) -> Any:
    """The value, not yet checked. A variable is read like typed text; TOML has types of its own."""
    value, folder = setting.value, setting.folder
    if folder is None:
        return SWITCH_WORDS.get(value.lower(), value) if item.is_switch else item.read(value)
    if item.kind is object:
        return item.read(value if isinstance(value, str) else json.dumps(value, default=str))
    if not isinstance(value, str):
        return [value] if item.is_list and not isinstance(value, list) else value
    if item.kind in (int, float, bool) and item.option.parse is None:
        return value
    is_path = item.kind is Path or value.startswith(("./", "../"))
    return item.read(os.path.normpath(folder / Path(value).expanduser()) if is_path else value)


def _user_file() -> Path | None:
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    try:
        path = folder.expanduser() / "dflash" / FILE_NAME
    except RuntimeError:  # there is no home
        return None
    return path if path.is_file() else None


def _project_file() -> Path | None:
    """The file in the working directory, or in the nearest parent that has one."""
    try:
        here = Path.cwd()
    except FileNotFoundError:
        return None
    return next((path for folder in (here, *here.parents) if (path := folder / FILE_NAME).is_file()), None)


def _settings_of_file(path: Path, source: int, tables: set[str]) -> Iterator[Setting]:
    import tomllib

    shown = _shown(path)
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin files with a byte order mark
        document = tomllib.loads(text)
    except OSError as error:
        raise UsageError(
            error.strerror or str(error), id="settings-unreadable", path=shown, hint="correct its permissions"
        ) from error
    except ValueError as error:  # not TOML, or not UTF-8
        raise UsageError(
            f"not TOML: {error}", id="settings-not-toml", path=shown, expected="TOML in UTF-8",
            hint="dflash docs settings shows an example",
        ) from error  # fmt: skip
    lines = _lines(text)
    for name, value in document.items():
        is_table = name in tables and isinstance(value, dict)
        for key, one in value.items() if is_table else [(name, value)]:
            table = name if is_table else ""
            line = lines.get((table, key)) or lines.get((table,)) if table else lines.get((key,))
            origin = f"{shown}:{line}" if line else shown
            yield Setting(source=source, table=table, key=key, value=one, origin=origin, folder=path.parent)


def _lines(text: str) -> Mapping[tuple[str, ...], int]:
    """Line number of each key and each table, by their names from the outside in."""
    found: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([^\[\]]+?)\s*\]", line)
        if header:
            table = _names(header[1])
            found.setdefault(table, number)
        elif key := re.match(r"\s*([\w\"'. -]+?)\s*=", line):
            found.setdefault((*table, *_names(key[1])), number)
    return found


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _shown(path: Path) -> str:
    """The path, relative to the working directory if that is in the file's folder."""
    here = Path.cwd()
    return os.path.relpath(path) if path.parent in (here, *here.parents) else str(path)
