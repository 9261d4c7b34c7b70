"""Memory is divided into weights, working memory of steps, and KV pages, which get the rest.

Headers tell whether the weights fit, before they are read. The working memory of a step is computed from the shapes of
the pair, before anything runs. `log_use` logs the memory that is really in use after the warm-up.
"""

import logging
from dataclasses import dataclass, replace

import torch

from dflash_runtime.device.capacity.host_memory import available_bytes
from dflash_runtime.device.graphs.row_buckets import attention_numbers, row_buckets
from dflash_runtime.device.setup.spreading import share_out
from dflash_runtime.device.storage.kv import bytes_per_token
from dflash_runtime.device.storage.recurrent import snapshot_bytes, state_bytes
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CapacityError
from dflash_runtime.models.hosting.own_cache import score_bytes
from dflash_runtime.models.placement import Placement, Spread
from dflash_runtime.scheduling.limits import RIDGE_ROWS, Limits
from dflash_runtime.scheduling.width import widths_for
from dflash_runtime.target_config import TargetConfig

logger = logging.getLogger(__name__)

HOST_SHARE = 0.5
"""Share of the free memory that the KV cache may take on a machine without a GPU."""

DRAFT_WEIGHTS = "weights of the draft"

WORKSPACE_BYTES = 256 * 2**20
"""Memory that libraries keep: cuBLAS workspaces of two streams, compiled kernels, partial results of attention."""

GRAPH_BYTES = 4 * 2**20
"""Memory that the driver keeps per captured step, without the working memory of the step."""

NUM_GRAPHS = 64
"""Expected CUDA graphs per verify width: the buckets of a usual run times its kinds of sampling."""


SNAPSHOT_SHARE = 0.25
"""The most of the KV memory that snapshots of recurrent states take by default."""

SNAPSHOTS_PER_REQUEST = 8
"""Snapshots of recurrent states for each request that runs at a time, if memory holds them."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a pair's loaded weights. While they load, `passing` bytes are in host memory."""

    target: int
    draft: int
    passing: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """Checks before loading whether memory holds the pair and one request of the shortest length.

    If the config sets the size of the KV cache, the check reserves no memory for steps: the user decides how much is
    left for them.
    """

    config: EngineConfig
    target: TargetConfig
    draft: DraftConfig | None
    limits: Limits
    placement: Placement

    def check(self, weights: WeightBytes) -> Placement:
        """The placement, with the bytes of weights per device if the target is spread automatically.

        Raises:
            CapacityError: the pair does not fit; `found` has the parts and their bytes.
        """
        placement = self.placement
        device, spread, name = placement.device, placement.spread, f"weights of the target in {placement.dtype_name}"
        if spread is not None:
            left = self._left({"the target's embedding and head": self._borrowed_bytes(), **self._parts(weights)})
            if spread.modules is not None:
                return placement
            budgets = share_out(device, left, self._step_bytes(), self.config.gpu_memory_utilization)
            if weights.target > sum(budgets.values()):
                shares = ", ".join(f"{_gib(size)} of {_name(key)}" for key, size in budgets.items())
                raise CapacityError(
                    f"too large to be spread: {_gib(weights.target)} {name}, but they may only use {shares}",
                    id="too-large-to-spread", found={name: weights.target},
                )  # fmt: skip
            return replace(placement, spread=Spread(max_bytes=budgets))
        self._left({name: weights.target, **self._parts(weights)})
        self._check_pages(weights)
        if device.type == "cuda" and weights.passing > (free := available_bytes()):
            parts = {"weights of the target, which pass through host memory": weights.passing}
            raise _too_large(parts, free, "the host", "--device-map auto loads weights straight to their device")
        return placement

    def _check_pages(self, weights: WeightBytes) -> None:
        """Refuse a pair now if `fit_num_pages` would surely refuse it after loading."""
        if self.config.kv_memory_bytes is not None:
            fit_num_pages(self.config, self.target, self.draft, self.limits, self.placement)
        elif self.placement.device.type != "cuda" and self.config.num_pages is None:
            parts = {name: size for name, size in self._parts(weights).items() if name != DRAFT_WEIGHTS}
            free = int(_free_bytes(self.placement.device, self.config.gpu_memory_utilization) * HOST_SHARE)
            if sum(parts.values()) > free:
                where = "the share of the host's free memory that KV and steps may take"
                raise _too_large(parts, free, where, _savings(self.config, self.placement))

    def _parts(self, weights: WeightBytes) -> dict[str, int]:
        """Bytes of each part of the engine's memory, except the target's weights."""
        page_bytes = self.config.page_size * _token_bytes(self.target, self.draft, self.placement)
        has_snapshots = self.target.recurrence is not None and self.config.prefix_cache
        kept = self.config.snapshot_memory_bytes if has_snapshots else None
        return {
            DRAFT_WEIGHTS: weights.draft,
            "KV of one request": _least_pages(self.config, self.limits) * page_bytes,
            **({} if kept is None else {"snapshots of states": kept}),
            "working memory of steps": self._step_bytes(),
        }

    def _step_bytes(self) -> int:
        if self.config.num_pages is not None or self.config.kv_memory_bytes is not None:
            return 0
        scratch = scratch_bytes(self.config, self.target, self.draft, self.limits, self.placement)
        return scratch + text_bytes(self.target, self.limits, self.placement.dtype)

    def _borrowed_bytes(self) -> int:
        """Bytes of copies of a spread target's embedding and head on the engine's device, for draft and sampling."""
        rows = self.target.vocab_size * (1 if self.target.tie_word_embeddings else 2)
        return rows * self.target.hidden_size * self.placement.dtype.itemsize

    def _left(self, parts: dict[str, int]) -> int:
        """Free bytes on the engine's device, minus the bytes of these parts.

        Raises:
            CapacityError: the parts do not fit.
        """
        device = self.placement.device
        free = _free_bytes(device, self.config.gpu_memory_utilization)
        if sum(parts.values()) > free:
            raise _too_large(parts, free, _name(device), _savings(self.config, self.placement))
        return free - sum(parts.values())


