"""Read the config of a gpt-oss target. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_runtime.checkpoint.targets.hf_config import common_facts, foreign_parts, not_run, read_body, read_windows
from dflash_runtime.checkpoint.targets.target_facts import decoder_config
from dflash_runtime.errors import MISSING, InvalidConfig
from dflash_runtime.target_config import ClampedGate, ExpertsConfig, TargetConfig

USUAL: Mapping[str, Any] = {"attention_bias": True, "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Values of absent keys, on which readers agree. Source: transformers' GptOssConfig."""


def read_gpt_oss_config(config: Mapping[str, Any], path: Path) -> TargetConfig:
    """Read a gpt-oss target: sliding and full layers with sinks, and experts in every layer.

    Raises:
        UnsupportedError: the target has parts that this runtime does not compute.
        InvalidConfig: a key is missing or wrong.
    """
    stated, _ = decoder_config(config, path)
    text = {**USUAL, **{key: value for key, value in stated.items() if value is not None}}
    facts = common_facts(config, text, path)
    foreign = foreign_parts(config, text, path, known=("experts",))
    if foreign:
        raise not_run(facts["model_type"], *foreign, path=path)
    if "layer_types" not in text:  # transformers would alternate, and other readers would not slide at all
        raise InvalidConfig("layer_types", MISSING, "the kind of each layer", path=path)
    body = read_body(text, path)
    experts = ExpertsConfig(
        num_experts=text.get("num_local_experts", MISSING),
        num_chosen=text.get("num_experts_per_tok", MISSING),
        intermediate_size=body["intermediate_size"],
        has_normalised_scores=True,
        layers=tuple(range(body["num_layers"])),
        clamp=ClampedGate(alpha=text["swiglu_alpha"], limit=text["swiglu_limit"]),
    )
    windows = read_windows(text, body["num_layers"], path)
    return TargetConfig(**{**facts, **body, "windows": windows, "experts": experts, "has_sinks": True})
