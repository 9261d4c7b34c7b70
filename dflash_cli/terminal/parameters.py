"""Parameters of verbs: the declaration of an option or argument, and the reading and checking of its values."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    Union,
    get_args,
    get_origin,
)

from dflash_runtime.errors import UsageError
from dflash_runtime.json_values import is_int, is_number
from dflash_runtime.phrases import closest

ESSENTIALS = "Essentials"
OPTIONS = "Options"
PROMPTS = "Prompts"
SAMPLING = "Sampling"
DRAFTING = "Drafting"
MEASURING = "Measuring"
ENGINE = "Engine"
OUTPUT = "Output"
MAX_INT = 2**63 - 1

OTHER_FLAGS = {
    "--chat": "--apply-chat-template",
    "--concurrency": "--batch-size --bs --batches --max-num-requests --max-num-seqs --num-concurrent",
    "--dataset": "--task --benchmark --dataset-name",
    "--device": "--gpu --cuda",
    "--draft": "--speculator --draft-model --assistant --drafter --speculative-model --draft-model-path",
    "--dtype": "--precision --torch-dtype",
    "--engine": "--backend",
    "--fix-out": "--fix",
    "--force": "--overwrite",
    "--gpu-memory-utilization": "--mem-fraction-static --gpu-memory",
    "--graphs": "--cuda-graphs",
    "--json": "--format --output-format",
    "--kernels": "--attention-backend --backend",
    "--max-model-len": "--max-length --context-length --ctx-size --max-seq-len",
    "--max-new-tokens": "--max-tokens --output-len --num-tokens --length",
    "--min-acceptance": "--threshold",
    "--num-prompts": "--limit --num-samples --max-samples --num-examples --samples --count",
    "--num-resamples": "--bootstrap",
    "--num-speculative-tokens": "--num-draft-tokens --speculative-num-draft-tokens --block-size",
    "--output": "--out --output-file --output-path --save --rows --journal",
    "--prompts": "--prompt --input --data --file",
    "--rounds": "--iterations --repeats --num-iters",
    "--seed": "--random-seed",
    "--strict": "--fail-on-warnings",
    "--target": "--model --base-model --verifier --target-model",
    "--target-name": "--verifier-name",
    "--temperature": "--temp",
    "--tensor-parallel": "--tp --tp-size --tensor-parallel-size",
    "--to": "--format --dialect --target-format",
}
"""Flag -> flags of other programs, for messages about unknown options."""

OTHER_VALUES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32", "fp64": "float64", "double": "float64"}
"""Value -> the value that it means, for messages about unknown values."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a verb, as `Annotated[int, Option(...)]` of a field.

    help          the effect, then the default if it needs words; a function if a registry gives the text
    flag          the long flag; by default made from the field's name
    short         the short flag
    off           the flag that turns a switch off
    group         the heading in --help-all; --help lists only ESSENTIALS
    metavar       the word for the value in help
    min, max      inclusive limits of a number
    above, below  exclusive limits of a number
    parse         text -> value, for types that cannot be read otherwise; raises UsageError or ValueError
    expected      the form that `parse` expects, in words
    is_setting    whether the option decides the result; `settings` in JSON has only such options
    is_per_run    whether the option belongs to one run, so that dflash.toml and variables cannot set it
    ignores_shared   whether a default for all commands is for other commands, where the option means more
    """

    help: str | Callable[[], str]
    flag: str = ""
    short: str = ""
    off: str = ""
    group: str = OPTIONS
    metavar: str = ""
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    parse: Callable[[str], Any] | None = None
    expected: str = ""
    is_setting: bool = True
    is_per_run: bool = False
    ignores_shared: bool = False

    @property
    def text(self) -> str:
        """The help as text."""
        return self.help if isinstance(self.help, str) else self.help()


@dataclass(frozen=True, kw_only=True)
class Argument(Option):
    """An argument of a verb. With a `flag` it can also be given as an option; then later arguments move up."""

    group: str = ESSENTIALS


@dataclass(frozen=True)
class Parameter:
    """One field of a request class.

    `kind` is the type of one value: str, int, float, bool, Path, object, or a tuple of choices. `origin` names the line
    or the variable that set the default; empty for the built-in default.
    """

    name: str
    kind: Any
    option: Option
    is_list: bool
    is_optional: bool
    default: Any = field(default=MISSING)
    origin: str = ""

    @property
    def is_argument(self) -> bool:
        return isinstance(self.option, Argument)

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    @property
    def choices(self) -> tuple[str, ...]:
        return self.kind if isinstance(self.kind, tuple) else ()

    @cached_property
    def flag(self) -> str:
        """The long flag; empty for an argument without one."""
        return self.option.flag or ("" if self.is_argument else f"--{self.name.replace('_', '-')}")

    @property
    def words(self) -> tuple[str, ...]:
        """The flags, and the flags that other programs have for the same."""
        return (*self.flags, *OTHER_FLAGS.get(self.flag, "").split())

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(item for item in (self.flag, self.option.short) if item)

    @property
    def metavar(self) -> str:
        """The word for a value: `N`, `FILE`, `a|b`."""
        if self.option.metavar:
            return self.option.metavar
        if self.is_argument:
            return self.name.upper()
        word = "|".join(self.choices) or {int: "N", float: "X", Path: "FILE"}.get(self.kind, "TEXT")
        return f"{word},..." if self.is_list else word

    @property
    def title(self) -> str:
        """The name of the parameter in messages."""
        return self.metavar if self.is_argument else self.flag

    def read(self, typed: Any) -> Any:
        """The value of typed text, or of a list of texts.

        Raises:
            UsageError: a text cannot be read as this type.
        """
        texts = typed if isinstance(typed, list | tuple) else [typed]
        if self.is_list and not self.is_argument:
            texts = [part.strip() for text in texts for part in text.split(",")]
            if not all(texts):
                raise UsageError(
                    field=self.title, found=",".join(texts), expected=f"values between commas: {self._expected}"
                )
        values = [self._read_one(text) for text in texts]
        return tuple(values) if self.is_list else values[0]

    def check(self, value: Any) -> Any:
        """The value that a Python caller gave, in the type of the field.

        Raises:
            UsageError: the type is wrong, or the value is outside its limits.
        """
        if value is None:
            if not self.is_optional:
                raise self._refusal(None)
            return None
        if self.is_list:
            if isinstance(value, str) or not isinstance(value, Sequence):
                hint = (
                    f"in Python: {self.name}={[part.strip() for part in value.split(',')]}"
                    if isinstance(value, str)
                    else None
                )
                raise UsageError(field=self.title, found=value, expected=f"a list of {self._expected}", hint=hint)
            return tuple(self._check_one(item) for item in value)
        return self._check_one(value)

    def _read_one(self, text: Any) -> Any:
        if not isinstance(text, str) or self.kind is bool:
            return text
        if not text and (self.kind is Path or self.option.metavar in PATHS):
            raise UsageError(field=self.title, found=text, expected="a path")  # `Path` would read it as this folder
        if self.option.parse is not None:
            return self._parse(text)
        if self.kind in (int, float):
            try:
                return self.kind(text)
            except ValueError:
                raise self._refusal(text) from None
        return Path(text) if self.kind is Path else text

    def _parse(self, text: str) -> Any:
        assert self.option.parse is not None
        try:
            return self.option.parse(text)
        except ValueError:
            raise self._refusal(text) from None

    def _check_one(self, value: Any) -> Any:
        if self.choices:
            return self._choose(value)
        if isinstance(value, str) and self.option.parse is not None:
            return self._parse(value)
        if self.kind in (str, Path) and isinstance(value, str | Path):
            return self.kind(value)
        checks: dict[Any, Callable[[], bool]] = {
            bool: lambda: isinstance(value, bool),
            int: lambda: is_int(value) and self._is_within(value),
            float: lambda: is_number(value) and self._is_within(value),
            object: lambda: True,
        }
        if not (self.kind in checks and checks[self.kind]()):
            raise self._refusal(value)
        return value

    def _is_within(self, value: float) -> bool:
        """Whether a number is inside the limits. NaN never is, and neither is a whole number beyond 64 bits."""
        low, high, above, below = self.option.min, self.option.max, self.option.above, self.option.below
        return (
            value == value
            and (self.kind is not int or abs(value) <= MAX_INT)
            and (low is None or value >= low)
            and (high is None or value <= high)
            and (above is None or value > above)
            and (below is None or value < below)
        )

    def _choose(self, value: Any) -> Any:
        if value in self.choices:
            return value
        close = OTHER_VALUES.get(str(value).lower())
        close = close if close in self.choices else closest(str(value), self.choices)
        raise UsageError(
            field=self.title,
            found=value,
            expected=self._expected,
            hint=f"did you mean {close}?" if close else None,
        )

    def _refusal(self, value: Any) -> UsageError:
        is_huge = self.kind is int and is_int(value) and value > MAX_INT and self.option.max is None
        expected = f"{self._expected}, and at most {MAX_INT}" if is_huge else self._expected
        return UsageError(field=self.title, found=value, expected=expected)

    @property
    def _expected(self) -> str:
        if self.option.expected:
            return self.option.expected
        if self.choices:
            return " or ".join(filter(None, (", ".join(self.choices[:-1]), self.choices[-1])))
        noun = {int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}.get(self.kind, "text")
        low, high, above = self.option.min, self.option.max, self.option.above
        is_range = low is not None and high is not None
        limits = {
            f"from {low} to {{}}": high if is_range else None,
            "from {} on": None if is_range else low,
            "above {}": above,
            "up to {}": None if is_range else high,
            "below {}": self.option.below,
        }
        stated = [text.format(limit) for text, limit in limits.items() if limit is not None]
        return " ".join([noun, " and ".join(stated)]) if stated else noun


def read_parameter(name: str, hint: Any, default: Any) -> Parameter:
    """Return the parameter of a request's field, from its type with an `Option` and from its default."""
    options = [item for item in get_args(hint)[1:] if isinstance(item, Option)]
    if not options:
        raise TypeError(f"field {name} has no Option or Argument")
    plain = get_args(hint)[0]
    members = [item for item in get_args(plain) if item is not NoneType]
    is_optional = get_origin(plain) in (Union, UnionType) and NoneType in get_args(plain)
    kind, is_list = _value_kind(members[0] if is_optional and len(members) == 1 else plain, options[0])
    return Parameter(name, kind, options[0], is_list, is_optional, default)


def _value_kind(hint: Any, option: Option) -> tuple[Any, bool]:
    """The kind of one value, and whether the field is a list."""
    if get_origin(hint) is tuple:
        return _value_kind(get_args(hint)[0], option)[0], True
    if get_origin(hint) is Literal:
        return get_args(hint), False
    if hint in (str, int, float, bool, Path):
        return hint, False
    if set(get_args(hint)) == {str, Path}:
        return str, False
    if option.parse is not None:
        return object, False
    raise TypeError(f"a parameter of type {hint} cannot be read from text")


def parse_size(text: str) -> int:
    """The number of bytes of `512M`, `20GB`, `1.5GiB` or `4096`. Units are powers of 1,024.

    Raises:
        ValueError: the text is not a size, or is a number below 1,024 without a unit: `24` means GiB to many.
    """
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    factor = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(number[-1:], 1)
    size = float(number.rstrip("KMGT")) * factor
    if not (1 if factor > 1 else 2**10) <= size < 2**63:
        raise ValueError(text)
    return int(size)


PATHS = ("FILE", "DIR", "DEST", "SOURCE")
"""Metavars of options that take a path."""

SIZE = "a size such as 512M or 20G, in units of 1,024"
"""The form that `parse_size` expects."""
