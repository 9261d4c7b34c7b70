"""Small drafts of DFlash 2 and DSpark in the native and the speculators dialect, written without the code under test.

`FAMILIES` has a config and the shapes of the family's tensors for each family and dialect.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash_testing import checkpoints as support
from dflash_testing.checkpoints import REMOVED, SMALL, Arrays, Json, Shape, Shapes

CONVOLVED: Json = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 4}
MARKOV: Json = {
    "markov_rank": 3, "markov_head_type": "vanilla", "enable_confidence_head": True,
    "confidence_head_with_markov": True, "sample_from_anchor": True,
}  # fmt: skip


def dflash2_native(shape: Shape = SMALL, **changes: Any) -> Json:
    """A native DFlash 2 config with its settings nested, as z-lab publishes it. `changes` replace nested keys."""
    config = support.native_config(shape, architectures=["DFlash2DraftModel"])
    nested = {**config["dflash_config"], **CONVOLVED, "block_size": shape.block, **changes}
    return {**config, "dflash_config": {key: value for key, value in nested.items() if value is not REMOVED}}


def dflash2_speculators(shape: Shape = SMALL, **changes: Any) -> Json:
    """A speculators DFlash 2 config as release 0.9 writes it. `changes` replace top-level keys."""
    own = {"architectures": ["DFlash2DraftModel"], "speculators_model_type": "dflash2", **CONVOLVED}
    return support.speculators_config(shape, **{**own, **changes})


def dspark_native(shape: Shape = SMALL, **changes: Any) -> Json:
    """A native DSpark config with flat keys, as deepseek-ai publishes it. `changes` replace top-level keys."""
    return support.native_config(shape, **{"architectures": ["Qwen3DSparkModel"], **MARKOV, **changes})


def dspark_speculators(shape: Shape = SMALL, **changes: Any) -> Json:
    """A speculators DSpark config as release 0.9 writes it. `changes` replace top-level keys."""
    own = {"architectures": ["DSparkDraftModel"], "speculators_model_type": "dspark", **MARKOV, **changes}
    config = support.speculators_config(shape, **own)
    number = shape.block - (config.get("sample_from_anchor") is not True)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = number
    return config


FAMILIES: Mapping[str, Callable[..., Json]] = {
    "dflash2": dflash2_native,
    "dflash2-speculators": dflash2_speculators,
    "dspark": dspark_native,
    "dspark-speculators": dspark_speculators,
}
"""Name of a dialect -> its config."""


def own_shapes(config: Json, shape: Shape = SMALL) -> Shapes:
    """The tensors of a draft beyond DFlash's, by the keys of its config."""
    stated = {**config.get("dflash_config", {}), **config}
    hidden, vocab = shape.hidden, shape.vocab
    if "selector_rank" in stated:
        taps, groups = stated["conv_kernel_size"], hidden // stated["conv_group_size"]
        convolution = {"base_kernel": (2, taps, hidden), "kernel_projection.weight": (2 * taps * groups, hidden)}
        layers = [f"layers.{layer}.{name}" for layer in range(shape.layers) for name in ("attention_conv", "mlp_conv")]
        found: Shapes = {f"{layer}.{name}": size for layer in layers for name, size in convolution.items()}
        rank = stated["selector_rank"]
        codebooks = {f"candidate_selector.{side}_codebook": (vocab, rank) for side in ("predecessor", "successor")}
        return {**found, **codebooks, "candidate_selector.hidden_projection.weight": (rank, hidden)}
    rank, kind = stated["markov_rank"], stated.get("markov_head_type")
    found = {"markov_w1.weight": (vocab, rank), "markov_w2.weight": (shape.draft_vocab, rank)} if rank else {}
    if rank and kind == "gated":
        found |= {"gate_proj.weight": (rank, hidden + rank), "gate_proj.bias": (rank,)}
    if rank and kind == "rnn":
        found |= {"joint_proj.weight": (3 * rank, 2 * rank + hidden), "joint_proj.bias": (3 * rank,)}
    found = {f"markov_head.{name}": size for name, size in found.items()}
    if stated.get("enable_confidence_head"):
        width = hidden + (rank if stated.get("confidence_head_with_markov") else 0)
        found |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return found


def is_of_family(config: Json) -> bool:
    """Whether a config has settings of DFlash 2 or DSpark."""
    return bool({"selector_rank", "markov_rank"} & {**config.get("dflash_config", {}), **config}.keys())


def arrays(config: Json, shape: Shape = SMALL) -> Arrays:
    """Values of all tensors of a draft."""
    reduced = support.reduced_arrays(shape, support.target_arrays(shape)) if shape.draft_vocab < shape.vocab else {}
    own = support.random_arrays(own_shapes(config, shape), seed=3)
    return {**support.body_arrays(replace(shape, draft_vocab=shape.vocab)), **own, **reduced}


def write_draft(path: Path, config: Json, shape: Shape = SMALL) -> Path:
    """A draft on disk."""
    return support.write_checkpoint(path, config, arrays(config, shape))
