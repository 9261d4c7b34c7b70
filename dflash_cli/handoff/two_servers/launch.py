"""The arguments of one server, read from a file: a JSON object of arguments, or the serve command."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash_cli.documents.reading import parse_object, read_input
from dflash_runtime.checkpoint.stored.strict_json import loads
from dflash_runtime.errors import CheckpointNotFound, UsageError
from dflash_runtime.json_values import is_int

Kind = Literal["text", "count", "switch", "object"]
KINDS: Mapping[Kind, tuple[str, Callable[[Any], bool]]] = {
    "text": ("a text", lambda value: isinstance(value, str) and bool(value)),
    "count": ("a positive whole number", lambda value: is_int(value) and value > 0),
    "switch": ("true or false", lambda value: isinstance(value, bool)),
    "object": ("an object", lambda value: isinstance(value, dict)),
}
"""Kinds of arguments: the words for errors, and whether a value is of the kind."""
MODEL = "model"
"""The key of the argument without a name, which is the target for every engine."""
COMMAND = "command"
VERSION = "version"
OPTION = re.compile(r"-{1,2}[A-Za-z]")
PROGRAMS = ("serve", "launch_server", "api_server")
"""Suffixes of the word before a server's arguments."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of an engine: its name in snake case, its kind, and its other names."""

    name: str
    kind: Kind
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchKeys:
    """The arguments that rules read, by the rules' words, and the dotted keys of words inside an object argument."""

    arguments: Mapping[str, Argument]
    inner: Mapping[str, str] = field(default_factory=dict)

    def key(self, word: str) -> str:
        """The engine's name for a word of the rules. Other words are names already."""
        return self.arguments[word].name if word in self.arguments else self.inner.get(word, word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A server's arguments that rules read, by the rules' words, its version, and the names of its other arguments."""

    path: Path
    keys: LaunchKeys
    arguments: Mapping[str, Any]
    version: str | None
    ignored: tuple[str, ...]

    def location(self, word: str) -> str:
        """`decode.json:block_size` for an argument."""
        return f"{self.path.name}:{self.keys.key(word)}"

    def get(self, word: str) -> Any:
        """The value of an argument, or None without it."""
        return self.arguments.get(word)


def read_launch(path: Path, keys: LaunchKeys) -> Launch:
    """Read a JSON object of arguments, `{"command": "vllm serve ..."}`, or the command as plain text.

    Raises:
        CheckpointNotFound: the file does not exist.
        UsageError: the file has another form, or an argument has a value of another type.
    """
    if not path.exists():
        hint = "it contains the arguments or the serve command of one server"
        raise CheckpointNotFound("no such file", id="no-launch-file", path=path, hint=hint)
    given = _read_arguments(path)
    version = _checked(path, Argument(VERSION, "text"), given.pop(VERSION, None))
    words = {name: word for word, item in keys.arguments.items() for name in (item.name, *item.aliases)}
    values: dict[str, Any] = {}
    ignored = []
    for name, value in given.items():
        word = words.get(name.lstrip("-").replace("-", "_"))
        if word is None:
            ignored.append(name)
        else:
            values[word] = _checked(path, keys.arguments[word], value)
    return Launch(
        path=path,
        keys=keys,
        arguments={word: value for word, value in values.items() if value is not None},
        version=version,
        ignored=tuple(ignored),
    )


def _read_arguments(path: Path) -> dict[str, Any]:
    data = read_input(path)
    if not data.lstrip().startswith((b"{", b"[")):
        return _parse_command(path, data.decode("utf-8", errors="replace"))
    document = parse_object(data, path)
    command = document.pop(COMMAND, None)
    if command is None:
        return document
    return {**_parse_command(path, _checked(path, Argument(COMMAND, "text"), command)), **document}


def _parse_command(path: Path, text: str) -> dict[str, Any]:
    """The options of a command line, and the argument before them under `model`."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"the command cannot be read: {error}", id="unreadable-command", path=path) from error
    begin = next((at + 1 for at, word in enumerate(words) if word.endswith(PROGRAMS)), None)
    if begin is None and not any(OPTION.match(word) for word in words):
        raise UsageError(
            "found no options, expected a JSON object of arguments or a serve command", id="no-options", path=path
        )
    words = words[begin:]
    found: dict[str, Any] = {MODEL: words[0]} if begin and words and not OPTION.match(words[0]) else {}
    for name, values in _options(words):
        _set(found, name, values)
    return found


def _options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option with the words between it and the next option."""
    name: str | None = None
    values: list[str] = []
    for word in words:
        if OPTION.match(word):
            if name is not None:
                yield name, values
            name, _, joined = word.partition("=")
            values = [joined] if joined else []
        else:
            values.append(word)
    if name is not None:
        yield name, values


def _set(found: dict[str, Any], name: str, values: Sequence[str]) -> None:
    """Store an option: `--no-x` switches x off, and `--a.b 1` sets b inside a."""
    plain = name.lstrip("-")
    if plain.startswith("no-") and not values:
        found[plain.removeprefix("no-")] = False
        return
    head, *inner = plain.split(".")
    value: Any = True if not values else values[0] if len(values) == 1 else list(values)
    if not inner:
        found[head] = value
        return
    within = found.setdefault(head, {})
    if isinstance(within, dict):
        within[".".join(inner)] = _from_text(value)


def _from_text(value: Any) -> Any:
    """The JSON value of a text from a command line, or the text itself if it is not JSON."""
    try:
        return loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _checked(path: Path, argument: Argument, value: Any) -> Any:
    """The value of an argument. Numbers, switches and objects may be given as text, as on a command line.

    Raises:
        UsageError: the value is of another kind.
    """
    read = _from_text(value) if argument.kind != "text" and isinstance(value, str) else value
    expected, fits = KINDS[argument.kind]
    if value is not None and not fits(read):
        raise UsageError(path=path, field=argument.name, found=value, expected=expected)
    return read
