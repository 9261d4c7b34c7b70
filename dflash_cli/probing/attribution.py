"""Whose a low acceptance on a server is: the checkpoint's, the engine's, or that of the settings it was started with.

The rules, in order; the first that holds decides, and docs/how-to/probe.md has them for people:

1. not one token was drafted                                           engine
2. the server's length is lower than the yardstick's, which drafted
   another number of tokens a step                                     settings
3. it is lower, and prompts came to other tokens than the yardstick's  settings
4. it is lower                                                         engine, with its known faults
5. it is lower with more requests at a time                            engine
6. greedy answers differ by more than near-ties                        engine
7. the length is low, and the yardstick's is not higher                checkpoint
8. there is a yardstick, and nothing of the above                      none
9. there is none                                                       undecided

A yardstick is our own number on the same prompts, or that of another server.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from dflash_cli.acceptance.intervals.statistics import value_text
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.generation.announcements import is_low
from dflash_cli.probing.inference_server import ServerFacts
from dflash_cli.probing.server_run import ServerRun
from dflash_cli.probing.token_equality import TokenEquality
from dflash_runtime.phrases import plural

SLIGHT, MUCH = 0.02, 1.1
"""A difference of less than a fiftieth is no fault; without an interval a tenth is needed for one."""

Owner = Literal["checkpoint", "engine", "settings", "none", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What causes a low acceptance, the rule that says so, its evidence, and what to do next."""

    owner: Owner
    rule: Annotated[int, "docs/probe.md lists the rules"]
    evidence: str
    hint: str

    @property
    def is_fault(self) -> bool:
        return self.owner in ("checkpoint", "engine", "settings")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that an attribution rests on.

    `runs` are those of the server, by concurrency; `loads` hold those after the first against it, `yardsticks` our own
    number and another server's. `known_faults` are rules that find fault with the checkpoint on this engine and
    release. `minimum` is the least length that is wanted, where one is.
    """

    facts: ServerFacts
    runs: Sequence[ServerRun]
    loads: Sequence[Comparison] = ()
    yardsticks: Sequence[Comparison] = ()
    equalities: Sequence[TokenEquality] = ()
    yardstick_equalities: Sequence[TokenEquality] = ()
    known_faults: Sequence[str] = ()
    minimum: float | None = None

    @property
    def lower_than(self) -> list[Comparison]:
        """The yardsticks that the server is shown to be below."""
        return [item for item in self.yardsticks if _is_higher(item)]

    @property
    def has_other_text(self) -> bool:
        """Whether greedy answers differ from the yardsticks' by more than near-ties."""
        return any(item.num_unexplained for item in self.yardstick_equalities)

    @property
    def is_low(self) -> bool:
        counts = self.runs[0].total.counts
        if self.minimum is not None:
            return counts.acceptance_len is not None and counts.acceptance_len < self.minimum
        return is_low(counts)


def attribute(evidence: Evidence) -> Attribution:
    """The first rule that holds."""
    for rule in (_not_drafting, _other_settings, _lower, _lower_under_load, _unequal, _checkpoint):
        found = rule(evidence)
        if found is not None:
            return found
    if evidence.yardsticks:
        names = " and ".join(item.other.name for item in evidence.yardsticks)
        return Attribution(owner="none", rule=8, evidence=f"it is not below {names}", hint="nothing is to be done")
    hint = "measure the pair here with eval-acceptance --output OWN.jsonl and give that as --result, or name --beside"
    return Attribution(owner="undecided", rule=9, evidence="there is nothing to compare with", hint=hint)


def _not_drafting(evidence: Evidence) -> Attribution | None:
    if any(run.is_engaged is not False for run in evidence.runs):
        return None
    configured = "a draft is configured, and " if evidence.facts.is_drafting else ""
    return Attribution(
        owner="engine",
        rule=1,
        evidence=f"{configured}not one token was drafted{_faults(evidence.known_faults)}",
        hint="see the server's log for why speculation was turned off: a feature it excludes, or a batch it is not for",
    )


def _other_settings(evidence: Evidence) -> Attribution | None:
    for item in evidence.lower_than:
        widths = item.unlike.get("num_speculative_tokens")
        if widths is not None:
            return Attribution(
                owner="settings",
                rule=2,
                evidence=f"the server drafts {widths[0]} tokens a step, {item.other.name} {widths[1]}",
                hint="start the server with as many, or measure the yardstick with -k as many as the server",
            )
    unlike = [item for item in evidence.yardstick_equalities if item.num_unlike]
    if evidence.lower_than and unlike:
        return Attribution(
            owner="settings",
            rule=3,
            evidence=f"{plural(unlike[0].num_unlike, 'prompt')} came to other tokens than in {unlike[0].other}",
            hint="chat template, its arguments or special tokens differ; --target renders prompts here",
        )
    return None


def _lower(evidence: Evidence) -> Attribution | None:
    if not evidence.lower_than:
        return None
    item = evidence.lower_than[0]
    hint = f"dflash validate DRAFT --target TARGET --engine {evidence.facts.engine} says what it reads otherwise"
    if evidence.has_other_text:
        hint = "the texts differ too, by more than near-ties: is the same target served, in the same precision?"
    return Attribution(
        owner="engine",
        rule=4,
        evidence=f"{_lengths(item)} on the same prompts{_faults(evidence.known_faults)}",
        hint=hint,
    )


def _lower_under_load(evidence: Evidence) -> Attribution | None:
    for item in evidence.loads:
        if item.total.difference is not None and item.total.verdict == "lower" and not _is_slight(item):
            change = value_text(item.total.difference.value, item.total.difference.interval, "+.3f")
            return Attribution(
                owner="engine",
                rule=5,
                evidence=f"{item.other.name}: {change} tokens a step against {item.base.name}",
                hint="acceptance is no matter of load: requests of a batch change each other's drafts",
            )
    return None


def _unequal(evidence: Evidence) -> Attribution | None:
    for item in evidence.equalities:
        if item.num_unexplained:
            return Attribution(
                owner="engine",
                rule=6,
                evidence=f"{item.num_unexplained} of {plural(item.num_compared, 'answer')} differ between {item.base} "
                f"and {item.other}, and by more than near-ties",
                hint="greedy answers of one server are to be the same whatever else it runs",
            )
    return None


def _checkpoint(evidence: Evidence) -> Attribution | None:
    if not evidence.yardsticks or not evidence.is_low:
        return None
    item = evidence.yardsticks[0]
    return Attribution(
        owner="checkpoint",
        rule=7,
        evidence=f"{_lengths(item)}, and that is low",
        hint="dflash diagnose DRAFT --target TARGET looks for the cause",
    )


def _is_higher(item: Comparison) -> bool:
    """Whether the other result is shown to be above the first; without an interval, by more than a tenth."""
    if item.total.difference is not None:
        return item.total.verdict == "higher" and not _is_slight(item)
    return item.other.acceptance_len > MUCH * item.base.acceptance_len


def _is_slight(item: Comparison) -> bool:
    """Whether a difference is of the size that rounding makes, however sure it is."""
    return abs(item.total.change or 0) <= SLIGHT * item.base.acceptance_len


def _lengths(item: Comparison) -> str:
    return f"{item.total.base_len or 0:.3f} tokens a step, {item.other.name} {item.total.other_len or 0:.3f}"


def _faults(ids: Iterable[str]) -> str:
    found = ", ".join(ids)
    return f"; known of this engine: {found}" if found else ""
