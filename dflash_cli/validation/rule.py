"""What a rule is and what it reports.

A rule is a function decorated `@check(id, severity, effect=..., fix=..., source=...)` that takes a `Subject` and yields
a `Problem` for each thing that is wrong. It works on the raw config and the headers, so that a config too broken to be
read is still explained. The first line of its docstring is what must hold; the rest is for `dflash explain`.

What follows from a rule beside its findings is said by flags of `check`, never by its id.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from typing import Any, Literal

from dflash_cli.validation.subject import Subject
from dflash_runtime.registry import Registry

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
Level = Literal["headers", "weights", "run"]
LEVELS: tuple[Level, ...] = ("headers", "weights", "run")
Outcome = Literal["stops", "drops", "serves"]
"""What an engine does with a draft that breaks a rule: refuse or crash, accept less, or serve it all the same."""

Stage = Literal["files", "identity", "rest", "unexplained"]
"""When a rule runs. Without a config only the rules on files do; a checkpoint of another kind is held to no rule after
those on identity; findings of the last stage are left out where a finding of another stage explains the fault."""

BFLOAT16 = "bfloat16"
"""A `serve_flag`: the pair must be served in bfloat16, whatever the target's config says."""

FIX_COPY = "dflash validate {draft} --fix-out {out}"
FIX_TO_NATIVE = "dflash convert {draft} {out} --to native --target {target}"
FIX_INSPECT = "dflash inspect {draft} --tensors"
FIX_RUN_LEVEL = "dflash validate {draft} --target {target} --level run"
FIX_OTHER_TARGET = "check the draft against the target it was trained for: dflash validate {draft} --target ORG/REPO"
FIX_REEXPORT = "export the draft again from the training run, then check it: dflash validate {draft}"

PLACEHOLDER = re.compile(r"\{(draft|target|out)\}")
GENERIC_WORDS = {"draft": "DRAFT", "target": "TARGET", "out": "OUT"}

MAX_FINDINGS = 50
"""Of one rule on one checkpoint."""

MAX_COUNTED = 10_000
"""Problems of one rule that are looked at to group them."""

REMOVED: Any = object()
"""In a repair: take the key out."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: `location` is file:key, `effect` what it leads to, `fix` what to do.

    `engines` names those it is about, none where it is about all of them. `stage`, `level`, `stops_runtime`,
    `serve_flag` and `is_about_training` are those of the rule, see `check`.
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
    level: Level = "headers"
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
    """What a rule yields; what it leaves open comes from the rule.

    `engines` are those of the rule's engines that this problem is about, where it is not about all of them. `repair`
    maps dotted config keys to the value that is right beyond doubt, or to REMOVED.
    """

    location: str
    message: str
    effect: str = ""
    fix: str = ""
    severity: Severity | None = None
    outcome: Outcome | None = None
    engines: tuple[str, ...] | None = None
    repair: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[Subject], Iterator[Problem]]
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
    level: Level
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
        """What the docstring says beyond its first line."""
        return "\n".join(inspect.cleandoc(self.run.__doc__ or "").splitlines()[2:])

    @property
    def module(self) -> str:
        """The file the rule stands in, as `rules.attention` or `engines.vllm`."""
        return ".".join(self.run.__module__.split(".")[-2:])

    @property
    def theme(self) -> str:
        """What the rules of the same file are about, in a word or two."""
        return self.module.rpartition(".")[2].replace("_", " ")

    @property
    def engines(self) -> tuple[str, ...]:
        """The engines the rule is about, none where it is about all of them."""
        return self.about() if callable(self.about) else self.about

    def findings(self, subject: Subject) -> list[Finding]:
        """What the rule finds; a fault that repeats without end is listed up to a limit."""
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
    level: Level = "headers",
    outcome: Outcome | None = None,
    engines: EngineNames = (),
    unnamed: Severity | None = None,
    stage: Stage = "rest",
    stops_runtime: bool = False,
    serve_flag: str | None = None,
    is_about_training: bool = False,
) -> Callable[[Check], Check]:
    """Enter a function as the rule of that id.

    effect, fix    said where a problem says nothing closer; `fix` holds the command to try, with `{draft}`, `{target}`
                   and `{out}` where the user's own names belong
    source         the thread or code the rule comes from
    outcome        what engines do; by default they stop at an error and serve the rest
    engines        those it is about, none where it is about all of them
    unnamed        its severity where it is about engines and none of them was named; None: it does not run then
    stage          when it runs
    stops_runtime  an error keeps this tool's own runtime from running the pair too; so does any that stops every engine
    serve_flag     what a serve command must see to; each engine knows what it does about a flag
    is_about_training
                   it doubts how the draft was trained, so that a copy which states something else mends nothing
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
    """Every rule, by id: those of a theme, and those that an engine's own file brings."""
    for package in ("dflash_cli.validation.rules", "dflash_cli.engines"):
        CHECKS.discover(package)
    return tuple(sorted(CHECKS.values(), key=lambda rule: rule.id))


def known_ids() -> set[str]:
    """Every id a finding can have."""
    return {rule.id for rule in all_rules()}


def _grouped(problems: Iterator[Problem]) -> Iterator[Problem]:
    """Problems that differ in their place only as one, which names the first place and how many more there are."""
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
    """A command with the user's own names in it."""
    return PLACEHOLDER.sub(lambda found: words[found[1]], template)
