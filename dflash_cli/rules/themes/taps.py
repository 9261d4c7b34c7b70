"""Rules on the tapped layers of the target."""

from collections.abc import Iterator
from typing import Any

from dflash_cli.formats.fields import AUX_KEY, guess_taps
from dflash_cli.rules.rule import FIX_OTHER_TARGET, FIX_RUN_LEVEL, Problem, check
from dflash_cli.rules.subject import Subject
from dflash_runtime.json_values import is_int

TAPS = "target_layer_ids"


@check(
    "C05",
    effect="engines guess the tapped layers, and guess wrong for most published drafts",
    fix=f"write the layers the draft was trained on into config.json, then test them: {FIX_RUN_LEVEL}",
    source="sgl-project/sglang#37475; z-lab/dflash#156, #157",
)
def taps_are_stated(subject: Subject) -> Iterator[Problem]:
    """The tapped layers (the target layers that feed the draft) are listed as integers.

    Engines that guess spread the layers evenly over the target. That guess is wrong for 14 of 20 published drafts.
    """
    found = subject.stated.values(TAPS)
    if not found:
        guess = _guess(subject) if subject.format.guesses_taps else None
        text = f"; engines would guess {guess}" if guess is not None else ""
        yield Problem(subject.at(TAPS), f"missing{text}", outcome="drops")
    elif subject.stated.taps is None:
        yield Problem(subject.at(TAPS), f"found {found[0].raw!r}, expected a non-empty list of integers")


@check(
    "C06",
    effect="engines stop, or never capture the layer's output",
    fix=f"correct the list of tapped layers, or {FIX_OTHER_TARGET}",
    source="charlie12345/ROCmFPX#44",
)
def taps_exist(subject: Subject) -> Iterator[Problem]:
    """Every tapped layer is one of the num_target_layers layers that the draft states."""
    depth = subject.num_target_layers if subject.target is None else None  # P06 compares with a target that is given
    for index, tap in enumerate(subject.stated.taps or ()):
        if tap < 0 or (depth is not None and tap >= depth):
            first = _spelled_layer(subject, 0)
            limit = f"{first}..{_spelled_layer(subject, depth - 1)}" if depth is not None else f"{first} or more"
            layer = _spelled_layer(subject, tap)
            hint = "; 0 is the embedding's output" if layer == 0 else ""
            yield Problem(f"{subject.at(TAPS)}[{index}]", f"layer {layer} is outside the target's layers {limit}{hint}")


@check(
    "C08",
    effect="vLLM reads this list and other engines read target_layer_ids, so they capture different layers",
    fix=f"correct or delete the wrong list, then test the other: {FIX_RUN_LEVEL}",
    source="vllm-project/vllm#40727",
    outcome="drops",
)
def tap_lists_agree(subject: Subject) -> Iterator[Problem]:
    """If eagle_aux_hidden_state_layer_ids is stated, it lists each tapped layer, counted from 0, plus 1."""
    aux, taps = subject.stated.value(AUX_KEY), subject.stated.taps
    if aux is None or taps is None:
        return
    expected = [tap + 1 for tap in taps]
    if aux != expected:
        yield Problem(subject.at(AUX_KEY), f"found {aux}, expected {expected}: each tapped layer plus one")


@check(
    "C09",
    "warning",
    effect="if the list was copied from a draft that counts layers from 0, every feature is one layer too early",
    fix=FIX_RUN_LEVEL,
    source="vllm-project/vllm#40727 (acceptance 3.9, then 4.1 once it was fixed)",
    is_about_training=True,
)
def taps_were_shifted(subject: Subject) -> Iterator[Problem]:
    """A list of tapped layers that counts from 1 was not copied from a list that counts from 0.

    A dialect that counts layers from 1 lists each tapped layer one higher than a dialect that counts from 0.
    """
    taps = subject.stated.taps or []
    listed = [tap + 1 for tap in taps]
    if taps and _spelled_layer(subject, 0) == 1 and listed in _usual_taps(subject, len(taps)):
        message = f"{listed} is the usual list counted from 0; counted from 1 as here: {[tap + 1 for tap in listed]}"
        yield Problem(subject.at(TAPS), message)


@check(
    "C45",
    "warning",
    effect="if the list was copied from a draft that counts layers from 1, every feature is one layer too late",
    fix=FIX_RUN_LEVEL,
    source="vllm-project/vllm#40727; microsoft/onnxruntime-genai#2538",
    is_about_training=True,
)
def taps_were_not_shifted(subject: Subject) -> Iterator[Problem]:
    """A list of tapped layers that counts from 0 was not copied from a list that counts from 1.

    A dialect that counts layers from 0 lists each tapped layer one lower than a dialect that counts from 1.
    """
    taps = subject.stated.taps or []
    shifted = [tap - 1 for tap in taps]
    if len(taps) >= 3 and _spelled_layer(subject, 0) == 0 and shifted in _usual_taps(subject, len(taps)):
        usual = f"the usual list for {subject.num_target_layers} layers, {shifted}"
        yield Problem(subject.at(TAPS), f"each layer of {taps} is one more than in {usual}")


@check(
    "C10",
    "warning",
    effect="transformers captures that layer's output after the final norm, vLLM and SGLang before the norm",
    fix=f"{FIX_RUN_LEVEL} # measures the draft with the output before the norm",
    source="XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash; sgl-project/sglang#32204",
)
def last_layer_is_not_tapped(subject: Subject) -> Iterator[Problem]:
    """The tapped layers stop before the target's last layer.

    Readers disagree on whether the target's final norm is applied to the last layer's output.
    """
    depth = subject.num_target_layers
    if depth is not None and depth - 1 in (subject.stated.taps or ()):
        yield Problem(subject.at(TAPS), f"the last of {depth} layers of the target is tapped")


def _spelled_layer(subject: Subject, layer: int) -> Any:
    """A layer, counted from 0, as the dialect spells it in its list of tapped layers."""
    spelled = subject.stated.spelled(TAPS, [layer])
    return spelled[0] if isinstance(spelled, list) and spelled else spelled


def _guess(subject: Subject) -> list[int] | None:
    """The layers that engines guess, None if the number of layers of target or draft is not known."""
    depth, count = subject.num_target_layers, subject.stated.body.get("num_hidden_layers")
    return guess_taps(depth, count) if depth is not None and is_int(count) and 1 <= count < 1000 else None


def _usual_taps(subject: Subject, num_taps: int) -> list[list[int]]:
    """The usual lists of tapped layers, counted from 0, by the draft's number of layers and by its number of taps."""
    depth, guess = subject.num_target_layers, _guess(subject)
    return [guess, guess_taps(depth, num_taps)] if guess is not None and depth is not None else []
