"""Rules on a draft and the target it is given. Silent where no target is given."""

from collections.abc import Iterator

from dflash_cli.checks.base import Problem, Subject, as_object, check, is_int
from dflash_cli.references import TINY, TINY_TARGET_NAME
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.hf_config import read_rope


@check("P01")
def widths_fit(subject: Subject) -> Iterator[Problem]:
    """The draft is as wide as the target (vllm#48113)."""
    width = subject.body.get("hidden_size")
    if subject.target is None or not is_int(width):
        return
    target = subject.target.hidden_size
    stated = subject.config.get("target_hidden_size")
    if is_int(stated) and stated != target:
        yield Problem(subject.place("target_hidden_size"), f"{stated}, the target's hidden_size is {target}")
    elif width != target:
        yield Problem(
            subject.body_place("hidden_size"),
            f"{width}, the target's is {target}",
            effect="the draft borrows the target's embedding and head, which are of another width",
        )


@check("P02")
def vocabularies_fit(subject: Subject) -> Iterator[Problem]:
    """The draft states the target's vocab_size, padding included (vllm#46435)."""
    stated = subject.body.get("vocab_size")
    if subject.target is not None and stated != subject.target.vocab_size:
        yield Problem(
            subject.body_place("vocab_size"),
            f"{stated!r}, the target's is {subject.target.vocab_size}",
            effect="vLLM then maps ids through an empty map; nothing accepted has been reported",
            fix="state the target's vocab_size if only the padding differs",
        )


@check("P03")
def mask_has_a_row(subject: Subject) -> Iterator[Problem]:
    """The mask token has a row in the target's embedding."""
    value = subject.stated("mask_token_id")
    if subject.target is None or not is_int(value):
        return
    if value >= subject.target.vocab_size:
        yield Problem(
            subject.place("mask_token_id"), f"{value} is outside the target's {subject.target.vocab_size} embeddings"
        )
    elif value in subject.target.eos_token_ids:
        yield Problem(
            subject.place("mask_token_id"),
            f"{value} is a stop token of the target",
            effect="the draft cannot tell a masked position from the end of the text",
            severity="warning",
        )


@check("P05", "warning")
def rope_bases_fit(subject: Subject) -> Iterator[Problem]:
    """The draft's rope base is the target's; some drafts differ on purpose."""
    if subject.target is None:
        return
    try:
        theta = read_rope(subject.body, subject.path).theta
    except InvalidConfig:  # C22 and C23 report it
        return
    if theta != subject.target.rope.theta:
        yield Problem(
            subject.body_place("rope_theta"),
            f"{theta}, the target's is {subject.target.rope.theta}",
            effect="right only if the draft was trained with it",
        )


@check("C25", "warning")
def positions_reach_as_far(subject: Subject) -> Iterator[Problem]:
    """The draft's positions reach as far as the target's (vllm#48894, #57941)."""
    stated = subject.body.get("max_position_embeddings")
    if subject.target is not None and is_int(stated) and stated < subject.target.max_position_embeddings:
        yield Problem(
            subject.body_place("max_position_embeddings"),
            f"{stated}, the target's is {subject.target.max_position_embeddings}",
            effect="longer texts are cut short or drafted badly; vLLM raises it for plain rope only",
        )


@check("C11")
def target_depth_fits(subject: Subject) -> Iterator[Problem]:
    """num_target_layers is the target's depth."""
    stated = subject.stated("num_target_layers")
    if subject.target is not None and stated is not None and stated != subject.target.num_layers:
        yield Problem(
            next(iter(subject.homes("num_target_layers"))),
            f"{stated!r}, the target has {subject.target.num_layers} layers",
            effect="the draft was made for another target",
        )
    if stated is None and not subject.is_speculators:
        yield Problem(
            subject.place("num_target_layers"),
            "missing",
            effect="the z-lab reference and MLX stop",
            severity="warning",
        )


@check("P06")
def taps_exist_in_the_target(subject: Subject) -> Iterator[Problem]:
    """Every tapped layer exists in the target that is given."""
    if subject.target is None or not subject.taps:
        return
    highest = max(subject.taps)
    if highest >= subject.target.num_layers:
        yield Problem(
            subject.tap_place,
            f"taps layer {highest} (from 0), the target has layers 0..{subject.target.num_layers - 1}",
        )


@check("P08", "warning")
def verifier_is_the_target(subject: Subject) -> Iterator[Problem]:
    """The verifier that the draft names is the target that is given."""
    name = as_object(as_object(subject.config.get("speculators_config")).get("verifier")).get("name_or_path")
    reference = subject.target_reference
    if not isinstance(name, str) or not name or reference is None:
        return
    given = TINY_TARGET_NAME if reference == TINY else reference.partition("@")[0].rstrip("/")
    if given != name and given.rpartition("/")[2] != name.rpartition("/")[2]:
        yield Problem(
            subject.place("speculators_config.verifier.name_or_path"), f"trained for {name}, given {reference}"
        )
