"""Rules, and the problems and findings they report.

A rule is a function decorated `@check(id, severity, effect=..., fix=..., source=...)`. It takes a `Subject`, or two
servers at the level kv-transfer, and yields a `Problem` for each fault. It reads the raw config and the headers, so
that it also explains a config that cannot be parsed. The first line of its docstring states what must hold; `dflash
explain` prints the rest.

Flags of `check` state every other consequence of a rule. No code asks for a rule's id.
"""

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any, Literal, Protocol

from dflash_cli.formats.dialect import COMMON
from dflash_cli.rules.subject import NamedEngine
from dflash_runtime.documents import HIDDEN, copy_fields
from dflash_runtime.errors import UsageError
from dflash_runtime.registry import Registry

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
Level = Literal["headers", "weights", "run"]
LEVELS: tuple[Level, ...] = ("headers", "weights", "run")
"""The levels at which a draft is validated."""
RuleLevel = Literal["headers", "weights", "run", "kv-transfer"]
RULE_LEVELS: tuple[RuleLevel, ...] = (*LEVELS, "kv-transfer")
"""The levels at which a draft is validated, and the level of rules on two servers."""

PACKAGES: Mapping[RuleLevel, tuple[str, ...]] = {
    "headers": ("dflash_cli.rules.themes", "dflash_cli.engines"),
    "weights": ("dflash_cli.rules.themes", "dflash_cli.engines"),
    "run": ("dflash_cli.diagnosis.run_level", "dflash_cli.diagnosis.family_readings"),
    "kv-transfer": ("dflash_cli.handoff.two_servers",),
}
"""Level -> the packages and modules that register its rules."""

Outcome = Literal["stops", "drops", "serves"]
"""The result of serving a draft that breaks a rule: the engine refuses it or crashes, acceptance drops, or neither."""

Stage = Literal["files", "identity", "kind", "rest", "unexplained"]
"""When a rule runs. Without a config, only the rules of stage `files` run. If a rule of stage `identity` finds a draft
of another kind, only the rules of stage `kind` run after it. Findings of stage `unexplained` are dropped if another
finding explains them."""

BFLOAT16 = "bfloat16"
"""A `serve_flag`: serve the pair in bfloat16, whatever the target's config says."""

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

Fact = Literal[
    "zeros", "unused tap", "copy", "one value", "offsets", "zero lines", "few values", "small lines", "outlier", "size",
    "noise", "clipped", "repeated lines", "one sign", "format", "grid", "many zeros",
]  # fmt: skip
"""The fact about a tensor that a look states."""

MAX_FINDINGS = 50
"""The most findings of one rule that a report lists."""

MAX_COUNTED = 10_000
"""The most problems of one rule that are grouped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Traits that the findings of a rule share with it.

    level               the level that runs the rule
    stage               when the rule runs
    stops_runtime       an error also stops the runtime of dflash, like an error that stops every engine
    serve_flag          a need that the serve command must meet; each engine knows the option
    fact                the fact about a tensor that the rule states
    follows_from        facts from which its own fact follows. `diagnose` then names the other rule, not this one.
    is_about_start      the rule judges how an engine is started, such as on how many GPUs, with a config that it reads
    is_about_training   the rule doubts how the draft was trained, so a copy with another config repairs nothing
    """

    level: Annotated[RuleLevel, HIDDEN] = "headers"
    stage: Annotated[Stage, HIDDEN] = "rest"
    stops_runtime: Annotated[bool, HIDDEN] = False
    serve_flag: Annotated[str | None, HIDDEN] = None
    is_about_training: Annotated[bool, HIDDEN] = False
    is_about_start: Annotated[bool, HIDDEN] = False
    fact: Annotated[Fact | None, HIDDEN] = None
    follows_from: Annotated[tuple[Fact, ...], HIDDEN] = ()


@dataclass(frozen=True, slots=True)
class Finding(Traits):
    """One fault: its location (file:key), its effect and its fix. `engines` is empty if it concerns every engine."""

    id: Annotated[str, "of the rule: dflash explain ID"]
    severity: Severity
    location: str
    message: str
    effect: str = ""
    fix: str = ""
    source: str = ""
    engines: tuple[str, ...] = ()
    outcome: Annotated[Outcome, "how engines serve the draft"] = "serves"
    repair: Annotated[Mapping[str, Any], HIDDEN] = field(default_factory=dict)
    correction: Annotated[str, HIDDEN] = ""
    also: Annotated[tuple[str, ...], HIDDEN] = ()

    def concerns(self, engine: str) -> bool:
        """Whether the finding concerns that engine."""
        return not self.engines or engine in self.engines


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault that a rule yields. An empty field takes the rule's value.

    engines      the engines it concerns, if not every engine of the rule
    repair       dotted config key -> the only right value, or REMOVED
    correction   what the user may correct if the evidence convinces them
    also         other locations of the same problem
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
    also: tuple[str, ...] = ()


