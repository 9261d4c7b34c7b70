"""Pairs with weights or KV in FP8, made from the random weights of a pair in the dtype of the run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from dflash_kernels.fp8.fp8_weight import FP8, to_fp8
from dflash_runtime.checkpoint.layout import HEAD
from dflash_runtime.device.setup.loading import LoadedPair
from timing.pairs import RandomPair
from timing.shape_configs import family_of

FP8_BLOCK = (128, 128)
"""Rows and columns with one scale, as in Qwen3-8B-FP8."""

WHOLE_DRAFT = re.compile(r".*_proj\.weight|fc\.weight|lm_head\.weight")
DRAFT_PART = re.compile(r".*(o|gate_up|down)_proj\.weight|fc\.weight")
TARGET_PART = re.compile(r".*layers\.\d+\..*_proj\.weight")

FP8_ARMS: Mapping[str, tuple[re.Pattern[str] | None, re.Pattern[str] | None]] = {
    "plain-fp8": (TARGET_PART, None),
    "dflash-fp8": (TARGET_PART, None),
    "dflash-fp8-draft": (None, DRAFT_PART),
    "dflash-fp8-draft-all": (None, WHOLE_DRAFT),
    "dflash-fp8-both": (TARGET_PART, DRAFT_PART),
    "plain-kv-fp8": (None, None),
    "dflash-kv-fp8": (None, None),
}
"""Arm -> the weights of the target and of the draft in FP8."""

FP8_KV = "-kv-fp8"
"""End of the names of arms with KV in FP8."""


def fp8_pairs(random: RandomPair, arms: Sequence[str]) -> dict[str, LoadedPair]:
    """Return the pairs of the named arms. Arms share weights."""
    pair, made, found = random.pair, {}, {}
    assert pair.draft is not None
    for arm in (arm for arm in arms if arm in FP8_ARMS):
        in_target, in_draft = FP8_ARMS[arm]
        if in_target is not None and "target" not in made:
            weights = in_fp8(random.target_weights(), in_target)
            made["target"] = family_of(random.shape)(pair.target.config, weights, pair.placement)
        drafted = random.draft_weights
        if in_draft is WHOLE_DRAFT:
            drafted = {**drafted, HEAD: pair.target.head.plain}
        changed = replace(pair, target=made.get("target", pair.target) if in_target is not None else pair.target)
        drafted = drafted if in_draft is None else in_fp8(drafted, in_draft)
        if arm.endswith(FP8_KV):
            changed = replace(changed, placement=replace(pair.placement, kv_dtype=FP8))
        found[arm] = replace(changed, draft_weights=drafted).with_draft(pair.draft.config)
    return found


def in_fp8(weights: Mapping[str, Tensor], chosen: re.Pattern[str]) -> dict[str, Tensor]:
    """Return weights with the chosen matrices in FP8."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if chosen.fullmatch(name) and tensor.dim() == 2:
            found |= to_fp8(tensor, FP8_BLOCK).tensors(name.removesuffix(".weight"))
        else:
            found[name] = tensor
    return found
