"""Rules on what the checkpoint is and how it names itself."""

from collections.abc import Iterator

from dflash_cli.formats.relatives import Relative
from dflash_cli.validation.rule import FIX_COPY, FIX_INSPECT, REMOVED, Problem, Severity, check
from dflash_cli.validation.subject import CONFIG_FILE, SPECULATORS_BODY, Subject
from dflash_runtime.json_values import as_object

VLLM_CONFIG = "vLLM 0.33.0 transformers_utils/config.py"
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
PLAIN_PROJECTORS = (None, "", "dflash", "default")


@check(
    "C01",
    effect="read as DFlash it proposes badly or fails",
    fix="use a tool for this kind; dflash inspect {draft} names it",
    source="z-lab/dflash model.py; NVIDIA/Model-Optimizer hf_spec_export.py; vLLM model registry",
    stage="identity",
)
def is_dflash(subject: Subject) -> Iterator[Problem]:
    """The checkpoint is DFlash, not one of its relatives and not a target.

    Several relatives carry DFlash's architecture string. Taking their extra tensors away would leave a model that was
    never trained.
    """
    detection = subject.detection
    if detection is None:
        error = subject.parse_error
        assert error is not None
        message = error.message.removeprefix(f"{subject.path / CONFIG_FILE}: ")
        yield Problem(subject.location("architectures"), message, fix=error.hint or "")
        return
    if isinstance(detection.format, Relative):
        yield Problem(
            subject.location("architectures"),
            f"{detection.format.title}: {detection.evidence}",
            effect=f"read as DFlash it proposes badly or fails: {detection.format.difference}",
        )
    kind = subject.config.get("speculators_model_type")
    if detection.format.name == "speculators" and kind != "dflash":
        yield Problem(subject.location("speculators_model_type"), f"found {kind!r}, expected 'dflash'")


@check(
    "C02",
    effect="a head that the projector belongs to is left out in silence",
    fix=FIX_INSPECT,
    source="NVIDIA/Model-Optimizer hf_spec_export.py keeps DFlashDraftModel for Domino and DSpark",
    outcome="drops",
)
def projector_is_plain(subject: Subject) -> Iterator[Problem]:
    """projector_type names no head that DFlash does not have.

    Domino and DSpark are recognised by name (C01); any other name is a kind this tool does not know.
    """
    value = subject.stated("projector_type")
    if value not in PLAIN_PROJECTORS:
        yield Problem(next(iter(subject.homes("projector_type"))), f"{value!r} is no projector of DFlash")


@check(
    "C30",
    effect="vLLM does not take the file for a speculators config",
    fix=FIX_COPY,
    source=VLLM_CONFIG,
)
def no_top_level_model_type(subject: Subject) -> Iterator[Problem]:
    """A speculators config has no top-level model_type.

    The body's own model_type stays in transformer_layer_config.
    """
    if subject.is_speculators and "model_type" in subject.config:
        yield Problem(
            subject.location("model_type"),
            f"{subject.config['model_type']!r} at the top level of a speculators config",
            repair={"model_type": REMOVED},
        )


@check(
    "C31",
    effect="vLLM stops with a KeyError",
    fix="save the draft with speculators 0.9, or dflash convert a native export --to speculators",
    source=VLLM_BASE,
)
def has_speculators_keys(subject: Subject) -> Iterator[Problem]:
    """The keys that vLLM reads without a default are there."""
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
            "states no speculative_tokens in its first entry",
            effect="vLLM cannot tell how many tokens to draft",
        )
    if outer and "name_or_path" not in as_object(outer.get("verifier")):
        yield Problem(subject.location("speculators_config.verifier"), "has no name_or_path")
    for key in ("draft_vocab_size", "block_size"):
        if key not in subject.config:
            yield Problem(subject.location(key), "missing", effect="readers fill in defaults that differ (32000, 8)")


@check(
    "C32",
    effect="readers fill in the default of a config class, which is another model's",
    fix="state the draft's own value, then dflash validate {draft}",
    source="transformers PreTrainedConfig subclasses",
)
def states_its_sizes(subject: Subject) -> Iterator[Problem]:
    """Every size of the body is stated."""
    if subject.is_speculators and not subject.body:
        yield Problem(subject.location(SPECULATORS_BODY), "missing or no object, expected the draft's decoder config")
        return
    for key in BODY_REQUIRED:
        if subject.body.get(key) is None:
            severity: Severity = "warning" if key in ("head_dim", "model_type") else "error"
            yield Problem(subject.body_location(key), "missing", severity=severity)


@check(
    "C33",
    "warning",
    effect="vLLM uses the first entry and ignores the rest",
    fix=FIX_COPY,
    source=VLLM_BASE,
)
def has_one_proposal_method(subject: Subject) -> Iterator[Problem]:
    """There is one proposal method, and the default names it."""
    outer = as_object(subject.config.get("speculators_config"))
    methods = outer.get("proposal_methods")
    if not isinstance(methods, list):
        return
    location = subject.location("speculators_config.proposal_methods")
    if len(methods) > 1:
        yield Problem(location, f"{len(methods)} entries")
    names = [as_object(method).get("proposal_type") for method in methods]
    if outer.get("default_proposal_method") not in names:
        yield Problem(
            subject.location("speculators_config.default_proposal_method"),
            f"{outer.get('default_proposal_method')!r} is none of {names}",
            effect="speculators refuses the config",
        )
