"""Rules on transformers with z-lab's code, and on llama.cpp; silent unless they are named."""

from collections.abc import Iterator

from dflash_cli.formats.decoder_body import LAYER_KINDS
from dflash_cli.validation.rule import FIX_OUT, TO_NATIVE, Problem, Subject, check
from dflash_cli.validation.rules.vocabulary import sizes
from dflash_cli.validation.verdict import served_causality, trained_causality

TRANSFORMERS = ("transformers",)
LLAMA = ("llama.cpp",)
ZLAB = "z-lab/dflash model.py, 0.1.0 and April 2026"
CONVERTER = "ggml-org/llama.cpp conversion/qwen.py, src/models/dflash.cpp"
VLLM_SERVES = "serve it with vLLM: dflash launch DRAFT --target TARGET --engine vllm"


@check(
    "S13", "warning", effect="the code of April stops, or assumes 16", fix=FIX_OUT, source=ZLAB, engines=TRANSFORMERS
)
def keys_are_where_the_reference_looks(subject: Subject) -> Iterator[Problem]:
    """block_size and num_target_layers stand at the top level, where z-lab's first code reads them."""
    if subject.engine("transformers") is None or subject.is_speculators:
        return
    for key in ("block_size", "num_target_layers"):
        if subject.config.get(key) is None:
            yield Problem(subject.place(key), "missing at the top level")


@check(
    "S14",
    effect="transformers has no class for it, and z-lab's code reads the native dialect only",
    fix=TO_NATIVE,
    source="transformers 5.23 modeling_auto.py; z-lab/dflash model.py",
    engines=("transformers", "llama.cpp"),
)
def dialect_is_native(subject: Subject) -> Iterator[Problem]:
    """The draft is in the native dialect, the only one transformers and llama.cpp's converter read."""
    named = tuple(engine for engine in ("transformers", "llama.cpp") if subject.engine(engine) is not None)
    if named and subject.is_speculators:
        yield Problem(subject.place("speculators_config"), "speculators dialect", engines=named)


@check(
    "S17",
    effect="they take the target's head: the draft's own head and map are left out",
    fix=VLLM_SERVES,
    source="z-lab/dflash model.py; ggml-org/llama.cpp src/models/dflash.cpp",
    outcome="drops",
    engines=("transformers", "llama.cpp"),
)
def head_is_the_targets(subject: Subject) -> Iterator[Problem]:
    """The draft proposes over the target's whole vocabulary."""
    found = sizes(subject)
    named = tuple(engine for engine in ("transformers", "llama.cpp") if subject.engine(engine) is not None)
    if named and found is not None and found[0] < found[1]:
        yield Problem(subject.place("draft_vocab_size"), f"{found[0]} of {found[1]}", engines=named)


@check(
    "S24",
    effect="the reference reads the top-level is_causal and the layers' kinds only",
    fix=FIX_OUT,
    source="z-lab/dflash 0.1.0 model.py",
    outcome="drops",
    engines=TRANSFORMERS,
)
def reference_serves_the_trained_causality(subject: Subject) -> Iterator[Problem]:
    """z-lab's code serves every layer with the causality the config states."""
    engine = subject.engine("transformers")
    served = served_causality(subject, engine) if engine is not None else None
    trained = trained_causality(subject)
    if served is not None and trained is not None and served != trained:
        yield Problem(
            subject.place("dflash_config.causal"),
            f"{sum(served)} of {len(served)} layers are served causally, the draft has {sum(trained)}",
            repair={"is_causal": trained[0]} if len(set(trained)) == 1 else {},
        )


@check("S15", effect="llama.cpp has no tensor for it and stops", fix=VLLM_SERVES, source=CONVERTER, engines=LLAMA)
def llama_has_no_bias(subject: Subject) -> Iterator[Problem]:
    """attention_bias is false: llama.cpp creates no bias tensors for DFlash."""
    if subject.engine("llama.cpp") is not None and subject.body.get("attention_bias") is True:
        yield Problem(subject.body_place("attention_bias"), "true")


@check(
    "S25",
    effect="llama.cpp has one flag for all layers",
    fix=VLLM_SERVES,
    source=CONVERTER,
    outcome="drops",
    engines=LLAMA,
)
def llama_serves_one_causality(subject: Subject) -> Iterator[Problem]:
    """All layers have one causality, and it is stated."""
    engine = subject.engine("llama.cpp")
    served = served_causality(subject, engine) if engine is not None else None
    trained = trained_causality(subject)
    if served is not None and trained is not None and served != trained:
        place = subject.body_place("layer_types" if set(subject.layer_types) == set(LAYER_KINDS) else "is_causal")
        yield Problem(place, f"{sum(trained)} of {len(trained)} layers are causal, served: {sum(served)}")


@check(
    "S26",
    "warning",
    effect="converters of July 2026 and before write 16, whatever it is",
    fix=FIX_OUT,
    source=CONVERTER,
    engines=LLAMA,
)
def llama_finds_the_block(subject: Subject) -> Iterator[Problem]:
    """block_size stands at the top level, where llama.cpp's converter looks."""
    is_nested = subject.config.get("block_size") is None and subject.block_size not in (None, 16)
    if subject.engine("llama.cpp") is not None and not subject.is_speculators and is_nested:
        yield Problem(subject.place("block_size"), f"missing at the top level, {subject.block_size} in dflash_config")


@check(
    "S27",
    effect="llama.cpp embeds the block unscaled",
    fix="dflash generate --draft DRAFT --target TARGET applies it; llama.cpp and vLLM do not",
    source="ggml-org/llama.cpp src/models/dflash.cpp",
    outcome="drops",
    engines=LLAMA,
)
def llama_applies_no_scale(subject: Subject) -> Iterator[Problem]:
    """The embedding is not scaled, which llama.cpp's DFlash has no key for."""
    value = subject.stated("input_embedding_scale")
    if subject.engine("llama.cpp") is not None and value not in (None, 1):
        yield Problem(next(iter(subject.homes("input_embedding_scale"))), f"{value}")