def fit_num_pages(
    config: EngineConfig,
    target: TargetConfig,
    draft: DraftConfig | None,
    limits: Limits,
    placement: Placement,
) -> int:
    """Pages for every request at full length, or fewer if the free memory after loading does not hold them.

    Raises:
        CapacityError: memory does not hold one request of the shortest length.
    """
    if config.num_pages is not None:
        return config.num_pages
    token_bytes = _token_bytes(target, draft, placement)
    page_bytes = max(1, config.page_size * token_bytes)
    wanted = wanted_pages(config, limits)
    budget = _kv_budget(config, target, draft, limits, placement)
    if target.recurrence is not None:
        num_snapshots = fit_num_snapshots(config, target, draft, limits, placement)
        budget -= num_snapshots * snapshot_bytes(target.recurrence, placement.dtype)
    affordable = max(0, budget) // page_bytes
    needed = _least_pages(config, limits)
    if affordable < needed:
        raise CapacityError(
            f"KV cache: one request needs {needed} pages of {config.page_size} tokens, {needed * page_bytes} bytes at "
            f"{token_bytes} bytes per token, but only {max(0, budget)} bytes are free",
            id="kv-cache-too-small", field="kv_memory_bytes", found=budget, expected=f"{needed * page_bytes} bytes",
            hint="give the KV cache more memory with --kv-memory or --gpu-memory-utilization, or store KV in FP8 with "
            "--kv-dtype fp8",
        )  # fmt: skip
    return min(wanted, affordable)


