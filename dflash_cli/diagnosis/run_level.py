"""Rules on how a draft accepts when it is run, for `--level run`: would another reading accept more?

The readings are tried once, by `readings`. One cause is named at most: that of the reading that gained most, if it does
so on new prompts too. Each rule looks at the readings that change one factor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from dflash_cli.rules.rule import Problem, Severity, check
from dflash_cli.rules.subject import CONFIG_FILE, Subject
from dflash_cli.rules.themes.tensors import WEIGHTS

if TYPE_CHECKING:
    from dflash_cli.diagnosis.readings import ReadingSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSubject(Subject):
    """A draft that was run with its target under several readings."""

    search: "ReadingSearch"


def run_subject(subject: Subject, search: "ReadingSearch") -> RunSubject:
    """The draft as the rules of this level see it."""
    return RunSubject(**{item.name: getattr(subject, item.name) for item in fields(subject)}, search=search)


FAR_TOO_LITTLE = 0.07
"""Share of the drafts of a block that must be accepted, or the draft is broken.

Every sound draft known to us lies well above it, whatever the text: the lowest published bar at temperature 0 is 12%
(2.8 of 16, SGLang's test on GSM8K), measured are 25% and 34% (bundled drafts), 31% (speculators, Qwen3-8B) and 21 to
37% (vllm#43445, blocks of 16). Drafts that are read wrongly or were never trained accept 0 to 6%.
"""

TOO_LITTLE = 0.12
"""Share below which a draft accepts less than any published one."""


@check(
    "R01",
    level="run",
    effect="features probably come from other layers than in training, or in another order",
    fix=(
        "if the numbers convince you, correct the list of tapped layers, then repeat the run: dflash validate "
        "{draft} --target {target} --level run"
    ),
    source="vllm-project/vllm#40727",
    outcome="drops",
)
def taps_explain_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """No other tapped layers, and no other order of them, explain why the draft accepts little."""
    yield from _explained(subject, "taps", subject.tap_location)


@check(
    "R02",
    level="run",
    effect="whether masked positions attend to later ones probably differs from training",
    fix=(
        "if the numbers convince you: dflash convert {draft} {out} --to native --causality causal # or non-causal, "
        "layer-types"
    ),
    source="vllm-project/vllm#56692, #47453; NVIDIA/Model-Optimizer#2149",
    outcome="drops",
)
def causality_explains_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """No other causality explains why the draft accepts little."""
    key = "sliding_window_non_causal" if subject.is_speculators else "is_causal"
    yield from _explained(subject, "causality", subject.location(key))


@check(
    "R03",
    level="run",
    effect="masked positions are probably fed another embedding than in training",
    fix=(
        "if the numbers convince you, correct mask_token_id, then repeat the run: dflash validate {draft} --target "
        "{target} --level run"
    ),
    source="NVIDIA/Model-Optimizer#1621; NVIDIA-NeMo/Automodel#2461",
    outcome="drops",
)
def mask_explains_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """No other mask token explains why the draft accepts little.

    Tried are special tokens, the id after them, and ids whose rows of the target's embedding look unused.
    """
    yield from _explained(
        subject, "mask", next(iter(subject.homes("mask_token_id")), subject.location("mask_token_id"))
    )


@check(
    "R04",
    level="run",
    effect="positions are probably rotated by other angles than in training",
    fix=(
        "if the numbers convince you, correct the rope parameters, then repeat the run: dflash validate {draft} "
        "--target {target} --level run"
    ),
    source="Luce-Org/lucebox#447 (theta 1,000,000 and 10,000,000)",
    outcome="drops",
)
def rope_explains_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """No other rope base or scaling explains why the draft accepts little."""
    yield from _explained(subject, "rope", subject.body_location("rope_theta"))


@check(
    "R05",
    level="run",
    effect="every prediction is probably off by one position; engines serve such a draft as DSpark, if at all",
    fix=(
        "serve it with an engine that supports DSpark, or export it as DFlash and run dflash validate {draft} "
        "--target {target} --level run"
    ),
    source="vllm-project/vllm#54154; sgl-project/sglang#40203 (1.06, then 2.76)",
    outcome="drops",
)
def anchor_explains_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """Predictions from the anchor on do not explain why the draft accepts little."""
    yield from _explained(subject, "anchor", subject.location("sample_from_anchor"))


@check(
    "R06",
    level="run",
    effect="drafting costs time and saves hardly a step",
    fix=(
        "export the draft again from the training run, or look for its own figure: dflash eval-acceptance {draft} "
        "--target {target} --prompts FILE.jsonl"
    ),
    source="AEON-7#6",
    outcome="drops",
)
def enough_is_accepted(subject: RunSubject) -> Iterator[Problem]:
    """The draft accepts as much of its block as a sound one does, or another reading explains why it does not.

    An error where less than 7% of the drafts are accepted, a warning below 12%. Sound drafts accept 21 to 37% at
    temperature 0, those that are read wrongly or were never trained up to 6%.
    """
    search, block = subject.search, subject.parsed.config.block_size if subject.parsed is not None else None
    if search is None or search.explanation is not None or block is None:
        return
    share = (search.acceptance_len - 1) / (block - 1)
    if share < TOO_LITTLE:
        severity: Severity = "error" if share < FAR_TOO_LITTLE else "warning"
        yield Problem(
            CONFIG_FILE,
            f"{search.acceptance_len:.2f} tokens a step of at most {block}, {share:.0%} of the drafts, over "
            f"{search.num_prompts} prompts; none of {search.num_readings} other readings explains it",
            severity=severity,
        )


@check(
    "R07",
    level="run",
    effect="positions probably attend to more or fewer tokens than in training",
    fix=(
        "if the numbers convince you, correct layer_types and sliding_window, then repeat the run: dflash validate "
        "{draft} --target {target} --level run"
    ),
    source="ikawrakow/ik_llama.cpp#2021",
    outcome="drops",
)
def window_explains_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """No other attention window explains why the draft accepts little.

    Windows wider than the texts of the run change nothing there, so they are not tried.
    """
    yield from _explained(subject, "window", subject.body_location("sliding_window"))


@check(
    "R08",
    level="run",
    effect="masks probably stand beside more or fewer others than in training",
    fix=(
        "if the numbers convince you, correct block_size, then repeat the run: dflash validate {draft} --target "
        "{target} --level run"
    ),
    source="vLLM 0.33.0 speculator.py resizes the block to 1 + num_speculative_tokens",
    outcome="drops",
)
def block_explains_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """No other block size explains why the draft accepts little.

    Of a longer block only as many tokens count as one of the stated size has.
    """
    yield from _explained(subject, "block", next(iter(subject.homes("block_size")), subject.location("block_size")))


@check(
    "R09",
    level="run",
    effect="the tensors of the file probably mean something else to whoever loads them",
    fix=(
        "export the draft again with the tensors where they belong, then repeat the run: dflash validate {draft} "
        "--target {target} --level run"
    ),
    source="huggingface/transformers Gemma norms (1 + w); rope layouts of Llama exporters",
    outcome="drops",
)
def tensors_explain_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """No exchange or rewriting of tensors explains why the draft accepts little.

    Tried are norms that hold w - 1 or 1 + w, exchanged norms, exchanged projections, both layouts of rope, and the
    order of layers.
    """
    yield from _explained(subject, "weights", WEIGHTS)


@check(
    "R10",
    level="run",
    effect="the draft is probably fed embeddings of another size than in training",
    fix=(
        "if the numbers convince you, state dflash_config.input_embedding_scale, then repeat the run: dflash validate "
        "{draft} --target {target} --level run"
    ),
    source="vllm-project/vllm#41703; z-lab/dflash 0.1.0 model.py, model_mlx.py",
    outcome="drops",
)
def embedding_scale_explains_the_draft(subject: RunSubject) -> Iterator[Problem]:
    """No other scale of the target's embedding explains why the draft accepts little."""
    yield from _explained(subject, "embedding", subject.location("dflash_config.input_embedding_scale"))


def _explained(subject: RunSubject, factor: str, location: str) -> Iterator[Problem]:
    """The reading that explains the draft, where it changes this factor."""
    search = subject.search
    best = search.explanation if search is not None else None
    if search is None or best is None or best.reading.factor != factor:
        return
    interval = best.interval
    assert interval is not None
    yield Problem(
        location,
        f"with {best.reading.name} a step commits {best.acceptance_len:.2f} tokens, with the config as it is "
        f"{best.own_len:.2f}: {best.difference:+.2f}, 95% interval {interval.low:+.2f} to {interval.high:+.2f}, on "
        f"{best.num_prompts} new prompts; {search.num_prompts} prompts chose it of {search.num_readings} readings",
    )
