"""Rules on the tapped layers of the target."""

from collections.abc import Iterator

from dflash_cli.formats.native_fields import guess_taps
from dflash_cli.rules.rule import FIX_RUN_LEVEL, Problem, check
from dflash_cli.rules.subject import Subject
from dflash_runtime.json_values import is_int


@check(
    "C05",
    effect="engines guess the tapped layers, and guess wrong for most published drafts",
    fix=(
        "write the layers the draft was trained on into config.json, then test them: dflash validate {draft} "
        "--target {target} --level run"
    ),
    source="sgl-project/sglang#37475; z-lab/dflash#156, #157",
)
def taps_are_stated(subject: Subject) -> Iterator[Problem]:
    """The tapped layers (the target layers that feed the draft) are listed as integers.

    Engines that guess spread the layers evenly over the target. That guess was found wrong for 14 of 20 published
    drafts.
    """
    value = subject.stated(subject.tap_key)
    if value is None:
        yield Problem(subject.tap_location, f"missing{_guess(subject)}", outcome="drops")
    elif subject.taps is None:
        yield Problem(subject.tap_location, f"found {value!r}, expected a non-empty list of integers")


@check(
    "C06",
    effect="engines stop, or never capture the layer's output",
    fix=(
        "correct the list of tapped layers, or check the draft against its own target: dflash validate {draft} "
        "--target ORG/REPO"
    ),
    source="charlie12345/ROCmFPX#44",
)
def taps_exist(subject: Subject) -> Iterator[Problem]:
    """Every tapped layer exists in a target of the depth that the draft states."""
    depth = subject.num_target_layers if subject.target is None else None  # P06 holds it against a target
    shift = 1 if subject.is_speculators else 0
    for index, tap in enumerate(subject.taps or ()):
        if tap < 0 or (depth is not None and tap >= depth):
            limit = f"{shift}..{depth - 1 + shift}" if depth is not None else f"{shift} or more"
            hint = "; 0 is the embedding's output" if subject.is_speculators and tap == -1 else ""
            yield Problem(
                f"{subject.tap_location}[{index}]", f"layer {tap + shift} is outside the target's layers {limit}{hint}"
            )


@check(
    "C08",
    effect="vLLM uses this list and other engines use the other, so they capture different layers",
    fix=(
        "correct or delete the wrong list, then test what is left: dflash validate {draft} --target {target} "
        "--level run"
    ),
    source="vllm-project/vllm#40727",
    outcome="drops",
)
def tap_lists_agree(subject: Subject) -> Iterator[Problem]:
    """eagle_aux_hidden_state_layer_ids, if stated, is target_layer_ids plus one."""
    key = "eagle_aux_hidden_state_layer_ids"
    aux = subject.body.get(key, subject.config.get(key))
    if aux is None or subject.taps is None:
        return
    expected = [tap + 1 for tap in subject.taps]
    if aux != expected:
        yield Problem(subject.location(key), f"found {aux}, expected {expected}: each tapped layer plus one")


@check(
    "C09",
    "warning",
    effect="if the list was copied from a native draft, every feature comes from one layer too early",
    fix=FIX_RUN_LEVEL,
    source="vllm-project/vllm#40727 (acceptance 3.9, then 4.1 once it was fixed)",
    is_about_training=True,
)
def taps_were_shifted(subject: Subject) -> Iterator[Problem]:
    """Tapped layers of a speculators draft are one higher than in a native draft.

    The native dialect numbers a tapped layer by the layer whose output it is, the speculators dialect by the layer
    whose input it is, which is one more. The rule reports a list that looks copied unchanged.
    """
    depth, count = subject.num_target_layers, subject.body.get("num_hidden_layers")
    taps = subject.taps
    if not subject.is_speculators or taps is None or depth is None or not is_int(count) or not 1 <= count < 1000:
        return
    stated = [tap + 1 for tap in taps]
    if stated == guess_taps(depth, count) or stated == guess_taps(depth, len(taps)):
        yield Problem(
            subject.tap_location,
            f"{stated} is the usual native list for {depth} layers; in this dialect: {[i + 1 for i in stated]}",
        )


@check(
    "C45",
    "warning",
    effect="if the list was copied from a speculators draft, every feature comes from one layer too late",
    fix=FIX_RUN_LEVEL,
    source="vllm-project/vllm#40727; microsoft/onnxruntime-genai#2538",
    is_about_training=True,
)
def taps_were_not_shifted(subject: Subject) -> Iterator[Problem]:
    """Tapped layers of a native draft are one lower than in a speculators draft.

    The rule reports a list that looks copied from the speculators dialect unchanged.
    """
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
    effect="transformers hands out that layer's output after the final norm, vLLM and SGLang before it",
    fix=f"{FIX_RUN_LEVEL} # measures the draft with the output before the norm",
    source="XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash; sgl-project/sglang#32204",
)
def last_layer_is_not_tapped(subject: Subject) -> Iterator[Problem]:
    """The tapped layers stop before the target's last layer.

    Readers disagree on whether the target's final norm is applied to the last layer's output.
    """
    depth = subject.num_target_layers
    if depth is not None and depth - 1 in (subject.taps or ()):
        yield Problem(subject.tap_location, f"the last of {depth} layers of the target is tapped")


def _guess(subject: Subject) -> str:
    depth, count = subject.num_target_layers, subject.body.get("num_hidden_layers")
    if subject.is_speculators or depth is None or not is_int(count) or not 1 <= count < 1000:
        return ""
    return f"; engines would guess {guess_taps(depth, count)}"
