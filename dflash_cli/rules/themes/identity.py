"""Rules on the kind of the checkpoint and on the settings that every draft states."""

from collections.abc import Iterator

from dflash_cli.formats.decoder_body import BODY_FIELDS
from dflash_cli.formats.dialect import servers_of
from dflash_cli.formats.draft_kinds.kind import Kind
from dflash_cli.formats.relatives import served_in_words
from dflash_cli.formats.unserved import MODE_KEYS, PLAIN_PROJECTORS
from dflash_cli.rules.rule import FIX_COPY, Outcome, Problem, Severity, check
from dflash_cli.rules.subject import CONFIG_FILE, WEIGHTS, Subject
from dflash_runtime.json_values import is_int
from dflash_runtime.phrases import article

BODY_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "vocab_size",
    "model_type",
)
QWEN3_HEAD_DIM = 128
READ_BY_ENGINES = ("attention_sink_bias", "add_swa_attention_sink_bias", "attention_value_scale", "has_embed_tokens")
"""Keys for computations outside DFlash that vLLM or SGLang applies."""


@check(
    "C01",
    effect="an engine that takes it for a DFlash draft stops or proposes poor tokens",
    fix="dflash inspect {draft} # names its kind; serve it with an engine that supports that kind",
    source="z-lab/dflash model.py; NVIDIA/Model-Optimizer hf_spec_export.py; vLLM model registry",
    stage="identity",
)
def is_dflash(subject: Subject) -> Iterator[Problem]:
    """The checkpoint is a DFlash draft, neither a related kind of draft nor a target.

    Several related kinds of draft use DFlash's architecture name. Without their extra tensors they compute something
    that nobody trained. A draft of a kind that dflash checks is an error only for the named engines that do not serve
    it.
    """
    detection = subject.detection
    if detection is None:
        error = subject.parse_error
        assert error is not None
        yield Problem(
            subject.location("architectures"),
            error.message.removeprefix(f"{subject.path / CONFIG_FILE}: "),
            fix="dflash inspect {draft} # shows what it is; if it is the target, pass the draft instead",
        )
        return
    difference, kind = detection.format.difference, detection.format.kind
    if isinstance(detection.format, Kind):
        yield from _another_kind(subject, detection.format, detection.evidence)
    elif difference:
        yield Problem(
            subject.location("architectures"),
            f"found {article(detection.format.title)} draft ({detection.evidence}), expected DFlash; "
            f"{served_in_words(detection.format, subject.config)}",
            effect=f"an engine that takes it for a DFlash draft stops or proposes poor tokens: {difference}",
        )
    if kind is not None and subject.config.get(kind[0]) != kind[1]:
        found = subject.config.get(kind[0])
        yield Problem(subject.location(kind[0]), f"found {found!r}, expected {kind[1]!r}")


def _fix_for(engine: str, kind: Kind, subject: Subject) -> str:
    """The conversion after which an engine serves the draft, if only names differ; else nothing."""
    reading = subject.kind_reading
    renaming = reading.renaming(engine) if reading is not None else None
    if renaming is None or kind.service(engine) is None:
        return ""
    return f"dflash convert {{draft}} {{out}} --to {renaming.to} # writes the names that {engine} reads"


def _another_kind(subject: Subject, kind: Kind, evidence: str) -> Iterator[Problem]:
    """An error about each named engine that does not serve the kind, and a sentence about the draft."""
    location = subject.location("architectures")
    for engine in subject.plan.engines:
        reason = engine.refuses_kind(kind, subject.config) if engine.judges(kind) else None
        if reason is not None:
            yield Problem(
                location,
                f"found {article(kind.title)} draft ({evidence}), which {engine} does not serve: {reason}",
                effect=f"an engine that takes it for a DFlash draft stops or proposes poor tokens: {kind.difference}",
                fix=_fix_for(engine.name, kind, subject),
                engines=(engine.name,),
            )
    is_served = bool(subject.plan.engines or servers_of(kind, subject.config))
    fixes = [fix for service in kind.services if (fix := _fix_for(service.engine, kind, subject))]
    severity: Severity = "info" if is_served else "warning" if fixes else "error"
    yield Problem(
        location,
        f"found {article(kind.title)} draft ({evidence}); {served_in_words(kind, subject.config)}",
        effect=f"dflash describes and checks the draft, but does not run it: {kind.difference}",
        fix="" if is_served or not fixes else fixes[0],
        severity=severity,
        outcome="stops" if severity == "error" else "serves",
    )


