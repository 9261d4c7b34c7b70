"""What a rule is, what it sees and what it reports.

A rule is a function decorated `@check(id, severity)` that takes a `Subject` and yields a `Problem` for each thing that
is wrong. It works on the raw config and the headers, so that a config too broken to be read is still explained.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeGuard

from dflash_cli.checks.engines import Engine
from dflash_cli.formats.base import Reading
from dflash_runtime.checkpoint import TensorInfo
from dflash_runtime.config import DraftConfig, TargetConfig
from dflash_runtime.registry import Registry

Severity = Literal["error", "warning", "info"]

CONFIG_FILE = "config.json"
SPECULATORS_BODY = "transformer_layer_config"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: `place` is file:key, `effect` what it leads to, `fix` what to do."""

    id: str
    severity: Severity
    place: str
    message: str
    effect: str = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """What a rule yields; it becomes a `Finding` under the rule's id and severity, unless it names its own."""

    place: str
    message: str
    effect: str = ""
    fix: str = ""
    severity: Severity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A draft as far as it can be read, and the target and engines it is checked against.

    `reading` is None where the config cannot be read, `dims` where not even its sizes can; `tensors` is None where the
    headers cannot be read.
    """

    path: Path
    config: Mapping[str, Any]
    reading: Reading | None = None
    dims: DraftConfig | None = None
    tensors: Mapping[str, TensorInfo] | None = None
    target: TargetConfig | None = None
    target_path: Path | None = None
    target_reference: str | None = None
    engines: Sequence[Engine] = ()

    @property
    def is_speculators(self) -> bool:
        return "speculators_model_type" in self.config or "speculators_config" in self.config

    @property
    def body(self) -> Mapping[str, Any]:
        """The object that holds the decoder keys."""
        return as_object(self.config.get(SPECULATORS_BODY)) if self.is_speculators else self.config

    @property
    def nested(self) -> Mapping[str, Any]:
        """`dflash_config` of a native draft."""
        return {} if self.is_speculators else as_object(self.config.get("dflash_config"))

    def place(self, key: str) -> str:
        """A key at the top level of the config."""
        return f"{CONFIG_FILE}:{key}"

    def body_place(self, key: str) -> str:
        """A key of the decoder body."""
        return self.place(f"{SPECULATORS_BODY}.{key}" if self.is_speculators else key)

    def homes(self, key: str) -> dict[str, Any]:
        """Every place that states a key which native drafts may nest, with its value; the one that wins first."""
        found = {self.place(f"dflash_config.{key}"): self.nested[key]} if key in self.nested else {}
        return {**found, self.place(key): self.config[key]} if key in self.config else found

    def stated(self, key: str) -> Any:
        """The value an engine takes for such a key, None where there is none."""
        return next((value for value in self.homes(key).values() if value is not None), None)

    @property
    def tap_key(self) -> str:
        return "aux_hidden_state_layer_ids" if self.is_speculators else "target_layer_ids"

    @property
    def tap_place(self) -> str:
        return next(iter(self.homes(self.tap_key)), self.place(self.tap_key))

    @property
    def taps(self) -> list[int] | None:
        """Tapped layers as outputs numbered from 0, None where they are no list of integers."""
        value = self.stated(self.tap_key)
        if not isinstance(value, list) or not value or not all(is_int(item) for item in value):
            return None
        return [item - 1 for item in value] if self.is_speculators else list(value)

    @property
    def block_size(self) -> int | None:
        value = self.stated("block_size")
        return value if is_int(value) else None

    @property
    def layer_types(self) -> list[str]:
        """The stated kind of each layer; all full where nothing is stated."""
        value = self.body.get("layer_types")
        if isinstance(value, list):
            return [item for item in value if isinstance(item, str)]
        count = self.body.get("num_hidden_layers")
        return ["full_attention"] * (count if is_int(count) and 0 < count < 10_000 else 1)

    @property
    def num_target_layers(self) -> int | None:
        """The target's depth: from the target where it is given, else as the draft states it."""
        if self.target is not None:
            return self.target.num_layers
        value = self.stated("num_target_layers")
        return value if is_int(value) and value > 0 else None

    def engine(self, name: str) -> Engine | None:
        """The engine of that name, if the user asked for it."""
        return next((engine for engine in self.engines if engine.name == name), None)

    def severity_for(self, engine: str, otherwise: Severity = "warning") -> Severity:
        """Error where the user named the engine."""
        return "error" if self.engine(engine) is not None else otherwise


Check = Callable[[Subject], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered check."""

    id: str
    severity: Severity
    run: Check
    needs_weights: bool = False

    @property
    def title(self) -> str:
        return (self.run.__doc__ or self.id).strip().splitlines()[0]

    def findings(self, subject: Subject) -> list[Finding]:
        return [
            Finding(self.id, item.severity or self.severity, item.place, item.message, item.effect, item.fix)
            for item in self.run(subject)
        ]


CHECKS: Registry[Rule] = Registry("check")


def check(rule_id: str, severity: Severity = "error", *, needs_weights: bool = False) -> Callable[[Check], Check]:
    """Enter a function as the rule of that id."""

    def decorate(function: Check) -> Check:
        CHECKS.register(rule_id)(Rule(rule_id, severity, function, needs_weights))
        return function

    return decorate


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by id; importing this package's modules registers them."""
    import dflash_cli.checks as package

    CHECKS.discover(package)
    return tuple(sorted(CHECKS.values(), key=lambda rule: rule.id))


def is_int(value: object) -> TypeGuard[int]:
    """Whether a JSON value is an integer, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a JSON value is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_object(value: object) -> Mapping[str, Any]:
    """A JSON object, or an empty one where something else stands in its place."""
    return value if isinstance(value, dict) else {}
