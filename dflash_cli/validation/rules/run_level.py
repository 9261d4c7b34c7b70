"""Rules on how a draft accepts when it is run, for `--level run`: would it accept more with one setting changed?

`readings` runs every alternative reading once; each rule looks at the readings that change one factor.
"""

from collections.abc import Iterator

from dflash_cli.validation.rule import Problem, check
from dflash_cli.validation.subject import CONFIG_FILE, Subject

NOTHING_ACCEPTED = 1.05
"""Acceptance length below which a draft predicts nothing."""


@check(
    "R01",
    level="run",
    effect="every feature comes from another layer than in training",
    fix=(
        "if the numbers convince you, correct the list of tapped layers, then repeat the run: dflash validate "
        "{draft} --target {target} --level run"
    ),
    source="vllm-project/vllm#40727",
    outcome="drops",
)
def taps_accept_most(subject: Subject) -> Iterator[Problem]:
    """The stated tapped layers accept at least as much as layers shifted by one."""
    yield from _better(subject, "taps", subject.tap_location)


@check(
    "R02",
    level="run",
    effect="whether masked positions attend to later ones differs from training",
    fix=(
        "if the numbers convince you: dflash convert {draft} {out} --to native --causality causal # or non-causal, "
        "layer-types"
    ),
    source="vllm-project/vllm#56692, #47453; NVIDIA/Model-Optimizer#2149",
    outcome="drops",
)
def causality_accepts_most(subject: Subject) -> Iterator[Problem]:
    """The stated causality accepts at least as much as any other."""
    key = "sliding_window_non_causal" if subject.is_speculators else "is_causal"
    yield from _better(subject, "causality", subject.location(key))


@check(
    "R03",
    level="run",
    effect="masked positions are fed another embedding than in training",
    fix=(
        "if the numbers convince you, correct mask_token_id, then repeat the run: dflash validate {draft} --target "
        "{target} --level run"
    ),
    source="NVIDIA/Model-Optimizer#1621; NVIDIA-NeMo/Automodel#2461",
    outcome="drops",
)
def mask_accepts_most(subject: Subject) -> Iterator[Problem]:
    """The stated mask token accepts at least as much as the target's special tokens."""
    yield from _better(subject, "mask", next(iter(subject.homes("mask_token_id")), subject.location("mask_token_id")))


@check(
    "R04",
    level="run",
    effect="positions are rotated by other angles than in training",
    fix=(
        "if the numbers convince you, correct rope_theta, then repeat the run: dflash validate {draft} --target "
        "{target} --level run"
    ),
    source="Luce-Org/lucebox#447 (theta 1,000,000 and 10,000,000)",
    outcome="drops",
)
def rope_accepts_most(subject: Subject) -> Iterator[Problem]:
    """The stated rope base accepts at least as much as the usual ones."""
    yield from _better(subject, "rope", subject.body_location("rope_theta"))


@check(
    "R05",
    level="run",
    effect="every prediction is off by one position; engines serve such a draft as DSpark, if at all",
    fix=(
        "serve it with an engine that supports DSpark, or export it as DFlash and run dflash validate {draft} "
        "--target {target} --level run"
    ),
    source="vllm-project/vllm#54154; sgl-project/sglang#40203 (1.06, then 2.76)",
    outcome="drops",
)
def masks_accept_most(subject: Subject) -> Iterator[Problem]:
    """Predictions at the masks accept at least as much as predictions from the anchor on."""
    yield from _better(subject, "anchor", subject.location("sample_from_anchor"))


@check(
    "R06",
    "warning",
    level="run",
    effect="drafting costs time and saves no step",
    fix="dflash diagnose {draft} --target {target} # then dflash eval-acceptance on your own prompts",
    source="AEON-7#6",
)
def something_is_accepted(subject: Subject) -> Iterator[Problem]:
    """The draft has tokens accepted when it is run as its config states."""
    search = subject.search
    if search is not None and search.acceptance_len < NOTHING_ACCEPTED:
        yield Problem(
            CONFIG_FILE,
            f"{search.acceptance_len:.2f} tokens per step over {search.num_prompts} prompts; 1 means none accepted",
        )


def _better(subject: Subject, factor: str, location: str) -> Iterator[Problem]:
    """The best of the readings that change one factor, if any is better than the config as it is beyond chance."""
    search = subject.search
    better = [item for item in search.results if item.reading.factor == factor and item.is_better] if search else []
    if search is None or not better:
        return
    best = max(better, key=lambda item: item.acceptance_len)
    interval = best.interval
    assert interval is not None
    yield Problem(
        location,
        f"with {best.reading.name} a step commits {best.acceptance_len:.2f} tokens, with the config as it is "
        f"{search.acceptance_len:.2f}: {best.difference:+.2f} (95% interval {interval.low:+.2f} to "
        f"{interval.high:+.2f}, {search.num_prompts} prompts)",
    )
