"""Rules about what several engines have in common, whichever they are."""

from collections.abc import Iterator

from dflash_cli.engines.serving_engine import engines_where
from dflash_cli.formats.dialect import named_architectures
from dflash_cli.validation.rule import FIX_TO_NATIVE, Problem, check
from dflash_cli.validation.subject import Subject

FIX_VLLM = "serve it with vLLM: dflash serve-command {draft} --target {target} --engine vllm"
LIKE_THE_REFERENCE = engines_where(lambda engine: engine.follows_reference)


@check(
    "C36",
    effect="vLLM and SGLang have no model registered under the name",
    fix=FIX_TO_NATIVE,
    source="NVIDIA-NeMo/Automodel serve_vllm.py; vLLM 0.33.0 model registry",
    engines=engines_where(lambda engine: engine.finds_by_architecture),
    unnamed="warning",
)
def architecture_is_known(subject: Subject) -> Iterator[Problem]:
    """architectures names DFlashDraftModel, the one name engines register.

    Automodel writes Qwen3DFlashDraftModel, and a config saved through another class carries that class's name.
    """
    named = named_architectures(subject.config)
    if "DFlashDraftModel" in named or subject.is_speculators:
        return
    said = ", ".join(named) or "no architecture"
    whose = ", which is Automodel's own name" if "Qwen3DFlashDraftModel" in named else ""
    yield Problem(
        subject.location("architectures"),
        f"{said}{whose}; expected DFlashDraftModel",
        repair={"architectures": ["DFlashDraftModel"]},
    )


@check(
    "C37",
    effect="SGLang, the z-lab reference and speculators itself size fc by hidden_size",
    fix=FIX_VLLM,
    source="vLLM 0.33.0 qwen3_dflash.py; SGLang 0.5.23 models/dflash.py",
    engines=engines_where(lambda engine: not engine.takes_other_widths),
    unnamed="warning",
)
def draft_is_as_wide_as_its_target(subject: Subject) -> Iterator[Problem]:
    """target_hidden_size equals hidden_size; only vLLM serves a draft of another width than its target."""
    stated, width = subject.config.get("target_hidden_size"), subject.body.get("hidden_size")
    if stated is not None and stated != width:
        yield Problem(subject.location("target_hidden_size"), f"{stated!r} beside hidden_size {width!r}")


@check(
    "S14",
    effect="transformers has no class for it, and z-lab's code reads the native dialect only",
    fix=FIX_TO_NATIVE,
    source="transformers 5.23 modeling_auto.py; z-lab/dflash model.py",
    engines=LIKE_THE_REFERENCE,
)
def dialect_is_native(subject: Subject) -> Iterator[Problem]:
    """The draft is in the native dialect, the only one transformers and llama.cpp's converter read."""
    if subject.is_speculators:
        yield Problem(subject.location("speculators_config"), "speculators dialect")


@check(
    "S17",
    effect="they take the target's head: the draft's own head and map are left out",
    fix=FIX_VLLM,
    source="z-lab/dflash model.py; ggml-org/llama.cpp src/models/dflash.cpp",
    outcome="drops",
    engines=LIKE_THE_REFERENCE,
)
def head_is_the_targets(subject: Subject) -> Iterator[Problem]:
    """The draft proposes over the target's whole vocabulary."""
    found = subject.vocabulary_sizes
    if found is not None and found[0] < found[1]:
        yield Problem(subject.location("draft_vocab_size"), f"{found[0]} of {found[1]}")
