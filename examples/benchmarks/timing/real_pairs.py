"""Published pairs at their published sizes with random weights, created on the device. Nothing is downloaded.

A pair is written as configs and headers, and read as any checkpoint is. So its target runs in the way that `inspect`
states, and its draft has every part that its config states.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_cli.checkpoints.opening import Overrides, open_draft, open_target
from dflash_kernels.suite import pick_kernels
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, owned_shapes
from dflash_runtime.checkpoint.pair import TargetSource
from dflash_runtime.checkpoint.targets.runs_here import TargetRuntime
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.setup.settings import rows_of_a_step
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.draft import build_draft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.models.hosting.hosted import host_model
from dflash_runtime.models.hosting.hosted_attention import TRIAL, register_attention
from dflash_runtime.models.hosting.own_cache_trial import own_cache_target
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target, target_families
from dflash_runtime.models.target_loading import find_target_runtime
from dflash_runtime.models.text_part import causal_part, model_class
from dflash_runtime.models.weights import Weights, stack_projections
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.target_config import TargetConfig
from timing.arguments import run_dtype
from timing.pairs import RandomPair, normal_weights, stacked_weights
from timing.shapes import BLOCK, Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dflash_testing.published_pairs import PublishedPair

NOT_TARGET_SHAPE = ("rope", "ropes", "max_position_embeddings", "eos_token_ids", "dtype")
NOT_DRAFT_SHAPE = (
    "rope", "max_position_embeddings", "mask_token_id", "verifier", "dtype", "model_type", "has_target_scale",
    "rms_norm_eps",
)  # fmt: skip
"""Fields of configs without effect on the time of a step."""

OTHER_CONFIGS = ("vision_config", "audio_config")
"""Configs of parts that the text part of a model leaves out."""


@dataclass(frozen=True)
class RealPair:
    """A published pair in published sizes, as the runtime reads it. `name` has the revision of the draft."""

    name: str
    of: str
    kind: str
    runtime: TargetRuntime
    source: TargetSource
    target: TargetConfig
    draft: DraftConfig

    @cached_property
    def target_shape(self) -> str:
        """Equal for targets that run alike."""
        return json.dumps([self.runtime, _without(asdict(self.target), NOT_TARGET_SHAPE)], default=str)

    @cached_property
    def shape(self) -> str:
        """Equal for pairs with equal step times."""
        draft = _without(asdict(self.draft), NOT_DRAFT_SHAPE)
        draft["target_layer_ids"] = len(self.draft.target_layer_ids)
        return self.target_shape + json.dumps(draft, default=str)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights on a GPU."""
        return target_bytes(self) + 2 * sum(map(prod, owned_shapes(self.draft).values()))


def _without(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def read_pair(pair: "PublishedPair", name: str, folder: Path) -> RealPair:
    """Write a published pair to a folder, and read it. A draft that states no layout reads its blocks anchor first."""
    draft_path, target_path = pair.write(folder)
    draft = open_draft(draft_path)
    if draft.parsed.has_unknown_layout:
        draft = open_draft(draft_path, overrides=Overrides(layout="anchor-first"))
    source = open_target(target_path)
    runtime, target = find_target_runtime(source, "auto")
    title = draft.format.title.partition(",")[0].removesuffix(" variant")
    return RealPair(name, pair.of, title, runtime, source, target, draft.config)


def target_bytes(pair: RealPair) -> int:
    """Bytes of the target's weights on a GPU. Packed tensors have a byte per element, others are bfloat16."""
    if pair.runtime != "native":
        with torch.device("meta"):
            model = make_model(pair.source, torch.bfloat16)
        return sum(item.numel() * item.element_size() for item in model.parameters())
    shapes = target_families()[pair.target.model_type].expected_shapes(pair.target)
    return sum(prod(shape) * (1 if name.endswith(("_blocks", "_scales")) else 2) for name, shape in shapes.items())


def place(device: torch.device, max_model_len: int) -> Placement:
    """Bfloat16 and Triton on a GPU, float32 and reference kernels on the CPU."""
    dtype = run_dtype(device)
    return Placement(device, dtype, pick_kernels("auto", device, dtype), max_model_len + BLOCK)


def make_target(pair: RealPair, placement: Placement) -> Target:
    """The target with random weights, in the way that it runs."""
    torch.manual_seed(0)
    if pair.runtime == "native":
        family = target_families()[pair.target.model_type]
        drawn = normal_weights(family.expected_shapes(pair.target), placement)
        return family(pair.target, stacked_weights(family, pair.target, drawn), placement)
    with placement.device:
        model = make_model(pair.source, placement.dtype)
    model.requires_grad_(requires_grad=False)
    if pair.runtime == "transformers":
        return host_model(model, pair.target, placement)
    model.set_attn_implementation("eager")
    return own_cache_target(model, pair.target, placement)


def make_model(source: TargetSource, dtype: torch.dtype) -> "PreTrainedModel":
    """A random model of transformers' class, without its parts for images and audio, on torch's default device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    settings = AutoConfig.from_pretrained(source.checkpoint.path, trust_remote_code=False, local_files_only=True)
    for name in OTHER_CONFIGS:  # stand-ins have widths that no model has
        other = getattr(settings, name, None)
        if other is not None:
            setattr(settings, name, type(other)())
    made: Any = model_class(settings)
    make = AutoModelForCausalLM.from_config if made is None else made._from_config
    model: PreTrainedModel = make(settings, dtype=dtype, attn_implementation=TRIAL)
    return causal_part(model.eval())


def join(pair: RealPair, target: Target, placement: Placement) -> RandomPair:
    """The pair of a target and a random draft of this shape."""
    draft_weights = draft_weights_of(pair.draft, placement)
    draft = build_draft(pair.draft, draft_weights, target, placement)
    limits = Limits(
        num_draft_tokens=pair.draft.num_draft_tokens, max_model_len=placement.num_positions - BLOCK,
        max_num_requests=1, vocab_size=pair.target.vocab_size,
        max_batched_tokens=rows_of_a_step(EngineConfig(), placement.kernels),
    )  # fmt: skip
    loaded = LoadedPair(target=target, draft=draft, placement=placement, limits=limits, config=EngineConfig())
    return RandomPair(shape_of(pair), loaded, _no_weights, draft_weights)


def draft_weights_of(config: DraftConfig, placement: Placement) -> Weights:
    """Random weights of a draft. The ids of a reduced vocabulary are the first ones of the target."""
    shapes = dict(owned_shapes(config))
    ids = shapes.pop(DRAFT_TO_TARGET, None)
    weights: dict[str, Tensor] = dict(normal_weights(shapes, placement))
    if ids is not None:
        weights[DRAFT_TO_TARGET] = torch.zeros(ids, dtype=torch.int64, device=placement.device)
    return stack_projections(weights.items())


def shape_of(pair: RealPair) -> Shape:
    """The sizes that benchmarks read, without the target's experts and recurrent layers."""
    target, draft = pair.target, pair.draft
    return Shape(
        target.hidden_size, target.intermediate_size, target.num_layers, target.num_heads, draft.target_layer_ids,
        is_tied=target.tie_word_embeddings, vocab=target.vocab_size, kv_heads=target.num_kv_heads,
        head_dim=target.head_dim, draft_layers=draft.num_layers, positions=target.max_position_embeddings,
        draft_heads=(draft.num_heads, draft.num_kv_heads, draft.head_dim), block=draft.block_size,
    )  # fmt: skip


def _no_weights() -> Mapping[str, Tensor]:
    raise NotImplementedError("weights of published targets are not kept")
