"""The trained hybrid pair of `tests/data/pairs/hybrid`, and random hybrid targets.

Only the states of the trained target carry the values that it repeats.
"""

import json
from functools import cache
from typing import Any

import torch

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.drafts.draft import Draft, load_draft
from dflash_runtime.llm import LLM
from dflash_runtime.models.families.qwen3_5 import Qwen35Target
from dflash_runtime.models.target import Target
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.target_config import RecurrenceConfig, TargetConfig
from dflash_testing.pairs import placement, random_llm, random_weights
from dflash_testing.paths import ROOT

HYBRID_PAIR = ROOT / "tests" / "data" / "pairs" / "hybrid"


@cache
def hybrid_target(dtype: torch.dtype = torch.float32) -> Target:
    """The native target on the CPU."""
    return load_target(open_target(HYBRID_PAIR / "target"), placement(dtype))


def hybrid_draft(dtype: torch.dtype = torch.float32) -> Draft:
    """The draft, bound to `hybrid_target`."""
    return load_draft(open_draft(HYBRID_PAIR / "draft").source, hybrid_target(dtype), placement(dtype))


def random_hybrid_target(dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> Qwen35Target:
    """A small target with random weights, one layer of attention, and states that last for tens of tokens."""
    values: dict[str, Any] = {
        "model_type": "qwen3_5_text", "hidden_size": 32, "intermediate_size": 48, "num_layers": 3, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 256,
        "rope": RopeConfig(theta=10_000.0), "vocab_size": 97, "rotary_dim": 4,
        "recurrence": RecurrenceConfig(
            layers=(0, 2), num_key_heads=2, num_value_heads=4, key_size=8, value_size=12, num_taps=4
        ),
    }  # fmt: skip
    values |= changes
    config = TargetConfig(**{"windows": (None,) * values["num_layers"]} | values)
    weights = random_weights(Qwen35Target.expected_shapes(config), dtype, seed, 0.2)
    weights |= {name: item - 4.0 for name, item in weights.items() if name.endswith("A_log")}
    return Qwen35Target(config, stack_projections(weights.items()), placement(dtype))


@cache
def hybrid_prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of the pair's prompts."""
    lines = (HYBRID_PAIR / "prompts.jsonl").read_text().splitlines()
    return tuple(tuple(json.loads(line)["prompt_token_ids"]) for line in lines)


def hybrid_llm(num_draft_tokens: int = 7, dtype: torch.dtype = torch.float32, **engine: Any) -> LLM:
    """The pair on the CPU, on a synchronous engine unless asked otherwise. Without draft tokens it decodes plainly."""
    draft = hybrid_draft(dtype) if num_draft_tokens else None
    return random_llm(hybrid_target(dtype), draft, num_draft_tokens, **{"max_num_requests": 1} | engine)