class _Judged(Protocol):
    """A `Subject`, or two servers at the level kv-transfer."""

    def engine(self, name: str) -> NamedEngine | None: ...

    @property
    def command_words(self) -> dict[str, str]: ...


Check = Callable[[Any], Iterator[Problem]]


def _no_check(subject: object) -> Iterator[Problem]:
    return iter(())


@dataclass(frozen=True, slots=True)
class Rule(Traits):
    """A check and its consequences. `@check(id, severity, ...)` registers a function as the check of a new rule.

    A problem may replace effect, fix, severity, outcome and engines. For other fields see `Traits`.

    fix        the command to try, in which `{draft}`, `{target}` and `{out}` stand for the user's names
    source     the thread or code that the rule comes from
    outcome    by default an engine stops at an error and serves the rest. `diagnose` names a warning that drops
               acceptance if acceptance is low.
    engines    the engines that the rule is about; empty if it is about every engine
    unnamed    the severity if the rule is about engines and the user named none of them. With None it does not run.
    """

    id: str
    severity: Severity = "error"
    _: KW_ONLY
    effect: str
    fix: str
    source: str
    outcome: Outcome | None = None
    engines: Sequence[str] = ()
    unnamed: Severity | None = None
    run: Check = _no_check

    def __call__(self, function: Check) -> Check:
        CHECKS.register(self.id)(replace(self, run=function))
        return function

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
        """The subject of the rules in the same file, in a word or two."""
        return self.module.rpartition(".")[2].replace("_", " ")

    def findings(self, subject: _Judged) -> list[Finding]:
        """At most MAX_FINDINGS findings of the rule, and one more that says that there are others."""
        engines = tuple(self.engines)
        named = tuple(name for name in engines if subject.engine(name) is not None)
        severity = self.unnamed if engines and not named else self.severity
        if severity is None:
            return []
        words = subject.command_words
        by_severity = "stops" if self.severity == "error" else "serves"
        problems = list(islice(_grouped(self.run(subject)), MAX_FINDINGS + 1))
        found = [
            copy_fields(
                Finding,
                self,
                severity=item.severity or severity,
                location=item.location,
                message=item.message,
                effect=item.effect or self.effect,
                fix=fill(item.fix or self.fix, words),
                engines=item.engines or named or engines,
                outcome=item.outcome or self.outcome or by_severity,
                repair=item.repair,
                correction=item.correction,
                also=item.also,
            )
            for item in problems[:MAX_FINDINGS]
        ]
        if len(problems) > MAX_FINDINGS:
            found.append(replace(found[-1], message="more faults of the same kind, not listed"))
        return found


CHECKS: Registry[Rule] = Registry("check")


check = Rule
"""The name of `Rule` as a decorator."""
check_weights = partial(check, level="weights")


@cache
def all_rules() -> tuple[Rule, ...]:
    """The rules of every level, by id."""
    return tuple(sorted((rule for level in RULE_LEVELS for rule in rules_of(level)), key=lambda rule: rule.id))


def rule_ids() -> list[str]:
    """The ids of all rules."""
    return [rule.id for rule in all_rules()]


@cache
def rules_of(level: RuleLevel) -> tuple[Rule, ...]:
    """The rules of one level, by id. Imports no module of another level."""
    for package in PACKAGES[level]:
        CHECKS.discover(package)
    return tuple(sorted((rule for rule in CHECKS.values() if rule.level == level), key=lambda rule: rule.id))


def ignored_ids(given: Collection[str], levels: Collection[RuleLevel] = LEVELS) -> frozenset[str]:
    """The ids of rules to skip, in upper case.

    Raises:
        UsageError: no rule of these levels has such an id.
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
    """The problems. Problems that differ only in location become one, which counts the other locations."""
    alike: dict[tuple[object, ...], list[Problem]] = {}
    for item in islice(problems, MAX_COUNTED):
        said = (item.message, item.effect, item.fix, item.severity, item.outcome, item.engines)
        alike.setdefault(said, []).append(item)
    for group in alike.values():
        first, rest = group[0], len(group) - 1
        repair = {key: value for item in group for key, value in item.repair.items()}
        places = "place" if rest == 1 else "places"
        also = tuple(item.location for item in group[1:])
        message = f"{first.message} (and in {rest} more {places})"
        yield replace(first, message=message, repair=repair, also=also) if rest else first


def fill(template: str, words: Mapping[str, str]) -> str:
    """A `fix` with its placeholders replaced by names."""
    return PLACEHOLDER.sub(lambda found: words[found[1]], template)
