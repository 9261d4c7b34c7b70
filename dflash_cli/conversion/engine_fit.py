"""What an engine would make of a draft that its file cannot help: what is taken out, refused or warned about.

Sources: vLLM 0.24.0 and 0.33.0 model_executor/models/qwen3_dflash.py and interfaces.py; SGLang 0.5.23
models/dflash.py, models/qwen3.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dflash_cli.conversion.tap_order import is_normal
from dflash_cli.formats.dialect import Format, Json
from dflash_runtime.config import DraftConfig
from dflash_runtime.errors import LossyConversion

ENGINES = frozenset({"vllm", "sglang"})
"""Formats that are written for one engine."""

PARTIAL_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Copied from multimodal targets by trainers whose drafts rotate every dimension; SGLang and vLLM would apply them."""


def suit_engine(config: DraftConfig, result: Format) -> DraftConfig:
    """The draft without the rope settings that only an engine would apply."""
    if result.name not in ENGINES:
        return config
    params = {key: value for key, value in config.rope.params.items() if key not in PARTIAL_ROPE}
    return replace(config, rope=replace(config.rope, params=params))


def suit_carried(carried: Mapping[str, Any], result: Format) -> Json:
    """The keys to carry along, without those that only an engine would apply."""
    dropped = PARTIAL_ROPE if result.name in ENGINES else ()
    return {key: value for key, value in carried.items() if key not in dropped}


def check_serving(config: DraftConfig, result: Format) -> None:
    """Refuse what every reader of the result would misread.

    Raises:
        LossyConversion: taps that its readers sort, or an activation they do not have.
    """
    if result.sorts_taps and not is_normal(config):
        raise LossyConversion(
            f"target_layer_ids {list(config.target_layer_ids)}: readers of {result.title} take the taps in ascending "
            f"order, once each, and would mix up the columns of fc.weight",
            hint="--normalise-taps puts them in order without changing the draft",
        )
    if result.name in ENGINES and config.hidden_act != "silu":
        raise LossyConversion(f"hidden_act {config.hidden_act!r}: {result.name} runs DFlash drafts with silu only")


def serving_warnings(config: DraftConfig, carried: Mapping[str, Any], result: Format) -> Iterator[str]:
    """What a user should know before serving the result."""
    if config.num_target_layers is not None and config.num_target_layers - 1 in config.target_layer_ids:
        yield (
            f"layer {config.num_target_layers - 1} is the target's last: it is kept; transformers gives its output "
            f"after the final norm, vLLM before it, and SGLang 0.5.23 not at all for Qwen2, Qwen3 and Llama targets"
        )
    if not result.sorts_taps and not is_normal(config):
        yield (
            f"target_layer_ids {list(config.target_layer_ids)} are not in ascending order, once each: engines would "
            f"mix up the columns of fc.weight; --normalise-taps puts them in order"
        )
    found = [key for key in PARTIAL_ROPE if key in carried or key in config.rope.params]
    if result.name in ENGINES and found:
        yield f"{', '.join(found)}: left out, since the draft rotates every dimension and {result.name} would not"
    if result.name == "vllm":
        yield from _vllm_warnings(config)
    if result.name == "mlx" and any(window is not None for window in config.windows):
        yield "bstnxbt/dflash-mlx ignores windows; z-lab's own MLX loader reads them"


def _vllm_warnings(config: DraftConfig) -> Iterator[str]:
    if any(window is not None for window in config.windows) or any(config.causal):
        yield "vLLM 0.24 reads neither windows nor causality, and would run every layer full and non-causal; use 0.33"
    if len(set(config.windows)) > 1:
        yield "layers with and without a window: vLLM 0.33 needs VLLM_USE_V2_MODEL_RUNNER=1"
