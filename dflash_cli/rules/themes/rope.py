"""Rules on rotary embeddings."""

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_cli.formats.decoder_body import ROPE_KEYS, ROPE_KINDS
from dflash_cli.rules.rule import FIX_REEXPORT, FIX_RUN_LEVEL, Problem, check
from dflash_cli.rules.shapes import different
from dflash_cli.rules.subject import Subject
from dflash_runtime.checkpoint.targets.rope_fields import rope_parameters
from dflash_runtime.json_values import as_object, is_number

NEEDED_BY_ROPE: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Rope type -> the parameters that it needs. For a missing original length readers take max_position_embeddings."""


@check(
    "C22",
    effect="vLLM assumes 1000000, SGLang and transformers assume 10000",
    fix=f"write the rope_theta used in training; if it is unknown, try the target's: {FIX_RUN_LEVEL}",
    source="vLLM 0.33.0 qwen3_dflash.py; transformers modeling_rope_utils.py",
    outcome="drops",
)
def rope_theta_is_stated(subject: Subject) -> Iterator[Problem]:
    """The rope base, rope_theta, is stated.

    Without it readers assume 10,000 or 1,000,000.
    """
    thetas = _values(subject, "rope_theta")
    if not thetas and "rope" not in subject.format.unstated:
        yield Problem(subject.body_at("rope_theta"), "missing")
    for location, value in thetas.items():
        if not is_number(value) or value <= 0:
            yield Problem(location, f"found {value!r}, expected a positive number")


@check(
    "C23",
    effect="vLLM stops; other readers use one of the two values",
    fix=f"correct or delete the wrong value, then test the other: {FIX_RUN_LEVEL}",
    source="vLLM 0.33.0 transformers_utils/config.py; Luce-Org/lucebox#447",
)
def rope_is_stated_once(subject: Subject) -> Iterator[Problem]:
    """Every key of a rope setting has the same value."""
    thetas = _values(subject, "rope_theta")
    kinds = {**_values(subject, "rope_type"), **_values(subject, "type")}
    parts = [part for key in ROPE_KEYS for part in rope_parameters(as_object(subject.stated.body.get(key)))]
    others = {name: _values(subject, name) for name in dict.fromkeys(parts)}
    for name, values in {"rope_theta": thetas, "rope_type": kinds, **others}.items():
        contradiction = different({location.partition(":")[2]: value for location, value in values.items()})
        if contradiction is not None:
            yield Problem(subject.body_at(name), contradiction)


@check(
    "C24",
    effect="transformers' config class stops with a KeyError, or readers assume the original length",
    fix="write the value used in training, then check it: dflash validate {draft}",
    source="transformers modeling_rope_utils.py; Avarok/atlas#78",
)
def rope_is_complete(subject: Subject) -> Iterator[Problem]:
    """A rope type other than default states every parameter that it needs, as YaRN its factor and original length."""
    for key in ROPE_KEYS:
        rope = as_object(subject.stated.body.get(key))
        kind = rope.get("rope_type", rope.get("type"))
        for field in NEEDED_BY_ROPE.get(kind, ()) if isinstance(kind, str) else ():
            value = rope.get(field)
            if not is_number(value) and not (isinstance(value, list) and value):
                yield Problem(subject.body_at(f"{key}.{field}"), f"missing for rope type {kind}")


@check(
    "C46",
    "warning",
    effect="positions are stretched without need, so fewer drafted tokens are accepted",
    fix="write original_max_position_embeddings as in training, then check it: dflash validate {draft}",
    source="transformers modeling_rope_utils.py; Avarok/atlas#78",
)
def yarn_stretches(subject: Subject) -> Iterator[Problem]:
    """YaRN's original length is at most the draft's max_position_embeddings."""
    limit = subject.stated.body.get("max_position_embeddings")
    for location, value in _values(subject, "original_max_position_embeddings").items():
        if is_number(value) and is_number(limit) and value > limit:
            yield Problem(location, f"found {value}, expected at most max_position_embeddings {limit}")


@check(
    "C26",
    "warning",
    effect="SGLang applies the setting, the reference code does not",
    fix="if training did not use it, remove it: dflash convert {draft} {out} --to sglang # or --to vllm",
    source="SGLang 0.5.23 models/dflash.py; z-lab/dflash#170",
    outcome="drops",
)
def rope_is_whole(subject: Subject) -> Iterator[Problem]:
    """The config does not ask for partial or multimodal rope, which only some readers apply."""
    for key in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        for location, value in _values(subject, key).items():
            if value not in (1, 1.0, False):
                yield Problem(location, f"found {value!r}, expected no such key")


@check(
    "C40",
    effect="readers stop at a type they do not know, or apply plain rope",
    fix=FIX_REEXPORT,
    source="transformers modeling_rope_utils.py ROPE_INIT_FUNCTIONS",
)
def rope_kind_is_known(subject: Subject) -> Iterator[Problem]:
    """transformers defines the rope type."""
    for key in ("rope_type", "type"):
        for location, value in _values(subject, key).items():
            if not isinstance(value, str) or value not in ROPE_KINDS:
                yield Problem(location, f"found {value!r}, expected one of {', '.join(sorted(ROPE_KINDS))}")


@check(
    "S06",
    effect="vLLM refuses layers with different rope; speculators uses the rope of the sliding layers for all",
    fix="train or export the draft with one rope, then check it: dflash validate {draft}",
    source="vLLM 0.33.0 qwen3_dflash.py; speculators 0.9.0 models/utils.py",
)
def rope_is_one_for_all_layers(subject: Subject) -> Iterator[Problem]:
    """Rope settings are the same for every layer type."""
    for key in ROPE_KEYS:
        parts = [item for item in as_object(subject.stated.body.get(key)).values() if isinstance(item, dict)]
        if parts and any(item != parts[0] for item in parts):
            yield Problem(
                subject.body_at(key),
                f"{len(parts)} layer types with different values",
            )


def _values(subject: Subject, key: str) -> dict[str, Any]:
    """Location -> value of a rope key, among the decoder keys and in the two rope objects."""
    found = {}
    if subject.stated.body.get(key) is not None and key != "type":
        found[subject.body_at(key)] = subject.stated.body[key]
    for container in ROPE_KEYS:
        rope = as_object(subject.stated.body.get(container))
        if rope.get(key) is not None:
            found[subject.body_at(f"{container}.{key}")] = rope[key]
    return found
