"""What a rule is and what it reports.

A rule is a function decorated `@check(id, severity, effect=..., fix=..., source=...)` that takes a `Subject`, or at the
level kv-transfer two servers, and yields a `Problem` for each thing that is wrong. It works on the raw config and the
headers, so that a config too broken to be read is still explained. The first line of its docstring is what must hold;
the rest is for `dflash explain`.

Whatever else follows from a rule, beside its findings, is stated by flags of `check`, never by its id.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, Literal, Protocol

from dflash_cli.formats.dialect import COMMON
from dflash_cli.rules.subject import NamedEngine
from dflash_runtime.errors import UsageError
from dflash_runtime.registry import Registry

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
Level = Literal["headers", "weights", "run"]
LEVELS: tuple[Level, ...] = ("headers", "weights", "run")
RuleLevel = Literal["headers", "weights", "run", "kv-transfer"]
RULE_LEVELS: tuple[RuleLevel, ...] = (*LEVELS, "kv-transfer")
"""The levels at which a draft is validated, and the level of rules on two servers."""

PACKAGES: Mapping[RuleLevel, tuple[str, ...]] = {
    "headers": ("dflash_cli.rules.themes", "dflash_cli.engines"),
    "weights": ("dflash_cli.rules.themes", "dflash_cli.engines"),
    "run": ("dflash_cli.diagnosis.run_level",),
    "kv-transfer": ("dflash_cli.handoff.two_servers",),
}
"""Level -> the packages and modules that register its rules."""

Outcome = Literal["stops", "drops", "serves"]
"""What an engine does with a draft that breaks a rule: refuse it or crash, serve it with lower acceptance, or serve
it as usual."""

Stage = Literal["files", "identity", "rest", "unexplained"]
"""When a rule runs. Without a config, only the rules of stage `files` run. If a rule of stage `identity` finds a draft
of another kind, no later rule runs. Findings of stage `unexplained` are dropped if another finding explains them."""

BFLOAT16 = "bfloat16"
"""A `serve_flag`: the pair must be served in bfloat16, whatever the target's config says."""

FIX_COPY = "dflash validate {draft} --fix-out {out}"
FIX_TO_COMMON = f"dflash convert {{draft}} {{out}} --to {COMMON} --target {{target}}"
FIX_INSPECT = "dflash inspect {draft} --tensors"
FIX_RUN_LEVEL = "dflash validate {draft} --target {target} --level run"
FIX_OTHER_TARGET = "check the draft against the target it was trained for: dflash validate {draft} --target ORG/REPO"
FIX_REEXPORT = "export the draft again from the training run, then check it: dflash validate {draft}"
FIX_REEXPORT_WEIGHTS = f"{FIX_REEXPORT} --level weights"

PLACEHOLDER = re.compile(r"\{(draft|target|out|servers|engine)\}")
GENERIC_WORDS = {
    "draft": "DRAFT",
    "target": "TARGET",
    "out": "OUT",
    "servers": "PREFILL.json DECODE.json",
    "engine": "ENGINE",
}

MAX_FINDINGS = 50
"""The most findings of one rule that a report lists."""

