"""The settings of DFlash 2 and DSpark that each release of vLLM reads, and the tensors that they give its modules.

Source: the code of each release from 0.25.0 to 0.33.0, in model_executor/models/qwen3_dflash2.py and qwen3_dspark.py,
config/speculative.py and v1/worker/gpu/spec_decode/; run on the configs of tests/golden/family_verdicts.json.
"""

from collections.abc import Mapping
from typing import Any

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.engine_reading import real
from dflash_cli.engines.family_reading import check_top_k, markov_parts, read_selector, selector_parts
from dflash_cli.engines.serving_engine import Release
from dflash_cli.rules.subject import WEIGHTS, Subject
from dflash_runtime.checkpoint.layout import MARKOV
from dflash_runtime.json_values import is_int

HAS_CONFIDENCE: Release = (0, 28)
"""The first release with a confidence head and with dspark_draft_topk. Earlier releases pass over its tensors."""

Settings = tuple[dict[str, Any], dict[str, Any]]
"""The settings by their keys, and the fields of a `DraftConfig` for `check_shapes`."""


def no_settings(
    config: Mapping[str, Any], found: Mapping[str, Any], nested: Mapping[str, Any], release: Release
) -> Settings:
    """Empty settings of DFlash. Its logits have a scale, as DSpark's have."""
    check_scale(config.get("logit_scale", 1.0))
    return {}, {}


def dflash2_settings(
    config: Mapping[str, Any], found: Mapping[str, Any], nested: Mapping[str, Any], release: Release
) -> Settings:
    """The settings of DFlash 2, which vLLM reads in `dflash_config` only. `read_model` explains the arguments.

    Raises:
        EngineStops: the key at which the release stops.
    """
    own = read_selector(nested, "dflash_config.")
    multiplier = real("dflash_config.output_multiplier", nested.get("output_multiplier", 1.0))
    if multiplier <= 0:  # layers/logits_processor.py get_top_k_tokens
        raise EngineStops("dflash_config.output_multiplier", f"found {multiplier}, expected a positive number")
    scale = real("dflash_config.input_embedding_scale", nested.get("input_embedding_scale", 1.0))
    return {**own, "input_embedding_scale": scale}, selector_parts(own, found)


def dspark_settings(
    config: Mapping[str, Any], found: Mapping[str, Any], nested: Mapping[str, Any], release: Release
) -> Settings:
    """The settings of DSpark, which vLLM reads at the top level only, with a vanilla head whatever the file states.

    Raises:
        EngineStops: the key at which the release stops.
    """
    rank = config.get("markov_rank")
    if not is_int(rank) or rank < 0:
        raise EngineStops("markov_rank", f"found {rank!r} at the top level, expected an integer")
    check_scale(config.get("logit_scale", 1.0))
    num_tokens = found.get("draft_vocab_size") or found["vocab_size"]
    parts = markov_parts(rank, "vanilla", found, num_tokens)
    own: dict[str, Any] = {"markov_rank": rank, "markov_head_type": "vanilla", "dspark_draft_topk": None}
    if release < HAS_CONFIDENCE:
        return own, parts
    own["dspark_draft_topk"] = config.get("dspark_draft_topk")
    check_top_k(own["dspark_draft_topk"], num_tokens)
    return own, {
        **parts,
        "has_confidence": bool(config.get("enable_confidence_head", False)),
        "confidence_reads_token": bool(config.get("confidence_head_with_markov", False)),
    }


def check_scale(scale: Any) -> None:
    """Require a number, by which the first step multiplies.

    Raises:
        EngineStops: `scale` is not a number.
    """
    if not isinstance(scale, int | float):
        raise EngineStops("logit_scale", f"found {scale!r}, expected a number")


def check_head(subject: Subject) -> None:
    """Require a Markov head of the two matrices that vLLM's model has.

    Raises:
        EngineStops: the file has another tensor of a head.
    """
    for name in subject.tensors or ():
        if name.startswith(f"{MARKOV}.") and not name.startswith((f"{MARKOV}.markov_w1.", f"{MARKOV}.markov_w2.")):
            raise EngineStops(f"{WEIGHTS}:{name}", "vLLM has the vanilla Markov head only")


READERS = {"dflash2": dflash2_settings, "dspark": dspark_settings}
"""Family -> the function that reads its settings."""


def settings_of(
    family: str, config: Mapping[str, Any], found: Mapping[str, Any], nested: Mapping[str, Any], release: Release
) -> Settings:
    """The settings of a family. `read_model` explains the other arguments.

    Raises:
        EngineStops: the key at which the release stops.
    """
    return READERS.get(family, no_settings)(config, found, nested, release)
