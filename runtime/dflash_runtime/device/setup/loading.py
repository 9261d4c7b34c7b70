"""Load a pair onto a device. Device, kernels, limits and features are chosen first, once for all its engines."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from dflash_kernels.kv.kv_format import KVScales
from dflash_kernels.suite import Kernels
from dflash_runtime.checkpoint.draft_tensors import owned_tensors
from dflash_runtime.checkpoint.pair import DraftLike, TargetSource, check_pair
from dflash_runtime.checkpoint.quantised.fp8_format import read_fp8_format
from dflash_runtime.checkpoint.quantised.target_quantization import Quantization, read_quantization
from dflash_runtime.checkpoint.stored.ignored_files import ignored_files
from dflash_runtime.checkpoint.stored.non_finite import NonFiniteWeights
from dflash_runtime.checkpoint.stored.weight_digests import WeightDigest
from dflash_runtime.checkpoint.targets.runs_here import TargetRuntime, kept_packed
from dflash_runtime.checkpoint.text.tokenizer import Tokenizer, find_stop_ids, find_tokenizer
from dflash_runtime.device.capacity.memory import Fit, WeightBytes
from dflash_runtime.device.graphs.cache_graphs import CacheGraphs
from dflash_runtime.device.setup.attention import check_capability
from dflash_runtime.device.setup.settings import (
    apply_exclusions,
    can_capture,
    device_of,
    resolve_dtype,
    resolve_kernels,
    resolve_kv_dtype,
    resolve_limits,
)
from dflash_runtime.device.setup.splitting import check_split
from dflash_runtime.device.setup.spreading import resolve_spread
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.draft import Draft, build_draft, load_draft_weights
from dflash_runtime.drafts.lookups import lookups
from dflash_runtime.engine_config import EXACT_REQUESTS, EngineConfig
from dflash_runtime.errors import UsageError
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.models.kv_scales import read_kv_scales
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target
from dflash_runtime.models.target_loading import find_target_runtime, load_target, target_bytes
from dflash_runtime.models.target_shares import share_config
from dflash_runtime.models.weights import Weights, native_bytes, plain_weights
from dflash_runtime.notices import Notice
from dflash_runtime.ranks.rank_group import ALONE, Ranks
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.target_config import TargetConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPair:
    """Models on a device, with their resolved settings. Any number of `LLM`s may run on one pair.

    draft            any object with the interface of `drafts.draft.Draft`
    config           the engine config, without features that exclude each other
    warnings         about each feature that was switched off, and about the pair
    rounding         the kind of values that a trial of another number format rounded after loading; None otherwise
    kv_scales        scales of each layer of the target, if KV is stored in FP8 and the checkpoint has scales
    weight_digests   digests of the weights of `target` and `draft`, computed when needed
    non_finite       the target's weights with NaN, searched when needed; None for a pair built in Python
    stop_token_ids   ids that end a text according to the target's configs
    """

    target: Target
    draft: Draft | None
    placement: Placement
    limits: Limits
    config: EngineConfig
    warnings: tuple[Notice, ...] = ()
    draft_weights: Weights | None = None
    target_runtime: TargetRuntime = "native"
    target_quantization: str | None = None
    rounding: str | None = None
    kv_scales: Mapping[int, KVScales] = field(default_factory=dict)
    weight_digests: Mapping[str, WeightDigest] = field(default_factory=dict)
    non_finite: NonFiniteWeights | None = None
    tokenizer: Tokenizer | None = None
    stop_token_ids: tuple[int, ...] = ()

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are captured as CUDA graphs: Triton kernels run, and both models allow it."""
        models = [self.target] if self.draft is None else [self.target, self.draft]
        is_safe = all(getattr(model, "follows_from_shapes", False) for model in models)
        return is_safe and can_capture(self.config, self.placement.device, self.placement.kernels)

    def cache_graphs(self, target: OwnCacheTarget) -> CacheGraphs | None:
        """The captured forwards of a target with its own cache, captured when needed. None if it has none."""
        device, kernels = self.placement.device, self.placement.kernels
        is_captured = target.uncaptured is None and can_capture(self.config, device, kernels)
        return CacheGraphs(target, device, self.limits.max_num_requests) if is_captured else None

    @property
    def is_looking_up(self) -> bool:
        """Whether drafts are looked up in the text of each request."""
        return self.config.is_lookup and self.limits.num_draft_tokens > 0

    @property
    def has_prefix_cache(self) -> bool:
        """Whether prompts with the same beginning share pages. A target with its own cache keeps its KV elsewhere."""
        return self.config.prefix_cache and self.target.config.own_cache is None

    @property
    def recurrent_rows(self) -> str | None:
        """How recurrent layers run the rows of a block: "exact", "at-once", or "auto" where it depends on the number of
        requests in a step. None without recurrent layers. Reference kernels know only the exact way, and Triton
        kernels run trees only at once.
        """
        if self.target.config.recurrence is None:
            return None
        if self.limits.num_tree_nodes and self.placement.kernels.name != "reference":
            return "at-once"
        is_exact = self.placement.kernels.name == "reference" or self.limits.max_num_requests <= EXACT_REQUESTS
        return "exact" if self.config.recurrent_rows == "auto" and is_exact else self.config.recurrent_rows

    def with_draft(self, config: DraftConfig) -> "LoadedPair":
        """The pair with another config for the draft, and the draft's loaded weights."""
        assert self.draft_weights is not None, "a pair that was loaded with a draft"
        return replace(self, draft=build_draft(config, self.draft_weights, self.target, self.placement))

    def with_plain_draft(self) -> "LoadedPair":
        """The pair with dequantised matrices instead of matrices in FP8, for code that changes a draft's weights."""
        assert self.draft is not None
        assert self.draft_weights is not None, "a pair that was loaded with a draft"
        weights = plain_weights(self.draft_weights, self.placement.dtype)
        return replace(self, draft_weights=weights).with_draft(self.draft.config)

    def without_draft(self) -> "LoadedPair":
        """The pair without its draft, for plain decoding."""
        config = replace(self.config, drafting="model")
        limits = replace(self.limits, num_draft_tokens=0, num_tree_nodes=0)
        return replace(self, draft=None, draft_weights=None, config=config, limits=limits)

    def with_tree(self, num_nodes: int) -> "LoadedPair":
        """The pair with steps that verify a tree of this many drafted tokens, with its own pages to be allocated.

        Raises:
            UsageError: the config excludes trees.
            UnsupportedError: see `check_capability`.
        """
        config = replace(self.config, num_tree_nodes=num_nodes, adaptive_width=False)
        limits = replace(self.limits, num_tree_nodes=num_nodes)
        draft = None if self.draft is None else self.draft.config
        _check_kernels(self.target.config, draft, self.placement, limits, config)
        return replace(self, config=config, limits=limits)

    def with_lookup(self, name: str) -> "LoadedPair":
        """The target with a lookup instead of the draft, and as many draft tokens. Its steps are synchronous."""
        config = replace(self.config, drafting=name, scheduling="sync", draft_sampling="greedy", adaptive_width=False)
        limits = replace(self.limits, num_tree_nodes=0)
        return replace(self, draft=None, draft_weights=None, config=config, limits=limits)


