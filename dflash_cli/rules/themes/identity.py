"""Rules on what the checkpoint is and how it names itself."""

from collections.abc import Iterator

from dflash_cli.formats.relatives import Relative
from dflash_cli.formats.unserved import PLAIN_PROJECTORS, find_unserved, without_sinks
from dflash_cli.rules.rule import FIX_COPY, Problem, Severity, check
from dflash_cli.rules.subject import CONFIG_FILE, SPECULATORS_BODY, Subject
from dflash_runtime.json_values import as_object, is_int

VLLM_BASE = "vLLM 0.33.0 transformers_utils/configs/speculators/base.py, algos.py"
SPECULATORS_REQUIRED = ("speculators_config", SPECULATORS_BODY, "aux_hidden_state_layer_ids", "mask_token_id")
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
"""What DFlash does not compute, and vLLM or SGLang does."""


@check(
    "C01",
    effect="read as a DFlash draft, it fails or proposes poor tokens",
    fix="dflash inspect {draft} # says what kind it is; serve it with an engine that supports that kind",
    source="z-lab/dflash model.py; NVIDIA/Model-Optimizer hf_spec_export.py; vLLM model registry",
    stage="identity",
)
def is_dflash(subject: Subject) -> Iterator[Problem]:
    """The checkpoint is a DFlash draft, neither a related kind of draft nor a target.

    Several related kinds of draft carry DFlash's architecture name. Removing their extra tensors would leave a model
    that was never trained.
    """
    detection = subject.detection
    if detection is None:
        error = subject.parse_error
        assert error is not None
        message = error.message.removeprefix(f"{subject.path / CONFIG_FILE}: ")
        yield Problem(
            subject.location("architectures"),
            message,
            fix="dflash inspect {draft} # shows what it is; if it is the target, pass the draft instead",
        )
        return
    if isinstance(detection.format, Relative):
        yield Problem(
            subject.location("architectures"),
            f"found a {detection.format.title} draft ({detection.evidence}), expected DFlash",
            effect=f"read as a DFlash draft, it fails or proposes poor tokens: {detection.format.difference}",
        )
    kind = subject.config.get("speculators_model_type")
    if detection.format.name == "speculators" and kind != "dflash":
        yield Problem(subject.location("speculators_model_type"), f"found {kind!r}, expected 'dflash'")


@check(
    "C02",
    effect="if a head belongs to this projector, readers leave it out without a warning",
    fix="serve it with an engine made for that head; if there is none, delete the key: dflash validate {draft}",
    source="NVIDIA/Model-Optimizer hf_spec_export.py keeps DFlashDraftModel for Domino and DSpark",
    outcome="drops",
)
def projector_is_plain(subject: Subject) -> Iterator[Problem]:
    """projector_type, if stated, is DFlash's own.

    Domino and DSpark are recognised by their projector names and reported by C01. Any other name is a kind that this
    tool does not know.
    """
    value = subject.stated("projector_type")
    if value not in PLAIN_PROJECTORS:
        yield Problem(next(iter(subject.homes("projector_type"))), f"found {value!r}, which is not a DFlash projector")


@check(
    "C48",
    effect="dflash neither converts nor runs the draft, since without it the draft is another model",
    fix="serve it with the engine it was trained for; if trained without, delete the key: dflash validate {draft}",
    source="vLLM 0.33.0 qwen3_dflash.py; SGLang 0.5.23 models/dflash.py",
    outcome="drops",
    stops_runtime=True,
)
def asks_for_nothing_more(subject: Subject) -> Iterator[Problem]:
    """The config asks for nothing that DFlash does not compute.

    Scaled values, which vLLM and SGLang serve, are among what it may ask for, and attention sinks unless a native
    dflash_config states them. Projectors and drafting at the anchor are reported by C02 and C35.
    """
    inner = as_object(subject.body.get("dflash_config")) if subject.is_speculators else without_sinks(subject.nested)
    for key, text in find_unserved(inner, subject.config, subject.body).items():
        if key not in ("projector_type", "sample_from_anchor"):
            location = next(iter(subject.homes(key)), subject.body_location(key))
            yield Problem(location, text, outcome="serves" if key in READ_BY_ENGINES else "drops")


