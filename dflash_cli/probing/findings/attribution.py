"""Find the cause of a low acceptance on a server: the checkpoint, the engine or the server's settings.

The first rule that applies decides. docs/how-to/probe.md explains the rules to users.

1. the server drafted 0 tokens                                             engine
2. the yardstick is higher, and drafted another number of tokens per step  settings
3. the yardstick is higher, and its prompts have other token ids           settings
4. the yardstick is higher                                                 engine, with its known faults
5. the length is lower with more requests at a time                        engine
6. greedy answers differ by more than near-ties                            engine
7. the length is low, and the yardstick equals it or is lower              checkpoint
8. rules 1 to 7 do not apply, with a yardstick                             none
9. rules 1 to 7 do not apply, without a yardstick                          undecided

A yardstick is a local result on the same prompts, or a run of another server.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from dflash_cli.acceptance.intervals.statistics import value_text
from dflash_cli.comparing.result_comparison import Comparison
from dflash_cli.generation.announcements import is_low
from dflash_cli.probing.findings.evidence import Evidence
from dflash_cli.probing.findings.load_changes import MUCH, is_lower_under_load, is_slight
from dflash_runtime.phrases import plural

Owner = Literal["checkpoint", "engine", "settings", "none", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The cause of a low acceptance, the rule that found it, its evidence and the next thing to do."""

    owner: Owner
    rule: Annotated[int, "docs/how-to/probe.md lists the rules"]
    evidence: str
    hint: str

    @property
    def is_fault(self) -> bool:
        return self.owner in ("checkpoint", "engine", "settings")


def attribute(evidence: Evidence) -> Attribution:
    """The attribution of the first rule that applies."""
    for rule in (_not_drafting, _other_settings, _lower, _lower_under_load, _unequal, _checkpoint):
        found = rule(evidence)
        if found is not None:
            return found
    if evidence.yardsticks:
        names = " and ".join(item.other.name for item in evidence.yardsticks)
        return Attribution(owner="none", rule=8, evidence=f"the server matches {names}", hint="nothing to do")
    hint = "measure the pair with eval-acceptance --output OWN.jsonl and add --result OWN.jsonl, or add --beside URL"
    return Attribution(owner="undecided", rule=9, evidence="there is nothing to compare with", hint=hint)


def _not_drafting(evidence: Evidence) -> Attribution | None:
    if any(run.is_engaged is not False for run in evidence.runs):
        return None
    configured = "a draft is configured, and " if evidence.facts.is_drafting else ""
    return Attribution(
        owner="engine",
        rule=1,
        evidence=f"{configured}not one token was drafted{_faults(evidence.known_faults)}",
        hint="look in the server's log for the reason: a feature or a batch size may turn speculation off",
    )


def _other_settings(evidence: Evidence) -> Attribution | None:
    for item in _lower_than(evidence):
        widths = item.unlike.get("num_speculative_tokens")
        if widths is not None:
            return Attribution(
                owner="settings",
                rule=2,
                evidence=f"the server drafts {widths[0]} tokens per step, {item.other.name} {widths[1]}",
                hint=f"start the server with K {widths[1]}, or measure {item.other.name} with -k {widths[0]}",
            )
    unlike = [item for item in evidence.yardstick_equalities if item.num_unlike]
    if _lower_than(evidence) and unlike:
        return Attribution(
            owner="settings",
            rule=3,
            evidence=f"{plural(unlike[0].num_unlike, 'prompt')} became other tokens than in {unlike[0].other}",
            hint="compare chat templates, template arguments and special tokens; --target renders prompts locally",
        )
    return None


def _lower(evidence: Evidence) -> Attribution | None:
    if not _lower_than(evidence):
        return None
    item = _lower_than(evidence)[0]
    hint = f"dflash validate DRAFT --target TARGET --engine {evidence.facts.engine} finds fields it reads differently"
    if _has_other_text(evidence):
        hint = "the texts differ too, by more than near-ties: check that the target and its precision are the same"
    facts = evidence.facts
    stored = f"; the server stores keys and values as {facts.kv_dtype}" if facts.is_quantised else ""
    return Attribution(
        owner="engine",
        rule=4,
        evidence=f"{_lengths(item)} on the same prompts{stored}{_faults(evidence.known_faults)}",
        hint=hint,
    )


def _lower_under_load(evidence: Evidence) -> Attribution | None:
    for item in evidence.loads:
        if is_lower_under_load(item, evidence.equalities):
            change = value_text(item.total.difference, item.total.interval, "+.3f")
            return Attribution(
                owner="engine",
                rule=5,
                evidence=f"{item.other.name}: {change} tokens per step against {item.base.name}",
                hint="acceptance should not depend on load: requests of a batch change each other's drafts",
            )
    return None


def _unequal(evidence: Evidence) -> Attribution | None:
    for item in evidence.equalities:
        if item.shows_fault(is_quantised=evidence.facts.is_quantised):
            return Attribution(
                owner="engine",
                rule=6,
                evidence=f"{item.num_unexplained} of {plural(item.num_compared, 'answer')} differ between {item.base} "
                f"and {item.other} by more than near-ties",
                hint="greedy answers of a server should not depend on its other requests",
            )
    return None


def _checkpoint(evidence: Evidence) -> Attribution | None:
    if not evidence.yardsticks or not _is_low(evidence):
        return None
    item = evidence.yardsticks[0]
    return Attribution(
        owner="checkpoint",
        rule=7,
        evidence=f"{_lengths(item)}, and that is low",
        hint="dflash diagnose DRAFT --target TARGET looks for the cause",
    )


def _is_higher(item: Comparison) -> bool:
    """Whether the other result is higher on these prompts by more than luck. Without a test: by more than a tenth."""
    if item.total.estimate is not None:
        return item.total.change == "higher" and not is_slight(item)
    return item.other.acceptance_len > MUCH * item.base.acceptance_len


def _lengths(item: Comparison) -> str:
    first, second = (length or 0 for length in item.total.acceptance_lens)
    return f"{first:.3f} tokens per step, {item.other.name} {second:.3f}"


def _faults(ids: Iterable[str]) -> str:
    found = ", ".join(ids)
    return f"; known of this engine: {found}" if found else ""


def _lower_than(evidence: Evidence) -> list[Comparison]:
    """The yardsticks with a higher acceptance than the server."""
    return [item for item in evidence.yardsticks if _is_higher(item)]


def _has_other_text(evidence: Evidence) -> bool:
    """Whether greedy answers of the server and of a yardstick differ by more than near-ties."""
    return any(item.num_unexplained for item in evidence.yardstick_equalities)


def _is_low(evidence: Evidence) -> bool:
    counts = evidence.runs[0].total.counts
    if evidence.minimum is not None:
        return counts.acceptance_len is not None and counts.acceptance_len < evidence.minimum
    return is_low(counts)