def wanted_pages(config: EngineConfig, limits: Limits) -> int:
    """Pages for every request at full length, plus page 0, which is never used. Full length includes the lookahead."""
    return limits.max_num_requests * -(-limits.max_model_len // config.page_size) + 1


def fit_num_snapshots(
    config: EngineConfig, target: TargetConfig, draft: DraftConfig | None, limits: Limits, placement: Placement
) -> int:
    """Snapshots of recurrent states for the prefix cache, which take a part of the KV memory.

    0 without recurrent layers or without the prefix cache.
    """
    if target.recurrence is None or not config.prefix_cache:
        return 0
    size = snapshot_bytes(target.recurrence, placement.dtype)
    if config.snapshot_memory_bytes is not None:
        return config.snapshot_memory_bytes // size
    budget = int(SNAPSHOT_SHARE * _kv_budget(config, target, draft, limits, placement))
    return max(0, min(SNAPSHOTS_PER_REQUEST * limits.max_num_requests, budget // size))


def _kv_budget(
    config: EngineConfig, target: TargetConfig, draft: DraftConfig | None, limits: Limits, placement: Placement
) -> int:
    """Bytes for KV pages and snapshots: as the config says, or the free memory that steps do not need."""
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes
    withheld = scratch_bytes(config, target, draft, limits, placement) + text_bytes(target, limits, placement.dtype)
    share = 1.0 if placement.device.type == "cuda" else HOST_SHARE
    logger.info("%s reserved for steps", _gib(withheld))
    return int(_free_bytes(placement.device, config.gpu_memory_utilization) * share) - withheld


def scratch_bytes(
    config: EngineConfig, target: TargetConfig, draft: DraftConfig | None, limits: Limits, placement: Placement
) -> int:
    """Bytes of working memory that steps need, without KV and weights.

    Steps with prompts and uncaptured steps share memory. Captured steps share other memory, as much as the largest
    captured step needs.
    """
    num_taps = draft.num_taps if draft is not None else 0
    decode = _decode_bytes(config, target, draft, limits, placement)
    forward = limits.max_rows * row_bytes(target, num_taps, placement.dtype)
    # Hidden states and features of prompts stay in memory while tokens are chosen: context KV is written last.
    kept = limits.max_rows * 2 * (1 + num_taps) * target.hidden_size * placement.dtype.itemsize
    shared = max(forward, kept + decode) + _table_bytes(config, limits)
    if not config.graphs or placement.kernels.name != "triton" or placement.device.type != "cuda":
        return shared
    has_widths = config.adaptive_width or config.is_lookup or config.row_budget
    widths = len(widths_for(limits.num_draft_tokens)) if has_widths else 1
    graphs = (NUM_GRAPHS * widths + len(row_buckets(limits.max_rows, target))) * GRAPH_BYTES
    if config.adaptive_width or not limits.num_draft_tokens:
        # Plain steps are captured twice: with room for prompts, and without.
        graphs += NUM_GRAPHS * GRAPH_BYTES
        decode += RIDGE_ROWS * row_bytes(target, num_taps, placement.dtype)
    return shared + decode + _piecewise_bytes(target, limits, num_taps, placement.dtype) + WORKSPACE_BYTES + graphs


def _piecewise_bytes(target: TargetConfig, limits: Limits, num_taps: int, dtype: torch.dtype) -> int:
    """Bytes of the largest captured forward with prompts: working memory, inputs and outputs."""
    numbers = attention_numbers(target) + (1 + num_taps) * target.hidden_size
    return row_buckets(limits.max_rows, target)[-1] * (row_bytes(target, num_taps, dtype) + numbers * dtype.itemsize)


def row_bytes(config: TargetConfig | DraftConfig, num_taps: int, dtype: torch.dtype) -> int:
    """An upper bound on the bytes that a forward holds per row.

    It counts:
    - the residual stream before and after a layer, its norm and the sublayer's output;
    - queries, keys and values twice, because of the rotation;
    - gate, up and their product;
    - tapped outputs, and the joined features;
    - in a draft with convolutions, the convolved rows and the kernels of the row.
    """
    heads = max((config.num_heads + 2 * count) * size for count, size in config.kv_shapes)
    numbers = 4 * config.hidden_size + 2 * heads + _inner_numbers(config) + 2 * num_taps * config.hidden_size
    convolution = config.convolution if isinstance(config, DraftConfig) else None
    if convolution is not None:
        groups = config.hidden_size // convolution.group_size
        numbers += 2 * config.hidden_size + 2 * convolution.kernel_size * groups
    return numbers * dtype.itemsize


def _inner_numbers(config: TargetConfig | DraftConfig) -> int:
    """Numbers per row inside a feed-forward layer: gate, up and their product.

    A row has these numbers for each chosen expert, and three copies of the expert's output: computed, scaled and
    reordered.
    """
    dense = 3 * config.intermediate_size
    experts = config.experts if isinstance(config, TargetConfig) else None
    if experts is None:
        return dense
    num_routes = experts.num_chosen + experts.num_shared
    return max(dense, num_routes * 3 * (experts.intermediate_size + config.hidden_size))


def _decode_bytes(
    config: EngineConfig, target: TargetConfig, draft: DraftConfig | None, limits: Limits, placement: Placement
) -> int:
    """Bytes of the largest decode step: a target row for each position of each block, and logits of both models.

    Reference kernels also write the distributions by which sampled drafts are accepted. Triton kernels do not.
    """
    num_drafted = limits.max_num_requests * limits.num_draft_tokens
    num_verified = limits.max_num_requests * limits.num_lookahead_tokens
    num_taps, dtype = draft.num_taps if draft is not None else 0, placement.dtype
    widest = row_bytes(target, num_taps, dtype)
    if draft is not None:
        widest = max(widest, row_bytes(draft, 0, dtype))
    has_distributions = config.draft_sampling == "probabilistic" and placement.kernels.name == "reference"
    logits = (num_drafted + num_verified) * limits.vocab_size
    distributions = 2 * num_verified * limits.vocab_size if has_distributions else 0
    walked = num_drafted * limits.vocab_size * _walk_bytes(config, draft, dtype)
    if limits.num_tree_nodes:
        walked += num_drafted * limits.vocab_size * torch.float32.itemsize  # for the probabilities of a tree's nodes
    copies = 1 if placement.ranks.size == 1 else 3  # a rank's logits, then all logits: as gathered, and in order
    return num_verified * widest + copies * logits * dtype.itemsize + distributions * torch.float64.itemsize + walked


def _walk_bytes(config: EngineConfig, draft: DraftConfig | None, dtype: torch.dtype) -> int:
    """Bytes per drafted token and token id that a draft holds besides its logits while it walks.

    A selector writes the scores of a sampled token in float32 or wider. A Markov head writes the logits with their
    bias, before it the logits of the best tokens alone, and of sampled tokens all scores once more.
    """
    if draft is None:
        return 0
    is_sampled = config.draft_sampling == "probabilistic"
    selected = max(dtype.itemsize, torch.float32.itemsize) if draft.selector is not None and is_sampled else 0
    markov = draft.markov
    return selected + (0 if markov is None else (1 + (markov.top_k is not None) + is_sampled) * dtype.itemsize)


def text_bytes(target: TargetConfig, limits: Limits, dtype: torch.dtype) -> int:
    """Bytes that texts of any length need beside pages: states of recurrent layers, or the target's own cache.

    The target's own cache also needs memory for its attention scores.
    """
    if target.recurrence is not None:
        return (limits.max_num_requests + 1) * state_bytes(target.recurrence, limits.num_lookahead_tokens, dtype)
    if target.own_cache is None:
        return 0
    scores = score_bytes(target, min(limits.max_batched_tokens, limits.max_model_len))
    return limits.max_num_requests * target.own_cache.text_bytes + scores


def _table_bytes(config: EngineConfig, limits: Limits) -> int:
    """Bytes of the page table, and of the copy of its rows in a step."""
    num_columns = -(-(limits.max_model_len + limits.num_lookahead_tokens) // config.page_size)
    return 2 * (limits.max_num_requests + 1) * num_columns * torch.int64.itemsize


def log_use(device: torch.device) -> None:
    """Log how the memory of a GPU is used after the warm-up, to compare it with the estimates before loading."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    logger.info(
        "memory: %s for weights, KV and state, %s more for steps, %s outside torch, %s of %s free",
        _gib(allocated), _gib(reserved - allocated), _gib(total - free - reserved), _gib(free), _gib(total),
    )  # fmt: skip


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error means that host or device memory is exhausted. For host memory torch raises a RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and ("out of memory" in str(error) or "can't allocate memory" in str(error))


def _token_bytes(target: TargetConfig, draft: DraftConfig | None, placement: Placement) -> int:
    """KV bytes of one token in both models."""
    return sum(bytes_per_token(item, placement.page_dtype) for item in (target, draft) if item is not None)


def _least_pages(config: EngineConfig, limits: Limits) -> int:
    """Pages of one request of the shortest length, plus page 0, which is never used."""
    return 1 + -(-(1 + limits.num_lookahead_tokens) // config.page_size)


def _free_bytes(device: torch.device, utilization: float) -> int:
    """Free bytes on a device that a pair may use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch may still hold the memory of an earlier LLM
        free, total = torch.cuda.mem_get_info(device)
        return free - int(total * (1 - utilization))
    return available_bytes()


def _too_large(parts: dict[str, int], free: int, where: str, hint: str) -> CapacityError:
    """An error that lists the parts with their bytes, and the free bytes."""
    listed = " + ".join(f"{_gib(size)} {name}" for name, size in parts.items() if size)
    total = f" = {_gib(sum(parts.values()))}" if len(parts) > 1 else ""
    return CapacityError(
        f"too large for {where}: {listed}{total}, {_gib(free)} are free", id="pair-too-large", found=parts, hint=hint
    )


def _savings(config: EngineConfig, placement: Placement) -> str:
    """A hint: options that make the pair smaller."""
    options = []
    if placement.device.type == "cuda" and placement.spread is None:
        options.append("--device-map auto spreads the target over GPUs and host memory")
    if placement.dtype.itemsize > 2:
        options.append("--dtype bfloat16 makes weights smaller")
    if config.max_num_requests > 1:
        options.append("a smaller --concurrency or --max-batched-tokens makes steps smaller")
    return "; ".join(options) or "a smaller target, or a machine with more memory"


def _name(device: torch.device | int | str) -> str:
    """The name of a device in messages."""
    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    return "the host" if text == "cpu" else text


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
