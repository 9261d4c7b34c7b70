"""What an engine makes of a draft: the causality it serves each layer with, and its verdict over the findings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash_cli.engines.serving_engine import Engine
from dflash_cli.formats.speculators_updaters import NON_CAUSAL_FLAG
from dflash_cli.validation.rule import Finding, Subject
from dflash_runtime.checkpoint.hf_config import SLIDING

IDENTITY = "C01"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one engine does with the draft. `causal` is None where it is not known for the release.

    `outcome` is that of the findings, or "unknown" for a relative of DFlash, which an engine may serve as what it is.
    """

    engine: Engine
    outcome: str
    reasons: tuple[str, ...]
    causal: tuple[bool, ...] | None
    trained: tuple[bool, ...] | None

    @property
    def text(self) -> str:
        """`vllm 0.33: loads, serves 5 of 5 layers causally, trained 0 -> acceptance drops (C20)`."""
        because = f" ({', '.join(self.reasons)})" if self.reasons else ""
        if self.outcome == "unknown":
            return f"{self.engine}: not judged, since it is another kind of draft{because}"
        if self.outcome == "stops":
            return f"{self.engine}: does not serve it{because}"
        ending = f" -> acceptance drops{because}" if self.outcome == "drops" else ""
        return f"{self.engine}: loads{self._attention()}{ending}"

    def _attention(self) -> str:
        if self.causal is None:
            return "" if self.trained is None else ", causality not known for this release"
        served, total = sum(self.causal), len(self.causal)
        text = (
            f", serves {served} of {total} layers causally" if served else f", serves all {total} layers non-causally"
        )
        if self.trained is not None and self.trained != self.causal:
            text += f" (trained: {sum(self.trained)} of {total} causal)"
        return text

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "engine": str(self.engine),
            "outcome": self.outcome,
            "reasons": list(self.reasons),
            "causal": None if self.causal is None else list(self.causal),
            "text": self.text,
        }


def judge(subject: Subject, findings: Sequence[Finding]) -> tuple[Verdict, ...]:
    """One verdict for each engine that was named."""
    return tuple(_judge(subject, findings, engine) for engine in subject.engines)


def served_causality(subject: Subject, engine: Engine) -> tuple[bool, ...] | None:
    """Causality of each layer as an engine serves it; None where that is not known.

    vLLM 0.24 reads neither windows nor causality (its qwen3_dflash.py): every layer is full and non-causal.
    """
    kinds = subject.layer_types
    by_kind = tuple(kind == SLIDING for kind in kinds)
    if engine.name == "vllm" and engine.release[:2] == (0, 24):
        return (False,) * len(kinds)
    if subject.is_speculators:
        return _vllm_speculators(subject, engine, len(kinds)) if engine.name == "vllm" else None
    top, nested = subject.config.get("is_causal"), subject.nested.get("causal")
    if engine.name == "vllm":
        if engine.release < (0, 33) and top != nested and SLIDING in kinds:
            return None
        stated = top if isinstance(top, bool) else nested
        return (stated,) * len(kinds) if isinstance(stated, bool) else by_kind
    if engine.name == "llama.cpp":
        return (top is True or (top is None and nested is True),) * len(kinds)
    return (top,) * len(kinds) if isinstance(top, bool) else by_kind


def trained_causality(subject: Subject) -> tuple[bool, ...] | None:
    """Causality of each layer as the config states it for its own dialect; None where it cannot be read."""
    return subject.parsed.config.causal if subject.parsed is not None else None


def _vllm_speculators(subject: Subject, engine: Engine, count: int) -> tuple[bool, ...] | None:
    """Source: vLLM 0.33.0 algos.py (`causal = not flag`, absent false) and qwen3_dflash.py (is_causal first)."""
    flag = subject.config.get(NON_CAUSAL_FLAG)
    stated = subject.body.get("is_causal")
    if isinstance(stated, bool):
        return (stated,) * count
    if flag is False and engine.release < (0, 33):
        return None
    return (flag is False,) * count


def _judge(subject: Subject, findings: Sequence[Finding], engine: Engine) -> Verdict:
    about = [item for item in findings if item.severity == "error" and engine.name in (item.engines or (engine.name,))]
    if any(item.id == IDENTITY for item in about):
        return Verdict(engine, "unknown", (IDENTITY,), None, None)
    outcome = next((kind for kind in ("stops", "drops") if any(item.outcome == kind for item in about)), "serves")
    reasons = tuple(dict.fromkeys(item.id for item in about if item.outcome == outcome))
    return Verdict(engine, outcome, reasons, served_causality(subject, engine), trained_causality(subject))
