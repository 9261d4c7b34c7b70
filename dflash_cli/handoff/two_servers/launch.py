"""How one server is started, read from what a person has at hand: a JSON object of arguments, or the serve command."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dflash_runtime.checkpoint.strict_json import parse_json
from dflash_runtime.errors import CheckpointError, CheckpointNotFound, UsageError
from dflash_runtime.json_values import is_int

Kind = Literal["text", "count", "switch", "object"]
EXPECTED: Mapping[Kind, str] = {
    "text": "a text",
    "count": "a positive whole number",
    "switch": "true or false",
    "object": "an object",
}
MODEL = "model"
"""The key of the target, whatever the engine calls it."""
COMMAND = "command"
VERSION = "version"
OPTION = re.compile(r"-{1,2}[A-Za-z]")
PROGRAMS = ("serve", "launch_server", "api_server")
"""How the word ends after which the arguments of a server begin."""


@dataclass(frozen=True, slots=True)
class LaunchKeys:
    """The arguments of an engine that rules look at, in snake case; `aliases` are its other words for them."""

    kinds: Mapping[str, Kind]
    aliases: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a server is started: the arguments that rules look at, and the names of those that they do not."""

    path: Path
    arguments: Mapping[str, Any]
    version: str | None
    ignored: tuple[str, ...]

    def location(self, key: str) -> str:
        """`decode.json:block_size`."""
        return f"{self.path.name}:{key}"

    def get(self, key: str) -> Any:
        """The value of an argument, None where it is not given."""
        return self.arguments.get(key)


def read_launch(path: Path, keys: LaunchKeys) -> Launch:
    """Read a file of arguments, `{"command": "vllm serve ..."}`, or the command itself as plain text.

    Raises:
        CheckpointNotFound: no such file.
        UsageError: it is none of these, or an argument has a value of another type.
    """
    if not path.is_file():
        raise CheckpointNotFound(f"{path}: no such file", hint="it holds the arguments, or the command, of one server")
    given = _read_arguments(path)
    version = _checked(path, VERSION, given.pop(VERSION, None), "text")
    values: dict[str, Any] = {}
    ignored = []
    for name, value in given.items():
        key = _key(name, keys)
        if key in keys.kinds:
            values[key] = _checked(path, key, value, keys.kinds[key])
        else:
            ignored.append(name)
    return Launch(
        path=path,
        arguments={key: value for key, value in values.items() if value is not None},
        version=version,
        ignored=tuple(ignored),
    )


def _read_arguments(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if not data.lstrip().startswith((b"{", b"[")):
        return _parse_command(path, data.decode("utf-8", errors="replace"))
    try:
        document = parse_json(data, path)
    except CheckpointError as error:
        raise UsageError(error.message, id="malformed-json") from error
    command = document.pop(COMMAND, None)
    if command is None:
        return document
    if not isinstance(command, str):
        raise UsageError(path=path, field=COMMAND, found=command, expected=EXPECTED["text"])
    return {**_parse_command(path, command), **document}


def _parse_command(path: Path, text: str) -> dict[str, Any]:
    """The options of a command line, and under `model` the argument before them, whatever starts the program."""
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
    """Each option with the words that follow it, as far as the next option."""
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
    """Enter an option: `--no-x` is x switched off, `--a.b 1` is b within a."""
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
    """A value within an object, which a command line gives as text, as JSON would have it."""
    try:
        return json.loads(value)
    except (TypeError, ValueError, RecursionError):
        return value


def _key(name: str, keys: LaunchKeys) -> str:
    plain = name.lstrip("-").replace("-", "_")
    return keys.aliases.get(plain, plain)


def _checked(path: Path, key: str, value: Any, kind: Kind) -> Any:
    """A value of that kind; numbers, switches and objects may be given as text, as on a command line.

    Raises:
        UsageError: it is of another kind.
    """
    read = _from_text(value) if kind != "text" and isinstance(value, str) else value
    fits = {
        "text": isinstance(read, str) and bool(read),
        "count": is_int(read) and read > 0,
        "switch": isinstance(read, bool),
        "object": isinstance(read, dict),
    }[kind]
    if value is not None and not fits:
        raise UsageError(path=path, field=key, found=value, expected=EXPECTED[kind])
    return read
