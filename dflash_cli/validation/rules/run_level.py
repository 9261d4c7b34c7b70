"""Rules on how a draft accepts when it is run, for `--level run`: would another reading of its config accept more?

The readings are run once, by `readings`; each rule looks at those that change one factor.
"""

from collections.abc import Iterator

from dflash_cli.validation.rule import Problem, check
from dflash_cli.validation.subject import CONFIG_FILE, Subject

CORRECT = "correct the key if the numbers convince you, then dflash validate {draft} --target {target} --level run"
NOTHING_ACCEPTED = 1.05
"""Acceptance length below which a draft predicts nothing."""


@check(
    "R01",
    level="run",
    effect="every feature comes from another layer than in training",
    fix=CORRECT,
    source="vllm-project/vllm#40727",
    outcome="drops",
)
def taps_accept_most(subject: Subject) -> Iterator[Problem]:
    """No shift of the taps by one layer accepts more than the taps as stated."""
    yield from _better(subject, "taps", subject.tap_location)


@check(
    "R02",
    level="run",
    effect="masked positions see, or do not see, those after them, other than in training",
    fix=CORRECT,
    source="vllm-project/vllm#56692, #47453; NVIDIA/Model-Optimizer#2149",
    outcome="drops",
)
def causality_accepts_most(subject: Subject) -> Iterator[Problem]:
    """No other causality accepts more than the one that is stated."""
    key = "sliding_window_non_causal" if subject.is_speculators else "is_causal"
    yield from _better(subject, "causality", subject.location(key))


@check(
    "R03",
    level="run",
    effect="masked positions are fed another embedding than in training",
    fix=CORRECT,
    source="NVIDIA/Model-Optimizer#1621; NVIDIA-NeMo/Automodel#2461",
    outcome="drops",
)
def mask_accepts_most(subject: Subject) -> Iterator[Problem]:
    """No special token of the target accepts more as mask than the one that is stated."""
    yield from _better(subject, "mask", next(iter(subject.homes("mask_token_id")), subject.location("mask_token_id")))


@check(
    "R04",
    level="run",
    effect="positions are rotated by other angles than in training",
    fix=CORRECT,
    source="Luce-Org/lucebox#447 (theta 1,000,000 and 10,000,000)",
    outcome="drops",
)
def rope_accepts_most(subject: Subject) -> Iterator[Problem]:
    """No usual rope base accepts more than the one that is stated."""
    yield from _better(subject, "rope", subject.body_location("rope_theta"))


@check(
    "R05",
    level="run",
    effect="every prediction is off by one position; engines serve such a draft as DSpark, if at all",
    fix="serve it as what it is; dflash inspect {draft}",
    source="vllm-project/vllm#54154; sgl-project/sglang#40203 (1.06, then 2.76)",
    outcome="drops",
)
def masks_accept_most(subject: Subject) -> Iterator[Problem]:
    """Reading predictions from the anchor on does not accept more than reading them from the masks."""
    yield from _better(subject, "anchor", subject.location("sample_from_anchor"))


@check(
    "R06",
    "warning",
    level="run",
    effect="drafting costs time and saves no step",
    fix="dflash eval-acceptance --draft {draft} --target {target} on your own prompts",
    source="AEON-7#6",
)
def something_is_accepted(subject: Subject) -> Iterator[Problem]:
    """The draft predicts something under the reading its config states."""
    search = subject.search
    if search is not None and search.acceptance_len < NOTHING_ACCEPTED:
        yield Problem(
            CONFIG_FILE,
            f"{search.acceptance_len:.2f} tokens a step over {search.num_prompts} prompts, where 1 is none drafted",
        )


def _better(subject: Subject, factor: str, location: str) -> Iterator[Problem]:
    """The reading that accepts most among those of one factor that are surely better than the config's."""
    search = subject.search
    better = [item for item in search.results if item.reading.factor == factor and item.is_better] if search else []
    if search is None or not better:
        return
    best = max(better, key=lambda item: item.acceptance_len)
    interval = best.interval
    assert interval is not None
    yield Problem(
        location,
        f"{best.reading.name} accepts {best.acceptance_len:.2f} tokens a step, the config's reading "
        f"{search.acceptance_len:.2f}: {best.difference:+.2f}, 95% interval {interval.low:+.2f} to "
        f"{interval.high:+.2f}, {search.num_prompts} prompts",
    )
