"""Serving engines, their registry, and the commands that start them.

An engine is one file in this package: a class decorated `@ENGINES.register(name)`, the rules on this engine alone, and
the dialect that is written for it. All other code asks the registry for engines.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from pathlib import PurePath
from typing import Any, ClassVar, Literal

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import EngineReading
from dflash_cli.engines.split_model import SplitModel
from dflash_cli.engines.splitting import Misfit
from dflash_cli.formats.dialect import COMMON, SERVERS, Format, named_architectures
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.draft_kinds.kind_reading import KindReading
from dflash_cli.formats.unserved import asks_for_latent_attention
from dflash_cli.rules.rule import Check, Outcome, Problem
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.targets.hf_config import SLIDING
from dflash_runtime.registry import Registry
from dflash_runtime.target_config import TargetFacts

Release = tuple[int, ...]

Habit = Literal[
    "model-prefix", "other-prefix", "encoder-names", "fused-projections", "interleaved-rope",
    "interleaved-rope-by-its-name", "gemma-norms", "nested-style",
    "unsorted-taps", "repeated-taps", "extra-tensors", "use-swa", "mask-pickle", "mask-safetensors",
]  # fmt: skip
"""Habits of exporters that engines treat differently. The rule that reports a habit explains it."""

HabitProblem = tuple[Habit, Problem]


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The commands to type, in order, and the environment variables of the last command."""

    commands: tuple[str, ...]
    num_draft_tokens: int
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The commands as text for a shell."""
        prefix = "".join(f"{key}={shlex.quote(value)} " for key, value in self.env.items())
        return "\n".join([*self.commands[:-1], prefix + self.commands[-1]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPair:
    """The input of a serve command: names that the engine can load, and the `serve_flag` of each finding.

    `schedule` lists (smallest batch, largest batch, K) if different batch sizes need different K. An engine without
    such a setting uses `num_draft_tokens`. `is_chain` says that the draft proposes one token after another. `settings`
    are vLLM's settings of speculative decoding beside method, model and number of tokens. `target_layer_ids` and
    `mask_token_id` come from a config that dflash reads. `tensor_parallel` is the number of GPUs.
    """

    draft: str
    target: str
    max_position_embeddings: int | None
    target_facts: TargetFacts
    num_draft_tokens: int
    flags: frozenset[str]
    schedule: tuple[tuple[int, int, int], ...] = ()
    architecture: str | None = None
    method: str = "dflash"
    is_chain: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    tensor_parallel: int = 1

    @property
    def context_limit(self) -> int | None:
        """The draft's number of positions if the target has more, else None."""
        limit, reach = self.max_position_embeddings, self.target_facts.max_position_embeddings
        return limit if reach is not None and limit is not None and limit < reach else None


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """A serving engine at one release. The release is a tuple of numbers; empty for an engine without releases.

    also                   nicknames of the engine, for hints: `trtllm`
    reads                  classes of the dialects that the engine loads
    dialect                name of the dialect that `convert` writes for this engine
    serves_as_is           names of dialects whose configs need no change
    habits                 habit of exporters -> the outcome, if the engine misreads the habit
    releases               the known releases, oldest first; the last is assumed if the user names none
    strictness             the engine with the highest value decides the dialect of a corrected copy
    follows_reference      reads drafts as z-lab's code does, and uses the target's head
    finds_by_architecture  finds the model class by a name in `architectures`
    takes_other_widths     serves a draft with another hidden_size than its target
    has_dialect_rule       a rule in the engine's file reports unreadable dialects
    splits_models          `split_misfits` judges tensor parallelism
    models                 architecture of a draft of another kind or family -> the first release with a model for it
    read_families          the draft families whose native configs `read_values` judges
    """

    name: ClassVar[str]
    also: ClassVar[tuple[str, ...]] = ()
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
    splits_models: ClassVar[bool] = False
    models: ClassVar[Mapping[str, Release]] = {}
    read_families: ClassVar[frozenset[str]] = frozenset({Format.family})

    release: Release = ()

    @classmethod
    def ends(cls) -> tuple[Release, ...]:
        """The oldest and the newest known release."""
        return (cls.releases[0], cls.releases[-1]) if cls.releases else ((),)

    @classmethod
    def read_release(cls, text: str) -> Release | None:
        """The release of a text such as `0.33`; None if no release is written so."""
        is_dotted = re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", text)
        return tuple(map(int, text.split("."))) if is_dotted else None

    @classmethod
    def write_release(cls, release: Release) -> str:
        """The text of a release. An engine that numbers its releases in another way overrides both methods."""
        return release_text(release)

    def __str__(self) -> str:
        return f"{self.name} {self.write_release(self.release)}".rstrip()

    def outcome_of(self, habit: Habit) -> Outcome:
        """The outcome if this release serves a draft with the habit."""
        return self.habits.get(habit, "serves")

    def read_config(self, subject: Subject) -> EngineReading | EngineStops | None:
        """The values that the engine serves the draft with, or the key at which it stops.

        None if it does not read the dialect, or if its code is not modelled for such a config.
        """
        if not isinstance(subject.format, self.reads) or subject.format.family not in self.read_families:
            return None
        if self._loads_without_parts(subject):
            return None
        if str(self) not in subject.known:
            try:
                self._require_model(subject)
                subject.known[str(self)] = self.read_values(subject)
            except EngineStops as stops:
                subject.known[str(self)] = stops
        found: EngineReading | EngineStops | None = subject.known[str(self)]
        return found

    def _loads_without_parts(self, subject: Subject) -> bool:
        is_other = subject.format.family != Format.family and not self.serves_kind(subject.format, subject.config)
        return is_other and self.loads_without_parts(subject.format, subject.config)

    def loads_without_parts(self, dialect: Format, config: Mapping[str, Any]) -> bool:
        """Whether it loads a draft of another family, under a name without a model for it, as a DFlash draft."""
        return False

    def _require_model(self, subject: Subject) -> None:
        """Require a model for drafts of another family than DFlash.

        Raises:
            EngineStops: the engine lacks a model for the draft's architecture.
        """
        if subject.format.family != Format.family and not self.serves_kind(subject.format, subject.config):
            raise EngineStops("architectures", f"found {named_architectures(subject.config)}, without a model for it")

    def read_values(self, subject: Subject) -> EngineReading | None:
        """`read_config` for a dialect that the engine reads.

        Raises:
            EngineStops: the key at which it stops.
        """
        return None

    def judges(self, dialect: Format) -> bool:
        """Whether dflash knows if the engine serves drafts of this kind and family. If not, the verdict says so."""
        return True

    def refuses_kind(self, dialect: Format, config: Mapping[str, Any]) -> str | None:
        """The reason why this release does not serve a draft of another kind; None if it serves it."""
        if not isinstance(dialect, Kind):
            return None if self.serves_kind(dialect, config) else "it has no model for the draft's architecture"
        if asks_for_latent_attention(config):
            return "no engine has a draft model with latent attention"
        return dialect.why_unserved(self.name, self.release, config, KindReading(dialect, config).values)

    def serves_kind(self, dialect: Format, config: Mapping[str, Any]) -> bool:
        """Whether this release has a model for a draft of another kind or family. dflash need not run such a draft."""
        if isinstance(dialect, Kind):
            return self.refuses_kind(dialect, config) is None
        first = next((self.models[name] for name in named_architectures(config) if name in self.models), None)
        return first is not None and self.release >= first and not asks_for_latent_attention(config)

    def loads_config(self, subject: Subject) -> bool | None:
        """Whether the engine accepts the config; None if `read_config` does not judge it."""
        reading = self.read_config(subject)
        return None if reading is None else isinstance(reading, EngineReading)

    def ignores_extra_tensor(self, name: str) -> bool:
        """Whether it loads a file with a tensor of that name, which the config does not ask for."""
        return self.outcome_of("extra-tensors") == "serves"

    def served_causality(self, subject: Subject) -> tuple[bool, ...] | None:
        """Causality of each layer as the engine serves it; None if the engine does not serve the draft."""
        reading = self.read_config(subject)
        if reading is not None:
            return reading.causal if isinstance(reading, EngineReading) else None
        return self.causality(subject) if isinstance(subject.format, self.reads) else None

    def causality(self, subject: Subject) -> tuple[bool, ...] | None:
        """`served_causality` of a config that `read_config` does not judge."""
        return None

    def served_layout(self, subject: Subject) -> bool | None:
        """Whether it serves blocks anchor-first; None if it is not known, or if the family has one layout."""
        return None

    def split_misfits(self, model: SplitModel, num_gpus: int) -> Iterator[Misfit]:
        """The sizes of a draft or a target that the GPUs of tensor parallelism do not divide as the engine needs it."""
        return iter(())

    def serve_command(self, pair: ServedPair) -> ServeCommand:
        """The command that starts the engine with a pair."""
        raise NotImplementedError