MAX_COUNTED = 10_000
"""Problems of one rule that are looked at to group them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: `location` is file:key, `effect` what it leads to, `fix` what to do.

    `engines` names those it is about; empty if it is about all. `stage`, `level`, `stops_runtime`, `serve_flag` and
    `is_about_training` are those of the rule, see `check`.
    """

    id: str
    severity: Severity
    location: str
    message: str
    effect: str = ""
    fix: str = ""
    source: str = ""
    engines: tuple[str, ...] = ()
    outcome: Outcome = "serves"
    repair: Mapping[str, Any] = field(default_factory=dict)
    correction: str = ""
    level: RuleLevel = "headers"
    stage: Stage = "rest"
    stops_runtime: bool = False
    serve_flag: str | None = None
    is_about_training: bool = False

    def concerns(self, engine: str) -> bool:
        """Whether the finding is about that engine."""
        return not self.engines or engine in self.engines

    def to_json(self) -> dict[str, Any]:
        shown = ("id", "severity", "location", "message", "effect", "fix", "source", "outcome")
        return {**{name: getattr(self, name) for name in shown}, "engines": list(self.engines)}


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault that a rule yields; fields that it leaves empty are taken from the rule.

    `engines` are those of the rule's engines that this problem is about, if it is not about all of them. `repair` maps
    dotted config keys to the one value that can be right, or to REMOVED. `correction` says what the user may correct.
    """

    location: str
    message: str
    effect: str = ""
    fix: str = ""
    severity: Severity | None = None
    outcome: Outcome | None = None
    engines: tuple[str, ...] | None = None
    repair: Mapping[str, Any] = field(default_factory=dict)
    correction: str = ""


class _Judged(Protocol):
    """What a rule can be about: a `Subject`, or at the level kv-transfer a pair of servers."""

    def engine(self, name: str) -> NamedEngine | None: ...

    @property
    def command_words(self) -> dict[str, str]: ...


Check = Callable[[Any], Iterator[Problem]]
"""It takes what is judged at its level."""
EngineNames = tuple[str, ...] | Callable[[], tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A registered check; see `check` for its fields."""

    id: str
    severity: Severity
    run: Check
    effect: str
    fix: str
    source: str
    level: RuleLevel
    outcome: Outcome
    about: EngineNames
    unnamed: Severity | None
    stage: Stage
    stops_runtime: bool
    serve_flag: str | None
    is_about_training: bool

    @property
    def title(self) -> str:
        return inspect.cleandoc(self.run.__doc__ or self.id).splitlines()[0]

    @property
    def text(self) -> str:
        """The docstring after its first line."""
        return "\n".join(inspect.cleandoc(self.run.__doc__ or "").splitlines()[2:])

    @property
    def module(self) -> str:
        """The module that defines the rule, such as `rules.themes.attention` or `engines.vllm`."""
        return self.run.__module__.removeprefix("dflash_cli.")

    @property
    def theme(self) -> str:
        """What the rules of the same file are about, in a word or two."""
        return self.module.rpartition(".")[2].replace("_", " ")

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines that the rule is about; empty if it is about all."""
        return self.about() if callable(self.about) else self.about

    def findings(self, subject: _Judged) -> list[Finding]:
        """The findings of the rule, at most MAX_FINDINGS and a last one that says there are more."""
        engines = self.engines
        named = tuple(name for name in engines if subject.engine(name) is not None)
        severity = self.unnamed if engines and not named else self.severity
        if severity is None:
            return []
        words = subject.command_words
        problems = list(islice(_grouped(self.run(subject)), MAX_FINDINGS + 1))
        found = [
            Finding(
                id=self.id,
                severity=item.severity or severity,
                location=item.location,
                message=item.message,
                effect=item.effect or self.effect,
                fix=fill(item.fix or self.fix, words),
                source=self.source,
                engines=item.engines or named or engines,
                outcome=item.outcome or self.outcome,
                repair=item.repair,
                correction=item.correction,
                level=self.level,
                stage=self.stage,
                stops_runtime=self.stops_runtime,
                serve_flag=self.serve_flag,
                is_about_training=self.is_about_training,
            )
            for item in problems[:MAX_FINDINGS]
        ]
        if len(problems) > MAX_FINDINGS:
            found.append(replace(found[-1], message="and more of the same kind, not listed"))
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.title,
            "severity": self.severity,
            "engines": list(self.engines),
            "level": self.level,
            "theme": self.theme,
            "effect": self.effect,
            "fix": fill(self.fix, GENERIC_WORDS),
            "source": self.source,
            "text": self.text,
        }


CHECKS: Registry[Rule] = Registry("check")


def check(
    rule_id: str,
    severity: Severity = "error",
    *,
    effect: str,
    fix: str,
    source: str,
    level: RuleLevel = "headers",
    outcome: Outcome | None = None,
    engines: EngineNames = (),
    unnamed: Severity | None = None,
    stage: Stage = "rest",
    stops_runtime: bool = False,
    serve_flag: str | None = None,
    is_about_training: bool = False,
) -> Callable[[Check], Check]:
    """Register a function as the rule of that id.

    effect, fix    used unless a problem has its own; `fix` is the command to try, in which `{draft}`, `{target}` and
                   `{out}` stand for the user's names
    source         the thread or code the rule comes from
    outcome        what engines do; by default they stop at an error and serve the rest. Of a warning only `diagnose`
                   asks it: one that lowers acceptance is named where acceptance is low
    engines        the engines it is about; empty if it is about all
    unnamed        its severity if it is about engines of which the user named none; with None it does not run then
    stage          when it runs
    stops_runtime  an error stops the runtime of dflash too, as does an error that stops every engine
    serve_flag     a need that the serve command must meet; each engine knows by which option
    is_about_training
                   it doubts how the draft was trained, so that a copy that states something else repairs nothing
    """
    assumed: Outcome = "stops" if severity == "error" else "serves"

    def decorate(function: Check) -> Check:
        rule = Rule(
            id=rule_id,
            severity=severity,
            run=function,
            effect=effect,
            fix=fix,
            source=source,
            level=level,
            outcome=outcome or assumed,
            about=engines,
            unnamed=unnamed,
            stage=stage,
            stops_runtime=stops_runtime,
            serve_flag=serve_flag,
            is_about_training=is_about_training,
        )
        CHECKS.register(rule_id)(rule)
        return function

    return decorate


@cache
def all_rules() -> tuple[Rule, ...]:
    """The rules of every level in order of id."""
    return tuple(sorted((rule for level in RULE_LEVELS for rule in rules_of(level)), key=lambda rule: rule.id))


@cache
def rules_of(level: RuleLevel) -> tuple[Rule, ...]:
    """The rules of one level in order of id. Modules of other levels are not imported."""
    for package in PACKAGES[level]:
        CHECKS.discover(package)
    return tuple(sorted((rule for rule in CHECKS.values() if rule.level == level), key=lambda rule: rule.id))


def ignored_ids(given: Collection[str], levels: Collection[RuleLevel] = LEVELS) -> frozenset[str]:
    """The ids of rules to skip.

    Raises:
        UsageError: an id that no rule of these levels has.
    """
    ids = frozenset(part.strip().upper() for part in given) - {""}
    unknown = sorted(ids - {rule.id for level in levels for rule in rules_of(level)})
    if unknown:
        raise UsageError(
            f"unknown rule {', '.join(unknown)}",
            id="unknown-rule",
            field="--ignore",
            found=unknown,
            hint="dflash explain lists every rule",
        )
    return ids


def _grouped(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Problems that differ only in their location as one, with the first location and how many more there are."""
    alike: dict[tuple[object, ...], list[Problem]] = {}
    for item in islice(problems, MAX_COUNTED):
        said = (item.message, item.effect, item.fix, item.severity, item.outcome, item.engines)
        alike.setdefault(said, []).append(item)
    for group in alike.values():
        first, rest = group[0], len(group) - 1
        repair = {key: value for item in group for key, value in item.repair.items()}
        places = "place" if rest == 1 else "places"
        yield replace(first, message=f"{first.message} (and in {rest} more {places})", repair=repair) if rest else first


def fill(template: str, words: Mapping[str, str]) -> str:
    """A `fix` with names in place of its placeholders."""
    return PLACEHOLDER.sub(lambda found: words[found[1]], template)