@dataclass(frozen=True, slots=True)
class PairPlan:
    """The resolved settings of a pair, and the bytes of its weights, before the weights are read."""

    config: EngineConfig
    target: TargetConfig
    draft: DraftConfig | None
    limits: Limits
    placement: Placement
    runtime: TargetRuntime
    quantization: Quantization | None
    warnings: tuple[Notice, ...]
    weights: WeightBytes

    @property
    def sizes(self) -> tuple[EngineConfig, TargetConfig, DraftConfig | None, Limits, Placement]:
        """The arguments of the functions in `memory.py`."""
        return self.config, self.target, self.draft, self.limits, self.placement


def load_pair(
    target: TargetSource, draft: DraftLike | None, config: EngineConfig | None = None, ranks: Ranks = ALONE
) -> LoadedPair:
    """Resolve the config, refuse a pair that cannot run, then load the weights.

    With several ranks, load this rank's share. Without a draft, or with `num_draft_tokens` 0, the target decodes
    plainly.

    Raises:
        PairMismatch: the draft was not made for the target.
        UsageError: the config asks for more draft tokens than the draft was trained for, for an unknown device, or for
            another number of ranks; or there is a draft beside a lookup.
        UnsupportedError, TensorMismatch: see `load_target` and `owned_tensors`.
        CapacityError: memory does not hold the pair, according to the sizes in its headers.
    """
    plan = plan_pair(target, draft, config or EngineConfig(), ranks)
    config, limits, runtime, quantization = plan.config, plan.limits, plan.runtime, plan.quantization
    device, draft = plan.placement.device, draft if plan.draft is not None else None
    warnings = (*plan.warnings, *ignored_files(target.checkpoint))
    warnings += () if draft is None else tuple(ignored_files(draft.checkpoint))
    kv_scales = read_kv_scales(target.checkpoint) if plan.placement.has_fp8_pages else {}
    placement = Fit(*plan.sizes).check(plan.weights)
    digests = _digests(target, draft, begins=config.prefix_store is not None)
    started = time.perf_counter()
    loaded = load_target(target, placement, runtime)
    if loaded.config.own_cache is not None:
        runtime = "transformers-cache"
        _check_kernels(loaded.config, None, placement, limits, config)
    if runtime != "native":
        warnings += hosted_warnings(loaded, can_be_captured=can_capture(config, device, placement.kernels))
    if quantization is not None and runtime != "native":
        warnings = (*warnings, quantised_warning(quantization, placement.dtype_name))
    for text in warnings:
        logger.warning(text)
    pair = LoadedPair(
        target=loaded,
        draft=None,
        placement=placement,
        limits=limits,
        config=config,
        warnings=warnings,
        target_runtime=runtime,
        target_quantization=quantization.label if quantization is not None else None,
        kv_scales=kv_scales,
        weight_digests=digests,
        non_finite=NonFiniteWeights(target.checkpoint),
        tokenizer=find_tokenizer(target.checkpoint.path),
        stop_token_ids=find_stop_ids(target),
    )
    pair = replace(pair, config=replace(config, prefix_cache=pair.has_prefix_cache))
    if draft is not None:
        pair = replace(pair, draft_weights=load_draft_weights(draft, placement)).with_draft(draft.config)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    logger.info("loaded weights onto %s in %.1f s", device, time.perf_counter() - started)
    return pair


