"""Random packed experts, and the parts that kernels should give for them."""

import torch
from torch import Tensor

from dflash_kernels.mixtures.mxfp4 import Packed, arrange_numbers, arrange_scales, pack, unpack
from dflash_kernels.products.activation import Gate, gate_ref
from dflash_testing.tensors import DEVICE


def stored(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a weight [..., N, K], as files have them."""
    generator = torch.Generator().manual_seed(seed)
    *stack, width = shape
    blocks = torch.randint(256, (*stack, width // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, (*stack, width // 32), generator=generator, dtype=torch.uint8)
    return blocks.to(DEVICE), scales.to(DEVICE)


def packed(*shape: int, seed: int = 0) -> Packed:
    return pack_stored(*stored(*shape, seed=seed))


def pack_stored(blocks: Tensor, scales: Tensor) -> Packed:
    return pack(arrange_numbers(blocks), arrange_scales(scales), 32 * scales.shape[-1])


def expected_parts(
    hidden: Tensor,
    gate_up: Packed,
    down: Packed,
    chosen: Tensor,
    scores: Tensor,
    gate: Gate,
    biases: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return the parts of `experts` by products in float64 of unpacked weights, with the roundings of the model."""
    first, second = (unpack(weight, torch.float64) for weight in (gate_up, down))
    wanted = torch.full((chosen.shape[1], *hidden.shape), torch.nan, dtype=hidden.dtype, device=hidden.device)
    for place, part in enumerate(wanted):
        for expert in range(len(second)):
            is_its = chosen[:, place] == expert
            added = (0, 0) if biases is None else (biases[0][expert].double(), biases[1][expert].double())
            inner = gate_ref((hidden[is_its].double() @ first[expert].T + added[0]).to(hidden.dtype), gate).double()
            output = (inner @ second[expert].T + added[1]).to(hidden.dtype).double()
            part[is_its] = (output * scores[is_its, place, None].double()).to(hidden.dtype)
    return wanted
