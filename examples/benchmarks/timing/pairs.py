"""Pairs of real shapes with random weights, created on the device. Nothing is downloaded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dflash_kernels.suite import pick_kernels
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.setup.settings import rows_of_a_step
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.models.expert_stacks import stack_experts
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import TargetFamily
from dflash_runtime.models.target_loading import family_cuts
from dflash_runtime.models.target_shares import share_config
from dflash_runtime.models.weights import Weights, stack_projections
from dflash_runtime.ranks.rank_group import ALONE, Ranks
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.target_config import TargetConfig
from timing.arguments import run_dtype
from timing.shape_configs import family_of, model_configs
from timing.shapes import BLOCK, Shape

Tensors = Iterator[tuple[str, Tensor]]


@dataclass(frozen=True)
class RandomPair:
    """A pair, and its weights under the names that models read. `variants` has pairs of further arms.

    target_weights  gives the target's weights, which are read once more if they are in files
    """

    shape: Shape
    pair: LoadedPair
    target_weights: Callable[[], Weights]
    draft_weights: Weights
    variants: dict[str, LoadedPair] = field(default_factory=dict)


def log_uniform(levels: Tensor, shortest: int, longest: int) -> list[int]:
    """Log-uniform lengths from levels in [0, 1)."""
    return [round(shortest * (longest / shortest) ** level) for level in levels.tolist()]


def build_pair(shape: Shape, max_model_len: int, device: torch.device, ranks: Ranks = ALONE) -> RandomPair:
    """A random pair: bfloat16 and Triton on a GPU, float32 and reference kernels on the CPU.

    Of several ranks, each has its share of the weights that one rank would have.
    """
    dtype = run_dtype(device)
    kernels = pick_kernels("auto", device, dtype)
    placement = Placement(device, dtype, kernels, max_model_len + BLOCK, ranks=ranks)
    whole, draft_config = model_configs(shape)
    target_config, family = share_config(whole, ranks.size), family_of(shape)
    drawn, draft_own = drawn_weights(shape, placement)
    cuts = family_cuts(family, whole, ranks) if ranks.size > 1 else {}
    own = ((name, cuts[name].of(tensor).contiguous() if name in cuts else tensor) for name, tensor in drawn)
    target_weights = stacked_weights(family, target_config, own)
    draft_weights = stack_projections(draft_own)
    target = family(target_config, target_weights, placement)
    limits = Limits(
        num_draft_tokens=shape.block - 1, max_model_len=max_model_len, max_num_requests=1, vocab_size=shape.vocab,
        max_batched_tokens=rows_of_a_step(EngineConfig(), placement.kernels),
    )  # fmt: skip
    draft = DFlashDraft(draft_config, draft_weights, target, placement)
    pair = LoadedPair(target=target, draft=draft, placement=placement, limits=limits, config=EngineConfig())
    return RandomPair(shape, pair, lambda: target_weights, draft_weights)


def stacked_weights(family: TargetFamily, config: TargetConfig, tensors: Tensors) -> Weights:
    """A checkpoint's tensors as a native target of the family reads them."""
    arrange = getattr(family, "arrange", lambda _, tensor: tensor)
    arranged = ((name, arrange(name, tensor)) for name, tensor in tensors)
    return stack_projections(stack_experts(arranged, family.expected_shapes(config)))


def drawn_weights(shape: Shape, placement: Placement) -> tuple[Tensors, Tensors]:
    """Weights of target and draft under a checkpoint's names. Read the target's first: one generator draws both."""
    torch.manual_seed(0)
    target, draft = model_configs(shape)
    return (
        normal_weights(family_of(shape).expected_shapes(target), placement),
        normal_weights(owned_shapes(draft), placement),
    )


def random_prompt(shape: Shape, length: int, generator: torch.Generator) -> tuple[int, ...]:
    """Random ids from the middle of the vocabulary, without special tokens."""
    ids = torch.randint(shape.vocab // 100, shape.vocab * 98 // 100, (length,), generator=generator)
    return tuple(ids.tolist())


def normal_weights(shapes: Mapping[str, tuple[int, ...]], placement: Placement) -> Iterator[tuple[str, Tensor]]:
    """Random matrices, and norm weights of 1. Zeros would make products too fast."""
    for name, shape in shapes.items():
        if name.endswith(("_blocks", "_scales")):  # packed numbers, and exponents of about 2 ** -5
            low, high = (0, 256) if name.endswith("_blocks") else (120, 124)
            yield name, torch.randint(low, high, shape, device=placement.device, dtype=torch.uint8)
        elif len(shape) == 1:
            yield name, torch.ones(shape, device=placement.device, dtype=placement.dtype)
        else:
            yield name, torch.randn(shape, device=placement.device, dtype=placement.dtype) * 0.02