@check(
    "C02",
    effect="engines ignore the head that belongs to this projector, and do not warn",
    fix="dflash inspect {draft} --tensors # lists the head; serve the draft with the engine that it was made for",
    source="NVIDIA/Model-Optimizer hf_spec_export.py keeps DFlashDraftModel for Domino and DSpark",
    outcome="drops",
)
def projector_is_plain(subject: Subject) -> Iterator[Problem]:
    """projector_type, if stated, is DFlash's own.

    C01 recognises Domino and DSpark by their projectors. dflash does not know drafts with any other projector.
    """
    value = subject.stated.value("projector_type")
    if value not in (*PLAIN_PROJECTORS, *subject.format.projectors):
        yield Problem(subject.at("projector_type"), f"found {value!r}, which is not a DFlash projector")


@check(
    "C48",
    effect="dflash neither converts nor runs the draft, because without this setting it would be another model",
    fix="serve it with the engine it was trained for; if training ignored the key, delete it: dflash validate {draft}",
    source="vLLM 0.33.0 qwen3_dflash.py; SGLang 0.5.23 models/dflash.py",
    outcome="drops",
    stops_runtime=True,
)
def asks_for_nothing_more(subject: Subject) -> Iterator[Problem]:
    """The config asks only for computations of DFlash.

    Examples are scaled attention values, which vLLM and SGLang serve, and attention sinks under a key that the dialect
    does not define. C02 reports projectors, C35 predictions at the anchor.
    """
    for key, text in subject.format.unserved(subject.config).items():
        if key not in ("projector_type", "sample_from_anchor"):
            outcome: Outcome = "serves" if key in READ_BY_ENGINES else "stops" if key in MODE_KEYS else "drops"
            yield Problem(subject.at(key), text, outcome=outcome)


@check(
    "C49",
    "info",
    effect="dflash does not apply the key; an engine that knows it may",
    fix="dflash inspect {draft} --json # shows the value",
    source="sgl-project/sglang#34171",
    is_about_training=True,
)
def every_key_is_known(subject: Subject) -> Iterator[Problem]:
    """Every key of the config and of the headers' metadata is known.

    A trainer may write settings of a newer kind of draft, such as the length head of AdaFlash.
    """
    if subject.parsed is not None:
        for key in subject.format.unknown_keys(subject.config, subject.parsed.carried):
            yield Problem(subject.location(subject.format.stored_key(key)), f"{key} is not known")
    metadata = subject.checkpoint.metadata if subject.checkpoint is not None and subject.tensors else {}
    for key in sorted(metadata.keys() - {"format"}):
        yield Problem(f"{WEIGHTS}:__metadata__.{key}", f"the header's metadata {key} is not known")


@check(
    "C32",
    effect="readers fill in the default of a config class, which belongs to another model",
    fix="write the draft's own value, then check it: dflash validate {draft}",
    source="transformers PreTrainedConfig subclasses",
)
def states_its_sizes(subject: Subject) -> Iterator[Problem]:
    """The decoder config states every size."""
    body, container = subject.stated.body, subject.format.body.removesuffix(".")
    if container and not body:
        yield Problem(subject.location(container), "missing or not an object, expected the draft's decoder config")
        return
    unstated = {key for field in subject.format.unstated for key in BODY_FIELDS.get(field, ())}
    for key in BODY_REQUIRED:
        if body.get(key) is None and key not in unstated:
            severity: Severity = "warning" if key in ("head_dim", "model_type") else "error"
            yield Problem(subject.body_at(key), "missing", severity=severity)


@check(
    "C47",
    effect="engines build heads of 128 dimensions, and stop if the weights have other shapes",
    fix=FIX_COPY,
    source="transformers Qwen3Config.head_dim is 128; z-lab 0.1.0, run; vLLM 0.33.0; SGLang 0.5.23",
)
def head_dim_is_the_default(subject: Subject) -> Iterator[Problem]:
    """If head_dim is absent, the heads have 128 dimensions, the default of the config class that engines use."""
    body = subject.stated.body
    hidden, heads = body.get("hidden_size"), body.get("num_attention_heads")
    is_read_as_qwen3 = body.get("model_type", "qwen3") == "qwen3"
    if body.get("head_dim") is not None or not is_read_as_qwen3 or not is_int(hidden) or not is_int(heads):
        return
    norm = next(
        (info for name, info in (subject.tensors or {}).items() if name.endswith("0.self_attn.q_norm.weight")), None
    )
    stored = norm.shape[0] if norm is not None and norm.shape else None
    actual = stored if stored is not None else hidden // heads if heads > 0 else None
    if actual is not None and actual != QWEN3_HEAD_DIM:
        which = "the weights have" if stored is not None else "hidden_size gives"
        repair = {subject.format.decoder_key("head_dim"): stored} if stored is not None else {}
        yield Problem(subject.body_at("head_dim"), f"missing, engines assume 128 and {which} {actual}", repair=repair)
