"""Whether an engine can serve a draft, and whether acceptance drops, judged from the findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from dflash_cli.rules.rule import Finding
from dflash_cli.rules.subject import CONFIG_FILE, NamedEngine, Subject
from dflash_runtime.documents import HIDDEN, computed_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one engine serves the draft.

    engine      the engine with its release, such as `vllm 0.33`; `name` is the engine alone
    outcome     the worst outcome of the findings. For a draft of a kind without a table: "serves" if the engine has a
                model for it, else "stops". "unknown" if the kind or the engine's code for it is not known
    reasons     the ids of the rules with that outcome
    trained     causality of each layer as the config is read; None if it cannot be read
    is_stated   whether the config states the causality
    kind        the kind of the draft, if it is not DFlash
    is_checked  whether rules checked a draft of another kind
    """

    engine: str
    outcome: str
    reasons: Annotated[tuple[str, ...], "ids of rules"]
    causal: Annotated[tuple[bool, ...] | None, "causality of each layer as served; null if it is not known"] = None
    name: Annotated[str, HIDDEN] = ""
    trained: Annotated[tuple[bool, ...] | None, HIDDEN] = None
    is_stated: Annotated[bool, HIDDEN] = True
    kind: Annotated[str, HIDDEN] = ""
    is_checked: Annotated[bool, HIDDEN] = False

    @property
    @computed_key
    def text(self) -> str:
        """`vllm 0.33: loads, runs 5 of 5 layers causally (trained with 0 of 5 causal) -> acceptance drops (C20)`."""
        because = f" ({', '.join(self.reasons)})" if self.reasons else ""
        if self.outcome == "unknown" and self.kind:
            return (
                f"{self.engine}: not known whether it serves {self.kind} drafts; dflash has not read its code for them"
            )
        if self.outcome == "unknown":
            return f"{self.engine}: not judged, since the draft is not a DFlash draft{because}"
        if self.kind and self.is_checked and self.outcome != "stops":
            ending = f" -> acceptance drops{because}" if self.outcome == "drops" else "; dflash does not run it"
            return f"{self.engine}: serves the {self.kind} draft{ending}"
        if self.kind and not self.is_checked:
            verb = "serves" if self.outcome == "serves" else "does not serve"
            return f"{self.engine}: {verb} {self.kind} drafts of this architecture; dflash does not check or run them"
        if self.outcome == "stops":
            return f"{self.engine}: cannot serve the draft{because}"
        ending = f" -> acceptance drops{because}" if self.outcome == "drops" else ""
        return f"{self.engine}: loads{self._attention()}{ending}"

    def _attention(self) -> str:
        if self.causal is None:
            return "" if self.trained is None else ", causality not known for this release"
        served, total = sum(self.causal), len(self.causal)
        text = f", runs {served} of {total} layers causally" if served else f", runs all {total} layers non-causally"
        if self.trained is not None and self.trained != self.causal:
            said = "trained with" if self.is_stated else "not stated, read as"
            text += f" ({said} {sum(self.trained)} of {total} causal)"
        return text


def judge(subject: Subject, findings: Sequence[Finding]) -> tuple[Verdict, ...]:
    """One verdict for each named engine."""
    return tuple(_judge(subject, findings, engine) for engine in subject.plan.engines)


def _judge(subject: Subject, findings: Sequence[Finding], engine: NamedEngine) -> Verdict:
    if not engine.judges(subject.format):
        return Verdict(engine=str(engine), name=engine.name, outcome="unknown", reasons=(), kind=subject.format.title)
    about = [item for item in findings if item.severity == "error" and item.concerns(engine.name)]
    identity = tuple(dict.fromkeys(item.id for item in about if item.stage == "identity"))
    if subject.kind_reading is not None:
        outcome, reasons = _worst(about)
        title = subject.format.title
        return Verdict(
            engine=str(engine), name=engine.name, outcome=outcome, reasons=reasons, kind=title, is_checked=True
        )
    if identity and subject.is_other_kind:
        outcome = "serves" if engine.serves_kind(subject.format, subject.config) else "stops"
        return Verdict(
            engine=str(engine), name=engine.name, outcome=outcome, reasons=identity, kind=subject.format.title
        )
    if identity:
        return Verdict(engine=str(engine), name=engine.name, outcome="unknown", reasons=identity)
    if engine.loads_config(subject):  # the engine's own code decides, not the rules on all engines
        about = [
            item
            for item in about
            if item.outcome != "stops" or item.is_about_start or not item.location.startswith(CONFIG_FILE)
        ]
    outcome, reasons = _worst(about)
    return Verdict(
        engine=str(engine),
        name=engine.name,
        outcome=outcome,
        reasons=reasons,
        causal=engine.served_causality(subject),
        trained=subject.trained_causality,
        is_stated=subject.stated.states_causality,
    )


def _worst(about: Sequence[Finding]) -> tuple[str, tuple[str, ...]]:
    """The worst outcome of some errors, and the ids of the rules with it."""
    outcome = next((kind for kind in ("stops", "drops") if any(item.outcome == kind for item in about)), "serves")
    return outcome, tuple(dict.fromkeys(item.id for item in about if item.outcome == outcome))
