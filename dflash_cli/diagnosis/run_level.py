"""Rules on how a draft accepts when it is run, for `--level run`: does another reading accept more?

`readings` tries the readings once and names at most one cause: the reading that gains most, if it also gains on new
prompts. Each rule is about the readings that change one factor.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_cli.formats.dialect import COMMON
from dflash_cli.rules.rule import FIX_RUN_LEVEL, Problem, Severity, check
from dflash_cli.rules.subject import CONFIG_FILE, WEIGHTS, Subject
from dflash_runtime.draft_config import DraftConfig

if TYPE_CHECKING:
    from dflash_cli.diagnosis.reading_results import ReadingResult, ReadingSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSubject(Subject):
    """A draft that was run with its target under several readings."""

    search: "ReadingSearch"


FAR_TOO_LITTLE = 0.07
"""Share of the drafted tokens below which the draft is broken.

Every sound draft we know accepts far more, whatever the text. The lowest published bar at temperature 0 is 12% (2.8 of
16, SGLang's test on GSM8K). Measurements gave 25% and 34% (bundled drafts), 31% (speculators, Qwen3-8B) and 21 to 37%
(vllm#43445, blocks of 16). Drafts that are read wrongly or were never trained accept 0 to 6%.
"""

TOO_LITTLE = 0.12
"""Share below which a draft accepts less than every published draft."""

HALF = 0.5
"""Share below which the figure is stated with the readings that were tried, although sound drafts accept less."""

OVERCONFIDENT = 0.6
"""Share of the tokens that the draft's own probabilities expect. Sound drafts accept more than they expect."""

FAR_SHORT = 0.5
"""Share of the expected draft tokens below which the shortfall is an error."""

FACTORS = {
    "taps": "tapped layers", "causality": "causality", "anchor": "prediction from the anchor", "rope": "rope",
    "mask": "mask tokens", "window": "windows", "block": "block sizes", "embedding": "embedding scale",
    "eps": "norm eps", "weights": "orders, layouts, scales and owners of tensors",
}  # fmt: skip
"""Factor -> the readings of it, in words."""


@check(
    "R06",
    level="run",
    effect="drafting costs time and saves few steps",
    fix=(
        "export the draft again from the training run, or compare with its published figure: dflash diagnose "
        "{draft} --target {target} --expected FIGURE"
    ),
    source="AEON-7#6",
    outcome="drops",
)
def enough_is_accepted(subject: RunSubject) -> Iterator[Problem]:
    """The target accepts the expected number of tokens, or another reading explains why it accepts fewer.

    With an expected figure, less than 90% of its draft tokens is a warning, and less than half is an error. Without
    one, these shares of the drafted tokens count: less than 7% is an error, less than 12% a warning, less than half a
    remark. Two facts make a warning of any share: a reading surely accepts more, or the draft's own probabilities
    expect far more. At temperature 0, targets accept 21 to 37% of the drafted tokens of sound drafts. They accept up to
    6% if a draft is read wrongly or was never trained.
    """
    search = subject.search
    if search.explanation is not None or subject.parsed is None:
        return
    config = subject.parsed.config
    found = _shortfall(search, config)
    if found is None:
        return
    severity, why = found
    figure = f"{search.acceptance_len:.2f} tokens per step of at most {config.num_draft_tokens + 1}"
    share = f"{(search.acceptance_len - 1) / config.num_draft_tokens:.0%} of the drafted tokens"
    tried = ", ".join(f"{FACTORS.get(name, name)} {count}" for name, count in search.tried.items())
    excluded = f"none of {search.num_readings} other readings explains it" + (f" ({tried})" if tried else "")
    yield Problem(
        CONFIG_FILE,
        f"{figure}, {share}, over {search.num_prompts} prompts: {why}; {excluded}{_improvement(search)}",
        severity=severity,
    )


def _improvement(search: "ReadingSearch") -> str:
    better = search.improvement
    if better is None:
        return ""
    return f"; {better.reading} improves it to {better.acceptance_len:.2f} but does not explain it: {better.doubt}"


def _shortfall(search: "ReadingSearch", config: DraftConfig) -> tuple[Severity, str] | None:
    """How serious low acceptance is, and why it is low; None if it is not low."""
    accepted, expected = search.acceptance_len - 1, search.expected
    share, foretold = accepted / config.num_draft_tokens, (search.own_expected_len or 1.0) - 1
    if expected is not None:
        why = f"low for this draft, which should reach {expected.value:.2f} ({expected.source})"
        short: Severity = "error" if accepted < FAR_SHORT * (expected.value - 1) else "warning"
        return (short, why) if search.is_short else None
    why = f"low for a block of {config.block_size}"
    if share < TOO_LITTLE:
        return "error" if share < FAR_TOO_LITTLE else "warning", why
    if accepted < OVERCONFIDENT * foretold:
        return "warning", f"{why}: the draft's own probabilities expect {1 + foretold:.2f}"
    if search.improvement is not None:
        return "warning", f"{why}: another reading accepts more"
    return ("info", f"{why}, unless the text is hard to predict") if share < HALF else None


def reading_rule(
    rule_id: str,
    factor: str,
    title: str,
    *,
    field: str = "",
    at: Callable[[Subject], str] | None = None,
    effect: str,
    source: str,
    step: str = "",
    fix: str = "",
) -> None:
    """Register the rule that reports the explaining reading if it changes a factor.

    title       the first line of the rule's docstring, or the whole docstring
    field       the field to correct, if one value is wrong
    at, step    otherwise the location, and the correction in words
    fix         replaces the usual fix
    """

    def run(subject: RunSubject) -> Iterator[Problem]:
        best = subject.search.explanation
        if best is None or best.factor != factor:
            return
        correction = _set(subject, field, getattr(best.alternative.config, field)) if field else ""
        yield Problem(
            subject.at(field) if at is None else at(subject),
            gain_in_words(subject.search, best),
            fix=fix or _fix(correction or step),
            correction=correction,
        )

    run.__doc__ = title
    usual = _fix(f"correct {field}" if field else step)
    check(rule_id, level="run", effect=effect, fix=fix or usual, source=source, outcome="drops")(run)


def gain_in_words(search: "ReadingSearch", best: "ReadingResult") -> str:
    """Return the gain of the explaining reading and its number of prompts, in words."""
    return (
        f"with {best.reading} a step commits {best.acceptance_len:.2f} tokens, with the config as it is "
        f"{best.own_len:.2f}: {best.gain_text}; {search.num_prompts} prompts chose it of {search.num_readings} readings"
    )


def _fix(correction: str) -> str:
    return f"if the numbers convince you, {correction}, then repeat the run: {FIX_RUN_LEVEL}"


def _set(subject: Subject, field: str, value: Any) -> str:
    """The instruction to state a canonical value, as the draft's dialect spells it."""
    spelled = subject.stated.spelled(field, list(value) if isinstance(value, tuple) else value)
    return f"set {subject.at(field)} to {spelled}"


reading_rule(
    "R01",
    "taps",
    "No other tapped layers, and no other order of them, explain why few draft tokens are accepted.",
    field="target_layer_ids",
    effect="features probably come from other layers than in training, or in another order",
    source="vllm-project/vllm#40727",
)
reading_rule(
    "R02",
    "causality",
    "No other causality explains why few draft tokens are accepted.",
    at=lambda subject: subject.expected_at("causal"),
    effect="the causality within a block probably differs from training",
    fix=(
        f"if the numbers convince you: dflash convert {{draft}} {{out}} --to {COMMON} --causality causal # or "
        f"non-causal, layer-types"
    ),
    source="vllm-project/vllm#56692, #47453; NVIDIA/Model-Optimizer#2149",
)
reading_rule(
    "R03",
    "mask",
    """No other mask token explains why few draft tokens are accepted.

    The run tries special tokens, the id after them, and ids with unused rows in the target's embedding.
    """,
    field="mask_token_id",
    effect="masked positions probably get another embedding than in training",
    source="NVIDIA/Model-Optimizer#1621; NVIDIA-NeMo/Automodel#2461",
)
reading_rule(
    "R04",
    "rope",
    "No other rope base or scaling explains why few draft tokens are accepted.",
    at=lambda subject: subject.body_at("rope_theta"),
    effect="positions are probably rotated by other angles than in training",
    step="correct the rope parameters",
    source="Luce-Org/lucebox#447 (theta 1,000,000 and 10,000,000)",
)
reading_rule(
    "R05",
    "anchor",
    "Predictions from the anchor on do not explain why few draft tokens are accepted.",
    at=lambda subject: subject.expected_at("sample_from_anchor"),
    effect="every prediction is probably off by one position; engines can serve such a draft only as DSpark",
    fix=f"serve it with an engine that supports DSpark, or export it as DFlash and run {FIX_RUN_LEVEL}",
    source="vllm-project/vllm#54154; sgl-project/sglang#40203 (1.06, then 2.76)",
)
reading_rule(
    "R07",
    "window",
    """No other attention window explains why few draft tokens are accepted.

    Windows wider than the texts of the run are not tried, because they change nothing there.
    """,
    at=lambda subject: subject.body_at("sliding_window"),
    effect="positions probably attend to more or fewer tokens than in training",
    step="correct layer_types and sliding_window",
    source="ikawrakow/ik_llama.cpp#2021",
)
reading_rule(
    "R08",
    "block",
    """No other block size explains why few draft tokens are accepted.

    Of a longer block only the first tokens count, up to the length of the stated block.
    """,
    field="block_size",
    effect="a block probably has more or fewer masks than in training",
    source="vLLM 0.33.0 speculator.py resizes the block to 1 + num_speculative_tokens",
)
reading_rule(
    "R09",
    "weights",
    """No exchange or rewriting of tensors explains why few draft tokens are accepted.

    The run tries other orders of layers, heads, rows and columns, other layouts, scales and owners of tensors, and
    leaves out single parts. A part that harms is damaged.
    """,
    at=lambda subject: WEIGHTS,
    effect="readers probably use some tensors for another purpose than in training",
    step="export the draft again with the right tensors (the reading names them)",
    source="huggingface/transformers Gemma norms (1 + w); rope layouts of Llama exporters",
)
reading_rule(
    "R10",
    "embedding",
    "No other scale of the target's embedding explains why few draft tokens are accepted.",
    at=lambda subject: subject.expected_at("input_embedding_scale"),
    effect="the draft probably gets embeddings of another scale than in training",
    step="state input_embedding_scale",
    source="vllm-project/vllm#41703; z-lab/dflash 0.1.0 model.py, model_mlx.py",
)
reading_rule(
    "R11",
    "eps",
    "No other rms_norm_eps explains why few draft tokens are accepted.",
    at=lambda subject: subject.body_at("rms_norm_eps"),
    effect="norms probably scale small inputs in another way than in training",
    step="correct rms_norm_eps",
    source="drafts keep the eps of their own training, not the target's",
)
