"""Rules on the tapped layers of the target."""

from collections.abc import Iterator

from dflash_cli.formats.native_fields import guess_taps
from dflash_cli.validation.rule import FIX_RUN_LEVEL, Problem, check
from dflash_cli.validation.subject import Subject
from dflash_runtime.json_values import is_int

NORMALISE = "dflash convert {draft} {out} --to native --normalise-taps"


@check(
    "C05",
    effect="engines guess the layers, and guess wrong for most published drafts",
    fix="write the layers the draft was trained on, then dflash validate {draft} --target {target} --level run",
    source="sgl-project/sglang#37475; z-lab/dflash#156, #157",
)
def taps_are_stated(subject: Subject) -> Iterator[Problem]:
    """The tapped layers are stated, as a list of integers.

    The usual guess spreads the layers evenly; it was found wrong for 14 of 20 published drafts.
    """
    value = subject.stated(subject.tap_key)
    if value is None:
        yield Problem(subject.tap_location, f"missing{_guess(subject)}", outcome="drops")
    elif subject.taps is None:
        yield Problem(subject.tap_location, f"found {value!r}, expected a non-empty list of integers")


@check(
    "C06",
    effect="engines stop, or never capture the layer",
    fix="correct the list, or name the target it was made for: dflash validate {draft} --target OTHER_TARGET",
    source="charlie12345/ROCmFPX#44",
)
def taps_exist(subject: Subject) -> Iterator[Problem]:
    """Every tapped layer exists in the target."""
    depth = subject.num_target_layers
    shift = 1 if subject.is_speculators else 0
    for index, tap in enumerate(subject.taps or ()):
        if tap < 0 or (depth is not None and tap >= depth):
            limit = f"{shift}..{depth - 1 + shift}" if depth is not None else f"{shift} or more"
            hint = "; 0 is the embedding's output" if subject.is_speculators and tap == -1 else ""
            yield Problem(f"{subject.tap_location}[{index}]", f"{tap + shift} is outside the target's {limit}{hint}")


@check(
    "C07",
    effect="vLLM sorts the taps and not the columns of fc, which permutes the features",
    fix=NORMALISE,
    source="vLLM 0.33.0 models/interfaces.py; z-lab/dflash model.py",
    outcome="drops",
)
def taps_ascend(subject: Subject) -> Iterator[Problem]:
    """Tapped layers ascend without repeats.

    The reference concatenates them as listed, vLLM sorts and de-duplicates them. Putting them in order changes
    nothing if the columns of fc move along.
    """
    taps = subject.taps or []
    if len(set(taps)) != len(taps):
        yield Problem(
            subject.tap_location,
            f"{subject.stated(subject.tap_key)} repeats a layer",
            effect="vLLM taps each layer once, so fc gets fewer features than it has columns",
            outcome="stops",
        )
    elif taps != sorted(taps):
        yield Problem(subject.tap_location, f"{subject.stated(subject.tap_key)} does not ascend")


@check(
    "C08",
    effect="vLLM takes this list, other engines the other one",
    fix=FIX_RUN_LEVEL,
    source="vllm-project/vllm#40727",
    outcome="drops",
)
def tap_lists_agree(subject: Subject) -> Iterator[Problem]:
    """Where both tap lists are stated, the eagle one is one higher."""
    key = "eagle_aux_hidden_state_layer_ids"
    aux = subject.body.get(key, subject.config.get(key))
    if aux is None or subject.taps is None:
        return
    expected = [tap + 1 for tap in subject.taps]
    if aux != expected:
        yield Problem(
            subject.location(key), f"{aux}, expected {expected}: one more than the layers whose output is tapped"
        )


@check(
    "C09",
    "warning",
    effect="if the list was copied, every feature comes from one layer too early",
    fix=FIX_RUN_LEVEL,
    source="vllm-project/vllm#40727 (acceptance 3.9, then 4.1 once it was fixed)",
)
def taps_were_shifted(subject: Subject) -> Iterator[Problem]:
    """speculators ids are not a native list that was copied without adding one.

    The native dialect numbers a tap by the layer whose output it is, speculators by the layer whose input it is.
    """
    depth, count = subject.num_target_layers, subject.body.get("num_hidden_layers")
    taps = subject.taps
    if not subject.is_speculators or taps is None or depth is None or not is_int(count) or not 1 <= count < 1000:
        return
    stated = [tap + 1 for tap in taps]
    if stated == guess_taps(depth, count) or stated == guess_taps(depth, len(taps)):
        yield Problem(
            subject.tap_location,
            f"{stated} is the usual native list for {depth} layers; this dialect would say {[i + 1 for i in stated]}",
        )


@check(
    "C45",
    "warning",
    effect="if the list was shifted, every feature comes from one layer too late",
    fix=FIX_RUN_LEVEL,
    source="vllm-project/vllm#40727; microsoft/onnxruntime-genai#2538",
)
def taps_were_not_shifted(subject: Subject) -> Iterator[Problem]:
    """native ids are not a speculators list that was copied without taking one away."""
    depth, count = subject.num_target_layers, subject.body.get("num_hidden_layers")
    taps = subject.taps
    if subject.is_speculators or taps is None or depth is None or not is_int(count) or not 1 <= count < 1000:
        return
    shifted = [tap - 1 for tap in taps]
    if len(taps) > 2 and shifted in (guess_taps(depth, count), guess_taps(depth, len(taps))):
        yield Problem(subject.tap_location, f"{taps} is one more than the usual list for {depth} layers, {shifted}")


@check(
    "C10",
    "warning",
    effect="transformers hands out that layer normalised, vLLM and SGLang hand it out raw",
    fix=FIX_RUN_LEVEL,
    source="XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash; sgl-project/sglang#32204",
)
def last_layer_is_not_tapped(subject: Subject) -> Iterator[Problem]:
    """The last layer is not tapped: readers disagree on whether the final norm is applied to it."""
    depth = subject.num_target_layers
    if depth is not None and depth - 1 in (subject.taps or ()):
        yield Problem(subject.tap_location, f"taps the last of {depth} layers")


def _guess(subject: Subject) -> str:
    depth, count = subject.num_target_layers, subject.body.get("num_hidden_layers")
    if subject.is_speculators or depth is None or not is_int(count) or not 1 <= count < 1000:
        return ""
    return f"; engines would guess {guess_taps(depth, count)}"
