"""DFlash drafts with the parts of DFlash 2 or DSpark added by a seed, for the recorders of traces and for the tests.

With identity convolutions and codebooks of zeros a lifted draft is the DFlash draft it was made from. Imports nothing
of this project, so that it also runs where z-lab's package is installed.
"""

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NUM_CASES = 330


@dataclass(frozen=True)
class Lift:
    """What is added to a draft. `noise` 0 adds identities."""

    seed: int
    noise: float
    kernel_size: int
    group_size: int
    rank: int
    top_k: int
    block_size: int
    is_windowed: bool = False
    changes: dict[str, float] = field(default_factory=dict)


def cases() -> list[Lift]:
    """All recorded lifts, the identities first."""
    found = [Lift(0, 0.0, taps, 16, 8, 4, block) for taps, block in ((1, 8), (2, 8), (3, 8), (2, 5))]
    chance = random.Random(2)
    while len(found) < NUM_CASES:
        changes = {}
        if chance.random() < 0.25:
            changes["input_embedding_scale"] = chance.choice((0.7, 1.3))
        if chance.random() < 0.25:
            changes["output_multiplier"] = chance.choice((0.5, 2.0))
        if chance.random() < 0.25:
            changes["final_logit_softcapping"] = chance.choice((8.0, 30.0))
        found.append(
            Lift(
                seed=len(found),
                noise=chance.choice((0.02, 0.1, 0.3)),
                kernel_size=chance.choice((1, 2, 2, 3)),  # z-lab stops at 4 taps on the last, shortened block
                group_size=chance.choice((1, 8, 16, 48, 192)),
                rank=chance.choice((1, 7, 16, 33)),
                top_k=chance.choice((1, 2, 5, 16)),
                block_size=chance.choice((2, 3, 5, 8, 8, 8, 12)),
                is_windowed=chance.random() < 0.3,
                changes=changes,
            )
        )
    return found


def lift(config: dict[str, Any], tensors: dict[str, Tensor], case: Lift) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the float32 tensors of a native DFlash 2 draft, made from a DFlash draft."""
    generator = torch.Generator().manual_seed(case.seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * case.noise

    config, tensors = copy.deepcopy(config), {name: tensor.float() for name, tensor in tensors.items()}
    hidden, taps, groups = config["hidden_size"], case.kernel_size, config["hidden_size"] // case.group_size
    for layer in range(config["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            base = noise(2, taps, hidden)
            base[:, 0] += 1
            tensors[f"layers.{layer}.{name}.base_kernel"] = base
            projection = noise(2 * taps * groups, hidden) / 4
            tensors[f"layers.{layer}.{name}.kernel_projection.weight"] = projection
    for name in ("predecessor", "successor"):
        tensors[f"candidate_selector.{name}_codebook"] = noise(config["vocab_size"], case.rank) * 4
    tensors["candidate_selector.hidden_projection.weight"] = noise(case.rank, hidden)
    nested = {
        "conv_kernel_size": taps, "conv_group_size": case.group_size, "selector_rank": case.rank,
        "selector_top_k": case.top_k, "block_size": case.block_size,
    }  # fmt: skip
    config["dflash_config"] |= nested | case.changes
    config |= {"architectures": ["DFlash2DraftModel"], "block_size": case.block_size, "is_causal": False}
    config["dflash_config"].pop("causal", None)
    if case.is_windowed:
        layer_types = ["sliding_attention"] * config["num_hidden_layers"]
        config |= {"use_sliding_window": True, "sliding_window": 24, "layer_types": layer_types}
    return config, tensors


NUM_SPARKS = 120


@dataclass(frozen=True)
class Spark:
    """A Markov head that is added to a draft. `noise` 0 adds a bias of zero."""

    seed: int
    noise: float
    head_type: str
    rank: int
    block_size: int
    samples_from_anchor: bool
    top_k: int | None

    @property
    def num_drafts(self) -> int:
        return self.block_size if self.samples_from_anchor else self.block_size - 1

    @property
    def confidence_reads_token(self) -> bool:
        return self.seed % 3 > 0


def sparks() -> list[Spark]:
    """All recorded heads, those without a bias first."""
    found = [Spark(0, 0.0, "vanilla", 8, 8, False, None), Spark(1, 0.0, "rnn", 8, 8, True, None)]
    chance = random.Random(3)
    while len(found) < NUM_SPARKS:
        found.append(
            Spark(
                seed=len(found),
                noise=chance.choice((0.3, 1.0, 2.0)),
                head_type=chance.choice(("vanilla", "gated", "rnn")),
                rank=chance.choice((1, 7, 32)),
                block_size=chance.choice((2, 3, 7, 8, 8)),
                samples_from_anchor=chance.random() < 0.4,
                top_k=chance.choice((None, None, 5)),
            )
        )
    return found


def markov_tensors(case: Spark, hidden: int, vocab_size: int) -> dict[str, Tensor]:
    """The tensors of a Markov head, by the names of speculators' class."""
    generator = torch.Generator().manual_seed(case.seed)
    rank, pair = case.rank, (vocab_size, case.rank)
    shapes: dict[str, tuple[int, ...]] = {"markov_w1.weight": pair, "markov_w2.weight": pair}
    if case.head_type == "gated":
        shapes |= {"gate_proj.weight": (rank, hidden + rank), "gate_proj.bias": (rank,)}
    if case.head_type == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + hidden), "joint_proj.bias": (3 * rank,)}
    found = {name: torch.randn(shape, generator=generator) / 4 for name, shape in shapes.items()}
    found["markov_w2.weight"] *= 4 * case.noise
    found["markov_w1.weight"] *= 4 / rank**0.5
    return found


def confidence_tensors(case: Spark, hidden: int) -> dict[str, Tensor]:
    """The tensors of a confidence head, by the names of speculators' class."""
    generator = torch.Generator().manual_seed(1000 + case.seed)
    width = hidden + (case.rank if case.confidence_reads_token else 0)
    weight = torch.randn((1, width), generator=generator) / hidden**0.5
    return {"proj.weight": weight, "proj.bias": torch.randn((1,), generator=generator)}
