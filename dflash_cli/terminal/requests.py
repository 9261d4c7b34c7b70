"""Request classes: one frozen dataclass per verb declares each option's name, type, default, limits and help.

The command line, the Python function, `settings` in JSON, shell completion and the reference page derive from it:

    @dataclass(frozen=True, kw_only=True)
    class LockRequest(Request):
        draft: Annotated[str, Argument(help="Draft to pin.")]
        output: Annotated[Path, Option(short="-o", help="File to write.")] = Path("dflash.lock")

A field `num_prompts` is the flag `--num-prompts`. A tuple is given as `1,2,3`, or by repeating the flag.
"""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import field, fields, make_dataclass, replace
from functools import partial
from inspect import get_annotations
from pathlib import Path
from typing import (
    Any,
    Generic,
    ParamSpec,
    TypeVar,
    cast,
    get_type_hints,
    overload,
)

from dflash_cli.terminal.parameters import Parameter, read_parameter

PAIR = ("draft", "target")
"""The options that come right after the arguments."""
LAST = (
    *("output", "format", "force"), *("resume", "dry_run", "yes"), *("strict", "ignore", "min_acceptance"),
    *("min_speedup", "tolerance", "gate", "allow_failed", "allow_unlike", "gate_out"),
)  # fmt: skip
"""The options that come last: where results go, how a run continues, and when a result fails."""

P = ParamSpec("P")
Q = TypeVar("Q")
T = TypeVar("T")


class Request:
    """Base of request classes: fields are checked and converted when a request is made."""

    def __post_init__(self) -> None:
        for item in parameters_of(type(self)):
            object.__setattr__(self, item.name, item.check(getattr(self, item.name)))
        self.check()

    def check(self) -> None:
        """Refuse options that contradict each other. Subclasses extend it and call `super().check()`.

        Raises:
            UsageError: two options exclude each other, or one needs another.
        """

    def settings(self) -> dict[str, Any]:
        """Field name -> value in JSON, for every field that decides the result."""
        return {
            item.name: json_value(getattr(self, item.name))
            for item in parameters_of(type(self))
            if item.option.is_setting
        }

    def changed(self) -> list[Parameter]:
        """The parameters with another value than their default."""
        return [item for item in parameters_of(type(self)) if getattr(self, item.name) != item.default]


def json_value(value: Any) -> Any:
    """A field's value as JSON: a path as text, a tuple as a list."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [json_value(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    return value


_PARAMETERS: dict[type, tuple[Parameter, ...]] = {}


def parameters_of(kind: type[Request]) -> tuple[Parameter, ...]:
    """The parameters of a request class, in the order in which a user needs them.

    Arguments, the pair, required options, options of the class itself, inherited options, and LAST.
    """
    if kind not in _PARAMETERS:
        hints, own = get_type_hints(kind, include_extras=True), get_annotations(kind)
        found = [read_parameter(item.name, hints[item.name], item.default) for item in fields(cast(Any, kind))]

        def place(item: Parameter) -> tuple[int, ...]:
            last = LAST.index(item.name) + 1 if item.name in LAST and not item.is_required else 0
            return not item.is_argument, item.name not in PAIR, not item.is_required, last, item.name not in own

        _PARAMETERS[kind] = tuple(sorted(found, key=place))
    return _PARAMETERS[kind]


def with_defaults(kind: type[Request], defaults: Mapping[str, tuple[Any, str]]) -> type[Request]:
    """The request class with other defaults. `defaults` maps a field to its default and to the origin of it."""
    if not defaults:
        return kind
    hints = get_type_hints(kind, include_extras=True)
    new = [(name, hints[name], field(default_factory=partial(copy, value))) for name, (value, _) in defaults.items()]
    changed = make_dataclass(kind.__name__, new, bases=(kind,), frozen=True, kw_only=True)
    changed.__doc__ = kind.__doc__
    _PARAMETERS[changed] = tuple(
        replace(item, default=defaults[item.name][0], origin=defaults[item.name][1]) if item.name in defaults else item
        for item in parameters_of(kind)
    )
    return changed


class Verb(Generic[P, Q, T]):
    """A function of one request that takes the request's fields as keywords too: `lock(draft="tiny")`."""

    def __init__(self, kind: Callable[P, Q], run: Callable[[Q], T]) -> None:
        self.kind, self.run = kind, run
        self.__doc__, self.__name__, self.__module__ = run.__doc__, run.__name__, run.__module__

    @overload
    def __call__(self, request: Q, /) -> T: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def __call__(self, *args: Any, **kwargs: Any) -> T:
        if not args:
            return self.run(self.kind(*args, **kwargs))
        kind: Any = self.kind
        if len(args) > 1 or kwargs or not isinstance(args[0], kind):
            example = f"{parameters_of(kind)[0].name}=..." if parameters_of(kind) else ""
            raise TypeError(f"{self.__name__}() takes one {kind.__name__}, or keywords: {self.__name__}({example})")
        return self.run(args[0])


def verb(kind: Callable[P, Q]) -> Callable[[Callable[[Q], T]], Verb[P, Q, T]]:
    """Make a function of a request a `Verb`, which takes the request or its fields."""
    return lambda run: Verb(kind, run)
