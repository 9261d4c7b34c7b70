"""What a rule is, what it sees and what it reports.

A rule is a function decorated `@check(id, severity, effect=..., fix=..., source=...)` that takes a `Subject` and yields
a `Problem` for each thing that is wrong. It works on the raw config and the headers, so that a config too broken to be
read is still explained. The first line of its docstring is what must hold; the rest is for `dflash explain`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from dflash_cli.engines.serving_engine import Engine
from dflash_cli.formats.dialect import ParsedConfig
from dflash_runtime.checkpoint.files import Checkpoint, TensorInfo
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.config import DraftConfig, TargetConfig
from dflash_runtime.errors import CheckpointError, UnsupportedError
from dflash_runtime.registry import Registry

if TYPE_CHECKING:
    from dflash_cli.validation.readings import Search

Severity = Literal["error", "warning", "info"]
Level = Literal["headers", "weights", "run"]
LEVELS: tuple[Level, ...] = ("headers", "weights", "run")
Outcome = Literal["stops", "drops", "serves"]
"""What an engine does with a draft that breaks a rule: refuse or crash, accept less, or serve it all the same."""

CONFIG_FILE = "config.json"
SPECULATORS_BODY = "transformer_layer_config"

FIX_OUT = "dflash validate DRAFT --fix-out OUT"
TO_NATIVE = "dflash convert DRAFT OUT --to native --target TARGET"
LOOK = "dflash inspect DRAFT --tensors"
TRY = "dflash validate DRAFT --target TARGET --level run"
PAIR = "dflash validate DRAFT --target OTHER_TARGET"
AGAIN = "export the draft again where it was trained, then dflash validate OUT"

MAX_FINDINGS = 50
"""Of one rule on one checkpoint."""

REMOVED: Any = object()
"""In a repair: take the key out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: `place` is file:key, `effect` what it leads to, `fix` what to do.

    `engines` names those it is about, none where it is about all of them.
    """

    id: str
    severity: Severity
    place: str
    message: str
    effect: str = ""
    fix: str = ""
    source: str = ""
    engines: tuple[str, ...] = ()
    outcome: Outcome = "serves"
    repair: Mapping[str, Any] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        shown = ("id", "severity", "place", "message", "effect", "fix", "source", "outcome")
        return {**{name: getattr(self, name) for name in shown}, "engines": list(self.engines)}


@dataclass(frozen=True, slots=True)
class Problem:
    """What a rule yields; what it leaves open comes from the rule.

    `repair` maps dotted config keys to the value that is right beyond doubt, or to REMOVED.
    """

    place: str
    message: str
    effect: str = ""
    fix: str = ""
    severity: Severity | None = None
    engines: tuple[str, ...] | None = None
    outcome: Outcome | None = None
    repair: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A draft as far as it can be read, and the target and engines it is checked against.

    `parsed` is None where the config cannot be read (`reading_error` says why), `dims` where not even its sizes can;
    `tensors` is None where the headers cannot be read (`weights_error`). With a `config_error` there is no config.
    """

    path: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint | None = None
    files: frozenset[str] = frozenset()
    config_error: CheckpointError | None = None
    weights_error: CheckpointError | None = None
    reading_error: CheckpointError | UnsupportedError | None = None
    parsed: ParsedConfig | None = None
    dims: DraftConfig | None = None
    tensors: Mapping[str, TensorInfo] | None = None
    target_source: TargetSource | None = None
    target_reference: str | None = None
    reference: str | None = None
    engines: Sequence[Engine] = ()
    num_speculative_tokens: int | None = None
    search: "Search | None" = None

    @property
    def target(self) -> TargetConfig | None:
        return self.target_source.config if self.target_source is not None else None

    @property
    def target_json(self) -> Mapping[str, Any]:
        """The target's config as it is written; empty without a target."""
        return self.target_source.checkpoint.config if self.target_source is not None else {}

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

    def severity_for(self, *engines: str, otherwise: Severity = "warning") -> Severity:
        """Error where the user named one of the engines."""
        return "error" if any(self.engine(name) is not None for name in engines) else otherwise


Check = Callable[[Subject], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """A registered check. `engines` names those it is about, none where it is about all of them."""

    id: str
    severity: Severity
    run: Check
    effect: str
    fix: str
    source: str
    level: Level
    outcome: Outcome
    engines: tuple[str, ...]

    @property
    def title(self) -> str:
        return inspect.cleandoc(self.run.__doc__ or self.id).splitlines()[0]

    @property
    def text(self) -> str:
        """What the docstring says beyond its first line."""
        return "\n".join(inspect.cleandoc(self.run.__doc__ or "").splitlines()[2:])

    def findings(self, subject: Subject) -> list[Finding]:
        """What the rule finds; a fault that repeats without end is listed up to a limit."""
        problems = list(islice(self.run(subject), MAX_FINDINGS + 1))
        found = [self._finding(item) for item in problems[:MAX_FINDINGS]]
        if len(problems) > MAX_FINDINGS:
            found.append(replace(found[-1], message="and more of the same kind, not listed"))
        return found

    def _finding(self, item: Problem) -> Finding:
        severity = item.severity or self.severity
        return Finding(
            self.id,
            severity,
            item.place,
            item.message,
            item.effect or self.effect,
            item.fix or self.fix,
            self.source,
            self.engines if item.engines is None else item.engines,
            item.outcome or self.outcome,
            item.repair,
        )


CHECKS: Registry[Rule] = Registry("check")


def check(
    rule_id: str,
    severity: Severity = "error",
    *,
    effect: str,
    fix: str,
    source: str,
    level: Level = "headers",
    outcome: Outcome | None = None,
    engines: tuple[str, ...] = (),
) -> Callable[[Check], Check]:
    """Enter a function as the rule of that id.

    effect, fix   said where a problem says nothing closer; `fix` holds the command to try
    source        the thread or code the rule comes from
    outcome       what engines do; by default they stop at an error and serve the rest
    """
    assumed: Outcome = "stops" if severity == "error" else "serves"

    def decorate(function: Check) -> Check:
        rule = Rule(rule_id, severity, function, effect, fix, source, level, outcome or assumed, engines)
        CHECKS.register(rule_id)(rule)
        return function

    return decorate


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, by id; importing this package's modules registers them."""
    import dflash_cli.engines
    import dflash_cli.validation.rules

    CHECKS.discover(dflash_cli.validation.rules)
    CHECKS.discover(dflash_cli.engines)
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