def plan_pair(
    target: TargetSource,
    draft: DraftLike | None,
    config: EngineConfig,
    ranks: Ranks = ALONE,
    machine: tuple[torch.device, Kernels] | None = None,
) -> PairPlan:
    """Resolve the settings of a pair and read the sizes of its weights from headers. See `load_pair` for its errors.

    With `machine` the plan is for this device and these kernels, which this machine may lack.
    """
    config = _checked(config, draft)
    check_split(target, config, ranks)
    runtime, target_config = find_target_runtime(target, config.wanted_runtime)
    target_config = share_config(target_config, ranks.size)
    quantization = read_quantization(target) if runtime != "native" else kept_packed(target)
    if draft is not None:
        draft.check_runnable()
        check_pair(draft, target)
    device = machine[0] if machine is not None else device_of(config.device, ranks.rank, ranks.size)
    dtype = resolve_dtype(config.dtype, device)
    kernels = machine[1] if machine is not None else resolve_kernels(config.kernels, device, dtype)
    limits = resolve_limits(config, target_config, draft.config if draft is not None else None, kernels)
    if limits.num_draft_tokens == 0:
        draft = None
    placement = _place(config, device, dtype, kernels, limits, ranks)
    draft_config = draft.config if draft is not None else None
    _check_kernels(target_config, draft_config, placement, limits, config)
    config, warnings = apply_exclusions(config, placement, limits.num_draft_tokens)
    return PairPlan(
        config, target_config, draft_config, limits, placement,
        runtime=runtime, quantization=quantization, warnings=warnings,
        weights=_weight_bytes(target, draft, dtype, runtime, ranks),
    )  # fmt: skip


def _check_kernels(
    target: TargetConfig, draft: DraftConfig | None, placement: Placement, limits: Limits, config: EngineConfig
) -> None:
    """Refuse models that the kernels do not run; see `check_capability`."""
    check_capability(
        placement.kernels.name, target=target, draft=draft, dtype=placement.dtype_name,
        has_fp8_pages=placement.has_fp8_pages, num_tree_nodes=limits.num_tree_nodes,
        recurrent_rows=config.recurrent_rows,
    )  # fmt: skip


