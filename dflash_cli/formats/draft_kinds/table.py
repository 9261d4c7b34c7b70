"""The words of a kind's table: keys of its config, tensors with shapes as formulas, engines, other names.

A formula is a sum of products of sizes and numbers: `2*block-1`, `taps*features`. `a or b` takes b if a is absent or 0.
A size is the value of a key, or another formula of the kind.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_runtime.errors import MISSING
from dflash_runtime.json_values import is_int, is_number

Release = tuple[int, ...]
Variant = Literal["native", "speculators"]
"""How a config is laid out: decoder keys at the top level, or in `transformer_layer_config`."""

BODY = "{body}"
"""In a key's name: the container of the decoder keys, with its dot, or nothing."""

FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "count": (lambda value: is_int(value) and value > 0, "a positive integer"),
    "index": (lambda value: is_int(value) and value >= 0, "an integer of 0 or more"),
    "number": (is_number, "a number"),
    "positive": (lambda value: is_number(value) and value > 0, "a positive number"),
    "flag": (lambda value: isinstance(value, bool), "true or false"),
    "text": (lambda value: isinstance(value, str) and bool(value), "a text"),
    "layers": (
        lambda value: isinstance(value, list) and bool(value) and all(is_int(item) and item >= 0 for item in value),
        "a list of layer numbers",
    ),
    "kinds": (
        lambda value: isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value),
        "a list of texts",
    ),
    "one kind": (
        lambda value: isinstance(value, list) and len(set(map(str, value))) == 1 and isinstance(value[0], str),
        "a list of equal texts",
    ),
}
"""Name of a form -> whether a value has it, and its words."""


MOST = 1000
"""The most tensors of one name: a config may state any number of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A setting of a kind.

    size      its name in formulas and in descriptions
    names     the dotted keys that state it; readers prefer the first. `{body}` stands for the decoder's container
    form      the form of its value, from FORMS
    default   the value, or the formula in a text, that readers take if it is absent. MISSING: they stop
    is_needed whether a finding reports its absence
    needed_by the size that makes it needed if it is not 0
    choices   the only values that readers take, if not all
    only      the layout of configs that have the key, if not both
    """

    size: str
    names: tuple[str, ...]
    form: str = "count"
    default: Any = MISSING
    is_needed: bool = True
    needed_by: str = ""
    choices: tuple[Any, ...] = ()
    only: Variant | None = None

    def fault(self, value: Any) -> str:
        """The fault of a value in words, empty if it has the form."""
        if self.choices:
            known = any(type(item) is type(value) and item == value for item in self.choices)
            return "" if known else f"found {value!r}, expected {' or '.join(map(repr, self.choices))}"
        has_form, words = FORMS[self.form]
        return "" if has_form(value) else f"found {value!r}, expected {words}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """Tensors of a kind: name -> the formulas of its shape.

    `{layers}` in a name counts from 0 to the size `layers`, `{1:layers}` from 1.

    when        condition: `size` is stated and not false or 0; `!size` is the reverse; `size=a|b` compares with values
    is_needed   a file without these tensors is faulty
    only        config layout of files with these names; None for both layouts
    """

    shapes: Mapping[str, str]
    when: str = ""
    is_needed: bool = True
    only: Variant | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """An engine that serves a kind.

    architectures   entry of `architectures` -> the first release with a model
    types           speculators_model_type -> the first release that reads the type
    demands         size -> the values that the engine serves; the engine stops at other values
    of_types        `demands` of speculators configs
    ignores         size -> the values that the engine assumes; with other values acceptance drops
    coverage        pattern of required tensors: the engine fills other missing tensors at random
    needs_all_ids   the engine stops at a draft with a reduced vocabulary
    note            difference between the engine's computation and the draft's training; empty if equal
    """

    engine: str
    architectures: Mapping[str, Release] = field(default_factory=dict)
    types: Mapping[str, Release] = field(default_factory=dict)
    demands: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    of_types: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignores: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    coverage: str = r"(?!)"
    needs_all_ids: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """Other names of the same draft, for `dflash convert --to`.

    to              the word after `--to`
    since           the layout of the source, if not both
    variant         the layout of the result
    architecture    the entry of `architectures`, with `{family}` for the model family in the source's entry
    families        model_type -> the model family in names of architectures
    tensors         pattern -> replacement, for names of tensors
    keys            old dotted key -> new dotted key. A key that is not listed keeps its name
    added           dotted key -> its value, if the source does not state it
    demands         size -> the only values that the result can state
    """

    to: str
    since: Variant | None = None
    variant: Variant = "native"
    architecture: str
    families: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    added: Mapping[str, Any] = field(default_factory=dict)
    demands: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def evaluate(formula: str, sizes: Mapping[str, Any]) -> int | None:
    """The value of a formula, rounded down; None if a size is not known."""
    for choice in formula.split(" or "):
        value = _sum(choice, sizes)
        if value and math.isfinite(value):
            return int(value)
    return None


def _sum(formula: str, sizes: Mapping[str, Any]) -> float | None:
    total: float = 0
    for sign, product in re.findall(r"([+-]?)\s*([^+\s-]+)", formula):
        value = _product(product, sizes)
        if value is None:
            return None
        total += -value if sign == "-" else value
    return total


def _product(formula: str, sizes: Mapping[str, Any]) -> float | None:
    value: float = 1
    for sign, factor in re.findall(r"([*/]?)(\w+)", formula):
        found = int(factor) if factor.isdecimal() else sizes.get(factor)
        if isinstance(found, list):
            found = len(found)
        if not is_number(found) or (sign == "/" and not found):
            return None
        value = value / found if sign == "/" else value * found
    return value


def counted(names: Mapping[str, str], sizes: Mapping[str, Any]) -> dict[str, str]:
    """The names of tensors with every count written out."""
    found: dict[str, str] = {}
    for name, shape in names.items():
        count = re.search(r"\{(?:(\d+):)?(\w+)\}", name)
        if count is None:
            found[name] = shape
            continue
        for index in range(int(count[1] or 0), min(evaluate(count[2], sizes) or 0, MOST)):
            found[name.replace(count[0], str(index))] = shape
    return found
