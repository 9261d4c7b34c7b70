"""Rules on tensor parallelism: whether N GPUs divide the sizes of draft and target as an engine needs it."""

from collections.abc import Iterator, Mapping, Sequence

from dflash_cli.engines.serving_engine import EnginesWhere, ServingEngine
from dflash_cli.engines.split_model import SplitModel, split_models
from dflash_cli.engines.splitting import Misfit
from dflash_cli.rules.rule import Outcome, Problem, check
from dflash_cli.rules.subject import CONFIG_FILE, WEIGHTS, Subject

SPLITTING = EnginesWhere(lambda engine: engine.splits_models)
EFFECTS: Mapping[Outcome, str] = {"stops": "the engine stops at start", "drops": "the engine computes another model"}
CODE = "vLLM 0.24.0, 0.28.0, 0.33.0 and SGLang 0.5.23, run on N ranks: docs/measurements/engine-verdicts.md"
ONE_GPU = "no number of GPUs fits; serve it on one: dflash serve-command {draft} --target {target} --engine vllm"
MOST_GPUS = 16
"""The largest number of GPUs that a fix names."""


@check(
    "S52",
    effect="the engine stops at start",
    fix=ONE_GPU,
    source=CODE,
    engines=SPLITTING,
    is_about_start=True,
)
def gpus_divide_the_pair(subject: Subject) -> Iterator[Problem]:
    """The GPUs of --tensor-parallel divide draft and target as the engine needs it.

    The number must divide heads, inner widths and heads of recurrent layers. It must divide the KV heads, or be a
    multiple of them. vLLM also needs a divisor of the vocabulary, which it pads to a multiple of 64. Each GPU's part of
    a packed matrix must have whole blocks or groups. dflash knows the inner widths of common families of targets.
    """
    num_gpus = subject.plan.tensor_parallel
    for engine, models in _split(subject):
        misfits = [(model, item) for model in models for item in engine.split_misfits(model, num_gpus)]
        fix = _fix(engine, models, num_gpus) if misfits else ""
        for model, item in misfits:
            yield Problem(
                _location(item, model, subject),
                f"{engine}: {item.why}",
                effect=f"{EFFECTS[item.outcome]}: {item.error}",
                fix=fix,
                engines=(engine.name,),
                outcome=item.outcome,
            )


@check(
    "S53",
    "info",
    effect="each KV head is kept by several GPUs, so all GPUs together keep more keys and values than one GPU",
    fix="dflash serve-command {draft} --target {target} --engine vllm # with at most as many GPUs as KV heads",
    source=CODE,
    engines=SPLITTING,
)
def every_gpu_has_its_own_kv_heads(subject: Subject) -> Iterator[Problem]:
    """There are at least as many KV heads as GPUs. If there are fewer, several GPUs keep the same head."""
    num_gpus = subject.plan.tensor_parallel
    for engine, models in _split(subject):
        for model in models:
            has_misfits = any(engine.split_misfits(model, num_gpus))
            for key, count in ({} if has_misfits else model.replicated(num_gpus)).items():
                where = _key_location(key, model, subject)
                yield Problem(where, f"{count} for {num_gpus} GPUs", engines=(engine.name,))


def _fix(engine: ServingEngine, models: Sequence[SplitModel], num_gpus: int) -> str:
    """The numbers of GPUs that fit, with the command that checks the largest one below the user's."""
    fitting = [n for n in range(2, MOST_GPUS + 1) if not any(any(engine.split_misfits(model, n)) for model in models)]
    if not fitting:
        return ONE_GPU
    chosen = max((n for n in fitting if n < num_gpus), default=fitting[0])
    words = f"{', '.join(map(str, fitting))} GPUs fit {engine.name}"
    return f"{words}: dflash validate {{draft}} --target {{target}} --engine {engine.name} --tensor-parallel {chosen}"


def _split(subject: Subject) -> Iterator[tuple[ServingEngine, Sequence[SplitModel]]]:
    """Each named engine with the models that it cuts; nothing for one GPU."""
    if subject.plan.tensor_parallel == 1:
        return
    models = tuple(split_models(subject))
    for engine in subject.plan.engines:
        assert isinstance(engine, ServingEngine)
        yield engine, models


def _location(item: Misfit, model: SplitModel, subject: Subject) -> str:
    if item.is_tensor:
        return f"{'' if model.is_draft else 'target '}{WEIGHTS}:{item.key}"
    return _key_location(item.key, model, subject)


def _key_location(key: str, model: SplitModel, subject: Subject) -> str:
    if not model.is_draft:
        nested = subject.target.nested_in if subject.target is not None else None
        return f"target {CONFIG_FILE}:{f'{nested}.' if nested else ''}{key}"
    return subject.at(key) if key == "draft_vocab_size" else subject.body_at(key)
