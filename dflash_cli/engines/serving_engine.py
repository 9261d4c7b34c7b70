"""What is known of a serving engine, the registry that finds them, and the command that starts one.

An engine is one file in this package with a class decorated `@ENGINES.register(name)`, the rules that are about it
alone, and the dialect that is written for it. Everything that names engines elsewhere asks the registry.
"""

import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar, Literal

from dflash_cli.formats.dialect import COMMON, Format
from dflash_cli.rules.rule import EngineNames, Outcome, Problem
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.hf_config import SLIDING
from dflash_runtime.config import DraftConfig, TargetFacts
from dflash_runtime.errors import UsageError
from dflash_runtime.registry import Registry

Release = tuple[int, ...]

Habit = Literal[
    "model-prefix", "other-prefix", "encoder-names", "fused-projections", "interleaved-rope",
    "interleaved-rope-by-its-name", "gemma-norms", "nested-style",
    "unsorted-taps", "repeated-taps", "use-swa", "mask-pickle", "mask-safetensors",
]  # fmt: skip
"""What some exporters do and engines differ about; the rule that reports it says what it is."""


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The commands to type, in order, and the environment variables that the last of them needs."""

    commands: tuple[str, ...]
    num_draft_tokens: int
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The commands as a shell takes them."""
        prefix = "".join(f"{key}={shlex.quote(value)} " for key, value in self.env.items())
        return "\n".join([*self.commands[:-1], prefix + self.commands[-1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPair:
    """What a serve command is made of: names as an engine takes them, and the `serve_flag` of each finding.

    `schedule` has a K for ranges of batch sizes, both ends included, where one K does not suit all; an engine without
    such a setting takes `num_draft_tokens`.
    """

    draft: str
    target: str
    config: DraftConfig
    target_facts: TargetFacts
    num_draft_tokens: int
    flags: frozenset[str]
    schedule: tuple[tuple[int, int, int], ...] = ()

    @property
    def context_limit(self) -> int | None:
        """The draft's positions, where the target has more."""
        limit, reach = self.config.max_position_embeddings, self.target_facts.max_position_embeddings
        return limit if reach is not None and limit < reach else None


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """A serving engine at one release. The release is a tuple of numbers, empty if the engine has no releases.

    reads                  the dialects it loads, by their classes
    dialect                the dialect in which a draft is written for it
    serves_as_is           names of dialects that it serves without a rewritten config
    habits                 habit of exporters -> what it does, if it does not serve the habit as meant
    releases               the known releases, oldest first; the last is assumed if the user names none
    strictness             of several engines, the one with the highest decides the dialect of a corrected copy
    follows_reference      it reads drafts as z-lab's code does, and takes the target's head
    finds_by_architecture  it looks up its model by a name in `architectures`
    takes_other_widths     it serves a draft whose hidden_size differs from the target's
    has_dialect_rule       a rule of its own file reports dialects that it does not read
    """

    name: ClassVar[str]
    reads: ClassVar[tuple[type[Format], ...]]
    habits: ClassVar[Mapping[Habit, Outcome]] = {}
    releases: ClassVar[tuple[Release, ...]] = ()
    dialect: ClassVar[str] = COMMON
    serves_as_is: ClassVar[frozenset[str]] = frozenset()
    strictness: ClassVar[int] = 1
    follows_reference: ClassVar[bool] = False
    finds_by_architecture: ClassVar[bool] = False
    takes_other_widths: ClassVar[bool] = True
    has_dialect_rule: ClassVar[bool] = False

    release: Release = ()

    @classmethod
    def ends(cls) -> tuple[Release, ...]:
        """The oldest and the newest release that is known."""
        return (cls.releases[0], cls.releases[-1]) if cls.releases else ((),)

    def __str__(self) -> str:
        return f"{self.name} {release_text(self.release)}".rstrip()

    def outcome_of(self, habit: Habit) -> Outcome:
        """What this release does with a draft that has the habit."""
        return self.habits.get(habit, "serves")

    def served_causality(self, subject: Subject) -> tuple[bool, ...] | None:
        """Causality of each layer as the engine serves it; None if it does not read the dialect, or is not known to."""
        return self.causality(subject) if isinstance(subject.format, self.reads) else None

    def causality(self, subject: Subject) -> tuple[bool, ...] | None:
        """`served_causality` of a draft in a dialect that the engine reads; None if it is not known for the release."""
        return None

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """The command that starts the engine with a pair, with the K that it counts in."""
        raise NotImplementedError


ENGINES: Registry[type[ServingEngine]] = Registry("engine")


@cache
def all_engines() -> tuple[type[ServingEngine], ...]:
    """Every engine, by name."""
    ENGINES.discover("dflash_cli.engines")
    return tuple(sorted(ENGINES.values(), key=lambda engine: engine.name))


def engines_where(holds: Callable[[type[ServingEngine]], bool]) -> Callable[[], tuple[str, ...]]:
    """The names of all engines for which `holds` is true, computed when a rule about them is asked."""
    return lambda: tuple(engine.name for engine in all_engines() if holds(engine))


def engines_that_differ(*habits: Habit) -> EngineNames:
    """For rules about a habit: the engines that do not serve it as meant in one of their releases, or never."""

    def names() -> tuple[str, ...]:
        return tuple(
            engine.name
            for engine in all_engines()
            if any(engine(release).outcome_of(habit) != "serves" for habit in habits for release in engine.ends())
        )

    return names


def problems_of(habit: Habit, subject: Subject, problem: Problem, effects: Mapping[Outcome, str]) -> Iterator[Problem]:
    """A habit that was found, as a problem of those engines that do not serve it as meant.

    An error for engines that were named; where none was, a warning about all of them.
    """
    named = [engine for engine in subject.engines if isinstance(engine, ServingEngine)]
    asked = named or [engine(engine.ends()[-1]) for engine in all_engines()]
    outcomes: tuple[Outcome, ...] = ("stops", "drops")
    for outcome in outcomes:
        about = tuple(engine.name for engine in asked if engine.outcome_of(habit) == outcome)
        if about:
            yield replace(
                problem,
                effect=effects[outcome],
                outcome=outcome if named else "serves",
                severity="error" if named else "warning",
                engines=about,
            )


def one_stated_causality(subject: Subject) -> dict[str, Any]:
    """The repair of a draft that states one causality for all layers, under a key that an engine does not read."""
    trained = subject.trained_causality or ()
    is_one = subject.stated.states_causality and len(set(trained)) == 1
    return subject.stated.change("causal", trained[0]) if is_one else {}


def problem_of_causality(name: str, subject: Subject) -> Problem | None:
    """How an engine serves a draft with another causality than its config is read with, None where it does not.

    Where the config states none, what was trained is not known, so that it is a warning.
    """
    engine, trained = subject.engine(name), subject.trained_causality
    served = engine.served_causality(subject) if engine is not None else None
    if engine is None or served is None or trained is None or served == trained:
        return None
    message = f"{engine} serves {sum(served)} of {len(served)} layers causally, {subject.causality_in_words(trained)}"
    return Problem(
        subject.expected_at("causal"),
        message,
        severity=None if subject.stated.states_causality else "warning",
        outcome=None if subject.stated.states_causality else "serves",
    )


def parse_engines(text: str | None) -> tuple[ServingEngine, ...]:
    """Read `vllm@0.33,sglang`; an engine may be named once.

    Raises:
        UsageError: an engine or a release that is not known.
    """
    engines = tuple(_parse(part.strip()) for part in (text or "").split(",") if part.strip())
    names = [engine.name for engine in engines]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--engine: {name} is given twice; name one release of each engine")
    return engines


def known_engines() -> str:
    """Every engine with its releases, for help and messages."""
    return ", ".join(f"{engine.name}{_span(engine.releases)}" for engine in all_engines())


def release_text(release: Release) -> str:
    """`0.33` of (0, 33)."""
    return ".".join(map(str, release))


def causality_by_kind(subject: Subject) -> tuple[bool, ...]:
    """Sliding layers causal, full layers not: what readers take where a native draft states nothing."""
    return tuple(kind == SLIDING for kind in subject.stated.layer_types)


def stated_once(stated: object, subject: Subject) -> tuple[bool, ...]:
    """One stated causality for every layer, or that of the layers' kinds where none is stated."""
    return (stated,) * len(subject.stated.layer_types) if isinstance(stated, bool) else causality_by_kind(subject)


def _parse(text: str) -> ServingEngine:
    name, _, release = text.partition("@")
    known = {engine.name: engine for engine in all_engines()}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        guess = f"; did you mean {close[0]!r}?" if close else ""
        raise UsageError(f"--engine: unknown engine {name!r}{guess} (known: {known_engines()})")
    engine = known[name]
    if not release:
        return engine(engine.releases[-1] if engine.releases else ())
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", release):
        raise UsageError(f"--engine: {release!r} is no release of {name} (known: {known_engines()})")
    numbers = tuple(int(part) for part in release.split("."))
    if not any(numbers[: len(item)] == item for item in engine.releases):
        raise UsageError(f"--engine: unknown release {name} {release} (known: {known_engines()})")
    return engine(numbers)


def _span(releases: tuple[Release, ...]) -> str:
    if not releases:
        return ""
    ends = [release_text(item) for item in (releases[0], releases[-1])]
    return f"@{ends[0]}" if len(releases) == 1 else f"@{ends[0]}..{ends[1]}"
