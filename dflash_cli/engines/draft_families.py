"""Rules on draft families other than DFlash: which engines have a model for them, and which layout they serve."""

from collections.abc import Iterator

from dflash_cli.engines.serving_engine import ServingEngine
from dflash_cli.engines.several_engines import EVERY
from dflash_cli.formats.dialect import Format, named_architectures
from dflash_cli.formats.relatives import served_in_words
from dflash_cli.rules.rule import FIX_TO_COMMON, Problem, check
from dflash_cli.rules.shapes import layout_in_words
from dflash_cli.rules.subject import Subject


@check(
    "S34",
    effect="the engine stops at the name, or loads a model without the parts that only these drafts have",
    fix=FIX_TO_COMMON,
    source="model registries of vLLM 0.24 to 0.33 and SGLang 0.5.23; z-lab 0.1.0; llama.cpp conversion/qwen.py",
    engines=EVERY,
)
def engine_has_the_model(subject: Subject) -> Iterator[Problem]:
    """The engine has a model for drafts of this family under the name in architectures.

    A speculators file of DFlash 2 or DSpark states its family, and engines replace its architectures.
    """
    if subject.format.family == Format.family:
        return
    kind = subject.format.kind
    location = subject.location("architectures" if kind is None else kind[0])
    found = named_architectures(subject.config) if kind is None else [kind[1]]
    for engine in subject.plan.engines:
        assert isinstance(engine, ServingEngine)
        reads = isinstance(subject.format, engine.reads) and engine.judges(subject.format)
        if reads and not engine.serves_kind(subject.format, subject.config):
            family = subject.format.title.partition(",")[0]
            message = f"found {', '.join(found) or 'no architecture'}, for which {engine} has no {family} model"
            is_loaded = engine.loads_without_parts(subject.format, subject.config)
            yield Problem(
                location,
                message,
                fix=_fix_of_model(engine, subject),
                engines=(engine.name,),
                outcome="drops" if is_loaded else None,
            )


def _fix_of_model(engine: ServingEngine, subject: Subject) -> str:
    """A copy, if the engine has a model under the name that a copy has; else the engines that have one."""
    renamed = {**subject.config, "architectures": [subject.format.written_as]}
    if engine.serves_kind(subject.format, renamed):
        return FIX_TO_COMMON
    return f"{served_in_words(subject.format, renamed)}; dflash eval-acceptance {{draft}} --target {{target}} runs it"


@check(
    "S35",
    effect="rows of a block predict other positions than in training, so almost no token is accepted",
    fix="dflash convert {draft} {out} --to vllm --target {target} # writes the key wherever engines read it",
    source="vllm-project/vllm#56792; vLLM 0.25.0 to 0.33.0 dspark/speculator.py; SGLang 0.5.23 dspark_config.py",
    engines=EVERY,
    outcome="drops",
)
def engine_serves_the_stated_layout(subject: Subject) -> Iterator[Problem]:
    """The engine serves blocks in the layout that the config states: anchor-first, or fill-in.

    vLLM and SGLang read sample_from_anchor of a native file at the top level only. vLLM before 0.27 reads
    dspark_bonus_anchor, and serves every speculators file as fill-in.
    """
    if subject.parsed is None or subject.parsed.has_unknown_layout:
        return
    stated = subject.parsed.config.sample_from_anchor
    for engine in subject.plan.engines:
        served = engine.served_layout(subject) if engine.serves_kind(subject.format, subject.config) else None
        if served is not None and served != stated:
            message = f"{engine} serves {layout_in_words(served)}, the config states {layout_in_words(stated)}"
            yield Problem(subject.at("sample_from_anchor"), message, engines=(engine.name,))
