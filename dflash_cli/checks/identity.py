"""Rules on what the checkpoint is and how it names itself."""

from collections.abc import Iterator

from dflash_cli.checks.base import SPECULATORS_BODY, Problem, Severity, Subject, as_object, check
from dflash_cli.formats.base import detect_from, named_architectures
from dflash_cli.formats.relatives import Relative
from dflash_runtime.errors import UnknownFormat

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


@check("C01")
def is_dflash(subject: Subject) -> Iterator[Problem]:
    """The checkpoint is DFlash, not one of its relatives and not a target."""
    path = subject.path / "config.json"
    try:
        detection = detect_from(subject.config, frozenset(subject.tensors or ()), path)
    except UnknownFormat as error:
        yield Problem(subject.place("architectures"), error.message.removeprefix(f"{path}: "), fix=error.hint or "")
        return
    if isinstance(detection.format, Relative):
        yield Problem(
            subject.place("architectures"),
            f"{detection.format.title}: {detection.evidence}",
            effect=f"read as DFlash it proposes badly or fails: {detection.format.difference}",
            fix="use a tool for this kind; removing the extra parts changes the model",
        )
    kind = subject.config.get("speculators_model_type")
    if detection.format.name == "speculators" and kind != "dflash":
        yield Problem(subject.place("speculators_model_type"), f"found {kind!r}, expected 'dflash'")


@check("C30")
def no_top_level_model_type(subject: Subject) -> Iterator[Problem]:
    """A speculators config has no top-level model_type (vLLM 0.33.0 transformers_utils/config.py)."""
    if subject.is_speculators and "model_type" in subject.config:
        yield Problem(
            subject.place("model_type"),
            f"{subject.config['model_type']!r} at the top level of a speculators config",
            effect="vLLM does not take the file for a speculators config",
            fix="delete the key; the body's model_type stays in transformer_layer_config",
        )


@check("C31")
def has_speculators_keys(subject: Subject) -> Iterator[Problem]:
    """The keys vLLM reads without a default are there (vLLM 0.33.0 configs/speculators/base.py, algos.py)."""
    if not subject.is_speculators:
        return
    for key in SPECULATORS_REQUIRED:
        if key not in subject.config:
            yield Problem(subject.place(key), "missing", effect="vLLM stops with a KeyError")
    outer = as_object(subject.config.get("speculators_config"))
    methods = outer.get("proposal_methods")
    if outer and not (isinstance(methods, list) and methods and "speculative_tokens" in as_object(methods[0])):
        yield Problem(
            subject.place("speculators_config.proposal_methods"),
            "states no speculative_tokens in its first entry",
            effect="vLLM cannot tell how many tokens to draft",
        )
    if outer and "name_or_path" not in as_object(outer.get("verifier")):
        yield Problem(subject.place("speculators_config.verifier"), "has no name_or_path")
    for key in ("draft_vocab_size", "block_size"):
        if key not in subject.config:
            yield Problem(subject.place(key), "missing", effect="readers fill in defaults that differ (32000, 8)")


@check("C32")
def states_its_sizes(subject: Subject) -> Iterator[Problem]:
    """Every size of the body is stated; a reader's class defaults are another model's."""
    if subject.is_speculators and not subject.body:
        yield Problem(subject.place(SPECULATORS_BODY), "missing or no object, expected the draft's decoder config")
        return
    for key in BODY_REQUIRED:
        if subject.body.get(key) is None:
            severity: Severity = "warning" if key in ("head_dim", "model_type") else "error"
            effect = "readers fill in the default of a config class"
            yield Problem(subject.body_place(key), "missing", effect=effect, severity=severity)


@check("C33", "warning")
def has_one_proposal_method(subject: Subject) -> Iterator[Problem]:
    """One proposal method, and the default names it (vLLM 0.33.0 reads the first only)."""
    outer = as_object(subject.config.get("speculators_config"))
    methods = outer.get("proposal_methods")
    if not isinstance(methods, list):
        return
    place = subject.place("speculators_config.proposal_methods")
    if len(methods) > 1:
        yield Problem(place, f"{len(methods)} entries", effect="vLLM uses the first and ignores the rest")
    names = [as_object(method).get("proposal_type") for method in methods]
    if outer.get("default_proposal_method") not in names:
        yield Problem(
            subject.place("speculators_config.default_proposal_method"),
            f"{outer.get('default_proposal_method')!r} is none of {names}",
            effect="speculators refuses the config",
        )


@check("C34")
def names_a_hub_verifier(subject: Subject) -> Iterator[Problem]:
    """The verifier is a hub repository (vLLM 0.33.0 transformers_utils/config.py refuses a path)."""
    if not subject.is_speculators:
        return
    name = as_object(as_object(subject.config.get("speculators_config")).get("verifier")).get("name_or_path")
    is_repository = isinstance(name, str) and name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if not is_repository:
        yield Problem(
            subject.place("speculators_config.verifier.name_or_path"),
            f"{name!r} is not a hub repository",
            effect="vLLM cannot serve the draft by its own name; naming the target with --model works",
            fix="convert again with --verifier ORG/REPO",
            severity=subject.severity_for("vllm"),
        )


@check("C36")
def architecture_is_known(subject: Subject) -> Iterator[Problem]:
    """Engines know the architecture by name (NVIDIA-NeMo/Automodel writes Qwen3DFlashDraftModel)."""
    if "Qwen3DFlashDraftModel" in named_architectures(subject.config):
        yield Problem(
            subject.place("architectures"),
            "Qwen3DFlashDraftModel is Automodel's own name",
            effect="vLLM has no model registered under it",
            fix="dflash convert SRC DST --to native writes DFlashDraftModel",
            severity=subject.severity_for("vllm"),
        )


@check("S09")
def sglang_reads_the_dialect(subject: Subject) -> Iterator[Problem]:
    """SGLang 0.5.23 reads the native dialect only."""
    if subject.is_speculators and subject.engine("sglang") is not None:
        yield Problem(
            subject.place("speculators_config"),
            "speculators dialect",
            effect="SGLang finds no num_hidden_layers at the top level and stops",
            fix="dflash convert SRC DST --to native --target REF",
        )