def _checked(config: EngineConfig, draft: DraftLike | None) -> EngineConfig:
    if config.is_lookup:
        lookups()[config.drafting]
        if draft is not None:
            raise UsageError(
                f"a draft does not go with drafting {config.drafting}, which needs none",
                id="draft-beside-lookup", field="drafting", found=config.drafting,
            )  # fmt: skip
    return config


def _place(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, kernels: Kernels, limits: Limits, ranks: Ranks
) -> Placement:
    # A block may begin on the model's last position, so rope tables are one block longer than the model.
    num_positions = limits.max_model_len + limits.num_lookahead_tokens
    spread, kv_dtype = resolve_spread(config.device_map), resolve_kv_dtype(config.kv_dtype)
    has_graphs = can_capture(config, device, kernels)
    return Placement(device, dtype, kernels, num_positions, spread, config.module_swaps, ranks, kv_dtype, has_graphs)


def _weight_bytes(
    target: TargetSource, draft: DraftLike | None, dtype: torch.dtype, runtime: TargetRuntime, ranks: Ranks = ALONE
) -> WeightBytes:
    """Bytes of the weights to load, from the headers. Refuses malformed headers before a target is loaded.

    transformers reads a target into host memory first, and then moves it to a GPU.
    """
    size = target_bytes(target, dtype, runtime, ranks)
    own = 0
    if draft is not None:
        owned = (draft.checkpoint.tensors[name] for name in owned_tensors(draft))
        own = native_bytes(owned, dtype, read_fp8_format(draft.checkpoint))
    return WeightBytes(size, own, passing=size if runtime != "native" else 0)


def _digests(target: TargetSource, draft: DraftLike | None, *, begins: bool) -> dict[str, WeightDigest]:
    """The digests of both models' weights. With `begins` they are computed while the weights are loaded."""
    digests = {"target": WeightDigest(target.checkpoint)}
    if draft is not None:
        digests["draft"] = WeightDigest(draft.checkpoint, owned_tensors(draft))
    for digest in digests.values() if begins else ():
        digest.begin()
    return digests


def hosted_warnings(target: Target, *, can_be_captured: bool) -> tuple[Notice, ...]:
    """The warnings about a target that transformers runs. `can_be_captured` says whether native targets would be.

    A second warning names what keeps the target's forward from being captured; see `uncaptured` of the target.
    """
    kind, reason = target.config.model_type, getattr(target, "uncaptured", None)
    is_captured = can_be_captured and reason is None
    if isinstance(target, OwnCacheTarget):
        problem = target.batching.problem
        rows = "" if problem is None else f"one request per forward at some lengths ({problem}), "
        without = "without prefix cache" if is_captured else "without prefix cache and CUDA graphs"
        text = (
            f"the {kind} target runs slowly: transformers runs it with its own cache, {rows}{without}; measured times "
            "do not show the pair's speed"
        )
    elif is_captured:
        text = (
            f"transformers runs the {kind} target over this engine's pages, in CUDA graphs; its steps take longer than "
            "those of a native family"
        )
        return (Notice(text, id="hosted-target"),)
    else:
        text = (
            f"the {kind} target runs slowly: transformers runs it over this engine's pages, without CUDA graphs; "
            "measured times do not show the pair's speed"
        )
    slow = Notice(text, id="slow-target")
    if not can_be_captured or reason is None:
        return (slow,)
    why = f"the steps of the {kind} target are not captured as CUDA graphs: {reason}"
    return slow, Notice(why, id=reason.id, field=reason.field)


def quantised_warning(quantization: Quantization, dtype: str) -> Notice:
    """The warning about a target with packed weights."""
    if quantization.is_unpacked:
        text = (
            f"the target's weights are dequantised to {dtype} while they are loaded ({quantization.method}); "
            "activations are not quantised, but an inference server may quantise them"
        )
    else:
        how = "that method's package computes with them" if quantization.packages else "each product unpacks them"
        text = f"the target's weights stay quantised ({quantization.method}): {how}"
    return Notice(text, id="quantised-target")