@check(
    "C31",
    effect="vLLM stops with a KeyError",
    fix=(
        "save the draft again with speculators 0.9, or convert a native export --to speculators; then dflash "
        "validate {draft}"
    ),
    source=VLLM_BASE,
)
def has_speculators_keys(subject: Subject) -> Iterator[Problem]:
    """A speculators config has every key that vLLM reads without a default."""
    if not subject.is_speculators:
        return
    for key in SPECULATORS_REQUIRED:
        if key not in subject.config:
            yield Problem(subject.location(key), "missing")
    outer = as_object(subject.config.get("speculators_config"))
    methods = outer.get("proposal_methods")
    if outer and not (isinstance(methods, list) and methods and "speculative_tokens" in as_object(methods[0])):
        yield Problem(
            subject.location("speculators_config.proposal_methods"),
            "has no speculative_tokens in its first entry",
            effect="vLLM cannot tell how many tokens to draft",
            fix="dflash validate {draft} --fix-out {out}",
        )
    if outer and "name_or_path" not in as_object(outer.get("verifier")):
        yield Problem(
            subject.location("speculators_config.verifier"),
            "has no name_or_path",
            fix="dflash convert {draft} {out} --to speculators --verifier ORG/REPO",
        )
    for key in ("draft_vocab_size", "block_size"):
        if key not in subject.config:
            yield Problem(
                subject.location(key),
                "missing",
                effect="readers fill in their own defaults (draft_vocab_size 32000, block_size 8)",
            )


@check(
    "C32",
    effect="readers fill in the default of a config class, which belongs to another model",
    fix="write the draft's own value, then check it: dflash validate {draft}",
    source="transformers PreTrainedConfig subclasses",
)
def states_its_sizes(subject: Subject) -> Iterator[Problem]:
    """The decoder config states every size."""
    if subject.is_speculators and not subject.body:
        yield Problem(
            subject.location(SPECULATORS_BODY), "missing or not an object, expected the draft's decoder config"
        )
        return
    for key in BODY_REQUIRED:
        if subject.body.get(key) is None:
            severity: Severity = "warning" if key in ("head_dim", "model_type") else "error"
            yield Problem(subject.body_location(key), "missing", severity=severity)


@check(
    "C47",
    effect="engines build heads of 128, whatever the weights have, and stop at the shapes",
    fix=FIX_COPY,
    source="transformers Qwen3Config.head_dim is 128; z-lab 0.1.0, run; vLLM 0.33.0; SGLang 0.5.23",
)
def head_dim_is_the_default(subject: Subject) -> Iterator[Problem]:
    """A draft that leaves out head_dim has heads of 128, the default of the config class that engines read it with."""
    body = subject.body
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
        location = subject.body_location("head_dim")
        whose = "the weights have" if stored is not None else "hidden_size makes them"
        repair = {location.partition(":")[2]: stored} if stored is not None else {}
        yield Problem(location, f"missing, engines assume 128 and {whose} {actual}", repair=repair)


@check(
    "C33",
    "warning",
    effect="vLLM uses the first entry and ignores the rest",
    fix=FIX_COPY,
    source=VLLM_BASE,
)
def has_one_proposal_method(subject: Subject) -> Iterator[Problem]:
    """There is one proposal method, and default_proposal_method names it."""
    outer = as_object(subject.config.get("speculators_config"))
    methods = outer.get("proposal_methods")
    if not isinstance(methods, list):
        return
    location = subject.location("speculators_config.proposal_methods")
    if len(methods) > 1:
        yield Problem(location, f"found {len(methods)} entries, expected 1")
    names = [as_object(method).get("proposal_type") for method in methods]
    if outer.get("default_proposal_method") not in names:
        yield Problem(
            subject.location("speculators_config.default_proposal_method"),
            f"{outer.get('default_proposal_method')!r} is none of the methods {names}",
            effect="speculators refuses the config",
        )