ENGINES: Registry[type[ServingEngine]] = Registry("engine")


@cache
def all_engines() -> tuple[type[ServingEngine], ...]:
    """Every engine, by name."""
    ENGINES.discover("dflash_cli.engines")
    return tuple(sorted(ENGINES.values(), key=lambda engine: engine.name))


@SERVERS.register("engines")
def newest_servers(dialect: Format, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The engines, each at its newest release, that serve a draft of another kind."""
    newest = (engine(engine.ends()[-1]) for engine in all_engines())
    return tuple(str(engine) for engine in newest if engine.serves_kind(dialect, config))


@dataclass(frozen=True, slots=True)
class EnginesWhere(Sequence[str]):
    """The names of the engines for which `holds` is true, computed at each reading because engines register later."""

    holds: Callable[[type[ServingEngine]], bool]

    def __getitem__(self, index: Any) -> Any:
        return [engine.name for engine in all_engines() if self.holds(engine)][index]

    def __len__(self) -> int:
        return sum(map(self.holds, all_engines()))


def engines_that_differ(*habits: Habit) -> EnginesWhere:
    """The engines that do not serve one of the habits as meant, in the oldest or newest release."""
    return EnginesWhere(
        lambda engine: any(
            engine(release).outcome_of(habit) != "serves" for habit in habits for release in engine.ends()
        )
    )


def by_engine(*, stops: str = "", drops: str) -> Callable[[Callable[[Subject], Iterator[HabitProblem]]], Check]:
    """Turn a function that yields habits with their problems into the function of a rule.

    A finding is about the engines that do not serve the habit as meant. It is an error if the user named the engine. If
    the user named no engine, it is a warning about every such engine. `stops` and `drops` are the effects on an engine
    that stops, and on an engine with lower acceptance.
    """

    def decorate(function: Callable[[Subject], Iterator[HabitProblem]]) -> Check:
        @wraps(function)
        def run(subject: Subject) -> Iterator[Problem]:
            for habit, problem in function(subject):
                yield from _by_outcome(habit, subject, problem, {"stops": stops or drops, "drops": drops})

        return run

    return decorate


def _by_outcome(habit: Habit, subject: Subject, problem: Problem, effects: Mapping[Outcome, str]) -> Iterator[Problem]:
    """The problem once for the engines that stop, and once for the engines with lower acceptance."""
    named = [engine for engine in subject.plan.engines if isinstance(engine, ServingEngine)]
    asked = named or [engine(engine.ends()[-1]) for engine in all_engines()]
    for outcome, effect in effects.items():
        about = tuple(engine.name for engine in asked if engine.outcome_of(habit) == outcome)
        if about:
            yield replace(
                problem,
                effect=problem.effect or effect,
                outcome=outcome if named else "serves",
                severity="error" if named else "warning",
                engines=about,
            )


def problem_of_causality(name: str, subject: Subject) -> Problem | None:
    """The problem if an engine serves a draft with another causality than its config states, else None.

    It is a warning if the config states no causality, because then the causality of training is not known. S33 reports
    layers of unstated kind.
    """
    engine, trained = subject.engine(name), subject.trained_causality
    served = engine.served_causality(subject) if engine is not None else None
    if engine is None or served is None or trained is None or served == trained or not subject.stated.states_kinds:
        return None
    message = f"{engine} serves {sum(served)} of {len(served)} layers causally, {subject.causality_in_words(trained)}"
    return Problem(
        subject.expected_at("causal"),
        message,
        severity=None if subject.stated.states_causality else "warning",
        outcome=None if subject.stated.states_causality else "serves",
    )


def repairable_causality(name: str, subject: Subject) -> Iterator[Problem]:
    """`problem_of_causality`. The repair states the one causality of all layers under the key that the engine reads."""
    problem, trained = problem_of_causality(name, subject), subject.trained_causality or ()
    is_one = subject.stated.states_causality and len(set(trained)) == 1
    if problem is not None:
        yield replace(problem, repair=subject.stated.change("causal", trained[0]) if is_one else {})


def file_name_of(reference: str) -> str:
    """The last name of a reference, for a file in a command: no option begins like it."""
    return PurePath(reference.partition("@")[0]).name.lstrip("-") or "draft"


def words_of(options: Mapping[str, object]) -> list[str]:
    """The words of a command for the options that have a value: `--revision main`."""
    return [word for option, value in options.items() if value for word in (option, str(value))]


def release_text(release: Release) -> str:
    """`0.33` of (0, 33)."""
    return ".".join(map(str, release))


def causality_by_kind(subject: Subject) -> tuple[bool, ...]:
    """Causality by kind of layer: sliding layers are causal, full layers are not."""
    return tuple(kind == SLIDING for kind in subject.stated.layer_types)


def stated_once(stated: object, subject: Subject) -> tuple[bool, ...]:
    """A stated causality for every layer; if none is stated, the causality by kind of layer."""
    return (stated,) * len(subject.stated.layer_types) if isinstance(stated, bool) else causality_by_kind(subject)
