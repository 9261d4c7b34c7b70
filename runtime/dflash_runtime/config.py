"""Frozen descriptions of a draft, a target and an engine. Every derived value is a property.

Nothing here reads a file or imports torch. Only the `formats` package of the command line turns dialects into
`DraftConfig`, so every field has one meaning:

* `target_layer_ids`: 0-based indices of target layers. The draft reads the OUTPUT of these layers.
* `block_size`: tokens in a block, including the anchor.
* `causal`, `windows`: one entry per draft layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_runtime.errors import InvalidConfig, UsageError
from dflash_runtime.json_values import is_int, is_number

MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A rotary embedding in canonical form. `params` has the other keys of its kind, such as factor or beta_fast."""

    theta: float
    kind: str = "default"
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_number(self.theta) or not self.theta > 0:
            raise InvalidConfig("rope_theta", self.theta, "a positive number")

    def to_parameters(self) -> dict[str, Any]:
        """The `rope_parameters` dictionary of transformers 5."""
        return {"rope_theta": self.theta, "rope_type": self.kind, **self.params}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier:
    """The target that a checkpoint names as its own."""

    name_or_path: str
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionConfig:
    """Convolutions along the rows of a block, around each sublayer: taps, and adjacent columns with one kernel."""

    kernel_size: int
    group_size: int

    def __post_init__(self) -> None:
        _require_count("conv_kernel_size", self.kernel_size)
        _require_count("conv_group_size", self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """The choice among the `top_k` best tokens of each position, by codebooks of `rank` numbers per token."""

    rank: int
    top_k: int

    def __post_init__(self) -> None:
        _require_count("selector_rank", self.rank)
        _require_count("selector_top_k", self.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkovConfig:
    """A bias of a position's logits by the token before it, of `rank` numbers per token.

    head_type  "vanilla" reads the token alone, "gated" also the position's hidden state, and "rnn" also a state that it
               carries along the block
    top_k      the bias chooses among this many best tokens of a position; None: among all
    """

    rank: int
    head_type: str = "vanilla"
    top_k: int | None = None

    def __post_init__(self) -> None:
        _require_count("markov_rank", self.rank)
        if self.head_type not in MARKOV_HEADS:
            raise InvalidConfig("markov_head_type", self.head_type, ", ".join(MARKOV_HEADS))
        if self.top_k is not None:
            _require_count("dspark_draft_topk", self.top_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A DFlash draft of any dialect. `family` names the file in `drafts/` that runs it.

    sample_from_anchor      row i of a block predicts the token after it, the anchor's row included. Otherwise each mask
                            predicts the token at its own position.
    has_confidence          the draft predicts for each token how likely the target accepts it
    confidence_reads_token  this prediction reads the token before it, too
    has_sinks          every layer has an attention sink for each head
    has_target_scale   the draft multiplies the target's embedding rows by the target's embedding scale, as native
                       drafts without a stated scale do. It is not a config key, and comparisons of drafts ignore it.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    vocab_size: int
    draft_vocab_size: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    hidden_act: str = "silu"
    attention_bias: bool = False
    has_sinks: bool = False
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    verifier: Verifier | None = None
    input_embedding_scale: float = 1.0
    has_target_scale: bool = field(default=False, compare=False)
    output_multiplier: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    sample_from_anchor: bool = False
    dtype: str | None = None
    model_type: str = "qwen3"
    markov: MarkovConfig | None = None
    has_confidence: bool = False
    confidence_reads_token: bool = True
    convolution: ConvolutionConfig | None = None
    selector: SelectorConfig | None = None
    family: str = "dflash"

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_layers()
        self._check_ids()

    def _check_sizes(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _require_count(name, getattr(self, name))
        for name in ("max_position_embeddings", "vocab_size", "draft_vocab_size"):
            _require_count(name, getattr(self, name))
        for name in ("target_hidden_size", "num_target_layers"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        _require_count("block_size", self.block_size, minimum=2)
        if self.num_heads % self.num_kv_heads:
            raise InvalidConfig("num_attention_heads", self.num_heads, f"a multiple of {self.num_kv_heads} kv heads")
        if self.convolution is not None and self.hidden_size % self.convolution.group_size:
            expected = f"a divisor of hidden_size {self.hidden_size}"
            raise InvalidConfig("conv_group_size", self.convolution.group_size, expected)
        if self.selector is not None and self.selector.top_k > self.draft_vocab_size:
            raise InvalidConfig("selector_top_k", self.selector.top_k, f"at most {self.draft_vocab_size} tokens")
        if self.draft_vocab_size > self.vocab_size:
            raise InvalidConfig("draft_vocab_size", self.draft_vocab_size, f"at most vocab_size {self.vocab_size}")
        if not is_number(self.rms_norm_eps) or not self.rms_norm_eps > 0:
            raise InvalidConfig("rms_norm_eps", self.rms_norm_eps, "a positive number")

    def _check_layers(self) -> None:
        for name in ("causal", "windows"):
            if len(getattr(self, name)) != self.num_layers:
                raise InvalidConfig(name, getattr(self, name), f"one entry for each of {self.num_layers} layers")
        for window in self.windows:
            if window is not None:
                _require_count("sliding_window", window)

    def _check_ids(self) -> None:
        if not self.target_layer_ids:
            raise InvalidConfig("target_layer_ids", list(self.target_layer_ids), "at least one layer")
        depth = self.num_target_layers
        for layer_id in self.target_layer_ids:
            if not is_int(layer_id) or layer_id < 0 or (depth is not None and layer_id >= depth):
                limit = f"0..{depth - 1}" if depth is not None else "0 or more"
                raise InvalidConfig("target_layer_ids", list(self.target_layer_ids), f"layers in {limit}")
        if not is_int(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            raise InvalidConfig("mask_token_id", self.mask_token_id, f"an id in [0, {self.vocab_size})")

    @property
    def num_draft_tokens(self) -> int:
        """The K that the draft was trained for: the rows of a block that predict a token."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def num_taps(self) -> int:
        """The number of target layers that feed the draft."""
        return len(self.target_layer_ids)

    @property
    def feature_size(self) -> int:
        """The width of one tapped target layer."""
        return self.target_hidden_size if self.target_hidden_size is not None else self.hidden_size

    @property
    def has_own_width(self) -> bool:
        """Whether draft and target differ in width, so that the draft needs its own embedding and head."""
        return self.feature_size != self.hidden_size

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether the draft has fewer token ids than the target, and so needs an id map."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Number of KV heads and head size of each layer."""
        return ((self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with KV: all of them."""
        return tuple(range(self.num_layers))

    @property
    def is_causal(self) -> bool | None:
        """Whether all layers are causal; None if layers differ."""
        return self.causal[0] if len(set(self.causal)) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """Facts about a target that a draft depends on, for any kind of target. None: the config does not state the fact.

    layer_kinds    one per layer: full, sliding, chunked, latent, linear, convolution, mamba, feed-forward, or another
                   name from the config; empty if unknown
    windows        one per layer, None for a layer without a window; empty if unknown
    rope           the rope of all layers; if kinds of layers have different ropes, `ropes` maps each kind to its rope
    nested_in      the key of a wrapper's config that holds the decoder's config
    quantization   the quantization method that the config names
    not_known      features beyond a dense decoder of full and sliding layers, such as experts. The native targets of
                   this runtime support none of them.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    layer_kinds: tuple[str, ...] = ()
    windows: tuple[int | None, ...] = ()
    chunk_size: int | None = None
    max_position_embeddings: int | None = None
    rope: RopeConfig | None = None
    ropes: Mapping[str, RopeConfig] = field(default_factory=dict)
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    nested_in: str | None = None
    quantization: str | None = None
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str | None = None
    not_known: tuple[str, ...] = ()

    @property
    def embedding_scale(self) -> float:
        """The factor by which the target multiplies rows of its embedding. Source: transformers' Gemma."""
        return float(self.hidden_size**0.5) if self.model_type.lower().startswith("gemma") else 1.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "vocab_size"):
            _require_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """A gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with both factors limited before."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        for name in ("alpha", "limit"):
            if not is_number(getattr(self, name)) or not getattr(self, name) > 0:
                raise InvalidConfig(f"swiglu_{name}", getattr(self, name), "a positive number")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Mixture of experts: in `layers`, a router chooses `num_chosen` experts per row instead of one feed-forward.

    Scores are the router's probabilities. With `has_normalised_scores` the scores of the chosen experts sum to one.
    With `shared_size` every row also has a feed-forward of this inner width, multiplied by a gate.
    `clamp` replaces the activation of experts; None: they have the activation of the config.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    has_normalised_scores: bool
    layers: tuple[int, ...]
    shared_size: int | None = None
    clamp: ClampedGate | None = None

    def __post_init__(self) -> None:
        _require_count("num_experts", self.num_experts)
        _require_count("num_experts_per_tok", self.num_chosen)
        _require_count("moe_intermediate_size", self.intermediate_size)
        if self.shared_size is not None:
            _require_count("shared_expert_intermediate_size", self.shared_size)
        if self.num_chosen > self.num_experts:
            raise InvalidConfig("num_experts_per_tok", self.num_chosen, f"at most num_experts {self.num_experts}")

    @property
    def num_shared(self) -> int:
        """Experts of the usual width that hold the shared feed-forward, the last one filled up with zeros."""
        return -(-(self.shared_size or 0) // self.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceConfig:
    """Recurrent layers by the gated delta rule: a state of `value_size` x `key_size` for each value head, after a short
    convolution over `num_taps` positions. Each key head serves adjacent value heads.
    """

    layers: tuple[int, ...]
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_taps: int

    def __post_init__(self) -> None:
        for name in ("num_key_heads", "num_value_heads", "key_size", "value_size", "num_taps"):
            _require_count(name, getattr(self, name))
        if self.num_value_heads % self.num_key_heads:
            expected = f"a multiple of {self.num_key_heads} key heads"
            raise InvalidConfig("linear_num_value_heads", self.num_value_heads, expected)

    @property
    def keys_width(self) -> int:
        """Numbers in the keys of one row."""
        return self.num_key_heads * self.key_size

    @property
    def values_width(self) -> int:
        """Numbers in the values of one row."""
        return self.num_value_heads * self.value_size

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys_width + self.values_width


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaConfig:
    """The parts of a Gemma 4 target that other decoders lack.

    has_equal_kv   in full layers, the values are the keys before their norm and rope
    logit_cap      caps logits: `cap * tanh(logits / cap)`; None for no cap
    """

    has_equal_kv: bool
    logit_cap: float | None

    def __post_init__(self) -> None:
        if self.logit_cap is not None and not self.logit_cap > 0:
            raise InvalidConfig("final_logit_softcapping", self.logit_cap, "a positive number")


@dataclass(frozen=True, slots=True)
class OwnCache:
    """The size of a target's own cache: bytes per token, plus bytes per text of any length."""

    token_bytes: int = 0
    text_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(TargetFacts):
    """A decoder target that can run: with full and sliding layers, or with its own cache.

    has_sinks         every layer has an attention sink for each head
    rotary_dim        how many dimensions of each head rope rotates, the first ones; None for all
    recurrence        the layers with a recurrent state instead of KV; None if every layer attends
    gemma             the parts of a Gemma 4 target; None for another target
    other_kv_shapes   number of KV heads and head size of each layer that differs from the config
    own_cache         size of the target's own cache; None for KV in pages. With its own cache, only the target's own
                      code uses its heads and windows.
    """

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    windows: tuple[int | None, ...]
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None
    has_sinks: bool = False
    rotary_dim: int | None = None
    recurrence: RecurrenceConfig | None = None
    gemma: GemmaConfig | None = None
    other_kv_shapes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    own_cache: OwnCache | None = None

    def __post_init__(self) -> None:
        TargetFacts.__post_init__(self)
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "max_position_embeddings"):
            _require_count(name, getattr(self, name))
        for num_kv_heads, _ in self.kv_shapes:
            if self.num_heads % num_kv_heads:
                raise InvalidConfig("num_attention_heads", self.num_heads, f"a multiple of {num_kv_heads} kv heads")

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """Number of KV heads and head size of each layer."""
        usual = (self.num_kv_heads, self.head_dim)
        return tuple(self.other_kv_shapes.get(layer, usual) for layer in range(self.num_layers))

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layers with KV."""
        recurrent = () if self.recurrence is None else self.recurrence.layers
        return tuple(layer for layer in range(self.num_layers) if layer not in recurrent)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine. None and "auto" mean: decide from the checkpoints and the machine.

    drafting                 "model" drafts with a draft model. The name of a lookup ("ngram", "suffix") drafts from
                             each request's own text, without a draft and with synchronous scheduling.
    draft_confidence         results have the draft's confidence at each position: its largest probability there. Of a
                             draft with a confidence head they always have the head's predictions.
    row_budget               give the verified rows of a step to the draft tokens that are most likely accepted, of any
                             request. Their number has the most expected tokens per second on this GPU.
    max_batched_tokens       the most rows of a step with prompts, prefill and decode together. At least a quarter of
                             them is for prefill.
    kv_dtype                 "fp8" stores keys and values of both models in FP8 (e4m3). Scales of the target's
                             checkpoint are used. "auto" stores keys and values in `dtype`.
    kv_memory_bytes          the size of the page pool. Without it the pool gets the memory that
                             `gpu_memory_utilization` allows.
    max_in_flight            steps that asynchronous scheduling queues before it reads results
    graphs                   capture decode steps on a GPU as CUDA graphs
    adaptive_width           verify only as many rows of each block as give the most tokens per second on this GPU, or
                             decode plainly. The text stays the same, but the measured acceptance may be lower.
    num_tree_nodes           verify a tree of this many drafted tokens per step instead of one block. The text stays the
                             same.
    tree_candidates          the most tokens per position that may become nodes. By default there is no limit. With 1
                             the tree is a chain.
    target_runtime           "native" runs the target with this package's code, "transformers" with transformers' code
                             over our pages if possible, and "transformers-cache" with its own cache. "auto" is native
                             if a family supports the target, otherwise transformers.
    recurrent_rows           "exact" runs the rows of a block through recurrent layers one after another, which is
                             bitwise equal to decoding row by row. "at-once" runs them in one product, which sums in
                             another order. "auto" is exact for at most `EXACT_REQUESTS` requests at a time.
    module_swaps             compute modules of a target of transformers with our kernels, where a comparison at start
                             finds the same result up to rounding
    device_map               spread a target of transformers over devices: "auto", a device, or a JSON file that maps
                             modules to devices
    snapshot_memory_bytes    memory for states of recurrent layers that the prefix cache keeps; by default 8 for each
                             request that runs at a time, in at most a quarter of the KV memory
    prefix_store             the folder that keeps prompts for later runs of the same pair
    prefix_store_bytes       the size of that folder above which the pages used least recently are removed, 64 GiB
    seed                     seeds of requests without a seed are derived from it; with None it is random
    tensor_parallel_size     split the target over this many GPUs of this machine, one process per GPU. On the CPU the
                             processes share the cores.
    all_reduce               how GPUs add up their parts: "nccl", or "one-shot", which reads the parts of small messages
                             from the memory of the other GPUs. "auto" is one-shot where the GPUs can do it.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kernels: str = "auto"
    num_draft_tokens: int | None = None
    num_tree_nodes: int | None = None
    tree_candidates: int | None = None
    draft_sampling: str = "greedy"
    drafting: str = "model"
    draft_confidence: bool = False
    row_budget: bool = False
    max_model_len: int | None = None
    max_num_requests: int = 16
    max_batched_tokens: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True
    snapshot_memory_bytes: int | None = None
    prefix_store: str | None = None
    prefix_store_bytes: int | None = None
    scheduling: str = "async"
    max_in_flight: int = 2
    graphs: bool = True
    adaptive_width: bool = False
    target_runtime: str = "auto"
    recurrent_rows: str = "auto"
    module_swaps: bool = True
    device_map: str | None = None
    seed: int | None = None
    tensor_parallel_size: int = 1
    all_reduce: str = "auto"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(field=name, found=getattr(self, name), expected=", ".join(choices))
        for name in ("max_num_requests", "page_size", "max_in_flight", "tensor_parallel_size"):
            _check_setting(name, getattr(self, name), least=1)
        for name in ("num_draft_tokens", "max_model_len", "max_batched_tokens", "num_pages", "kv_memory_bytes",
                     "snapshot_memory_bytes", "prefix_store_bytes", "num_tree_nodes", "tree_candidates"):  # fmt: skip
            if getattr(self, name) is not None:
                _check_setting(name, getattr(self, name), least=0 if name == "num_draft_tokens" else 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            found = self.gpu_memory_utilization
            raise UsageError(field="gpu_memory_utilization", found=found, expected="above 0 and at most 1")
        self._check_tree()
        if self.device_map is not None and self.target_runtime == "native":
            raise UsageError(
                "--device-map does not go with --target-runtime native: only transformers spreads a target",
                id="device-map-of-native-target", field="device_map", found=self.device_map,
            )  # fmt: skip

    def _check_tree(self) -> None:
        if self.num_tree_nodes is None:
            if self.tree_candidates is not None:
                raise UsageError(
                    "candidates of a tree need a tree", id="option-needs-another", field="tree_candidates",
                    found=self.tree_candidates, hint="add --tree N",
                )  # fmt: skip
            return
        if self.num_tree_nodes > MAX_TREE_NODES:
            expected = f"at most {MAX_TREE_NODES} nodes"
            raise UsageError(field="num_tree_nodes", found=self.num_tree_nodes, expected=expected)
        if self.num_draft_tokens == 0:
            raise UsageError(
                "a tree has draft tokens, and plain decoding drafts none",
                id="tree-without-drafts", field="num_draft_tokens", found=0, hint="leave out --tree",
            )  # fmt: skip
        if self.draft_sampling != "greedy":
            raise UsageError(
                "a tree has the draft's most likely tokens, so --tree does not go with sampled draft tokens",
                id="tree-of-sampled-drafts", field="draft_sampling", found=self.draft_sampling,
                hint="--draft-sampling greedy keeps the target's distribution too",
            )  # fmt: skip
        for name, is_set, what in (
            ("drafting", self.is_lookup, "a lookup, which finds one chain of tokens"),
            ("row_budget", self.row_budget, "a row budget, which shares out the rows of blocks"),
            ("draft_confidence", self.draft_confidence, "confidences, which are predicted for blocks"),
        ):
            if is_set:
                text, found = f"--tree does not go with {what}", getattr(self, name)
                raise UsageError(
                    text, id="tree-beside-blocks", field=name, found=found, hint="leave out one of the two"
                )

    @property
    def most_candidates(self) -> int:
        """The most tokens per position that may become nodes of a tree."""
        return self.tree_candidates or self.num_tree_nodes or 1

    @property
    def wanted_runtime(self) -> str:
        """`target_runtime`, or "transformers" if `device_map` is set: only transformers spreads a target."""
        is_hosted = self.device_map is not None and self.target_runtime != "transformers-cache"
        return "transformers" if is_hosted else self.target_runtime

    @property
    def most_exact_requests(self) -> float:
        """The most requests of a step whose blocks give bitwise the results of their rows one at a time."""
        return {"exact": math.inf, "at-once": 0}.get(self.recurrent_rows, EXACT_REQUESTS)

    @property
    def is_lookup(self) -> bool:
        """Whether drafts are looked up in the text of each request instead of made by a draft model."""
        return self.drafting != "model"

    @property
    def is_async(self) -> bool:
        """Whether steps are queued before the results of earlier steps are read."""
        return self.scheduling == "async"


MAX_TREE_NODES = 256
"""The largest tree. A step's time grows with its nodes, and its acceptance length hardly."""

EXACT_REQUESTS = 4
"""With more requests in a step, rows of blocks that run at once make the step 5% faster or more on an H200."""

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float64"),
    "kv_dtype": ("auto", "fp8"),
    "kernels": ("auto", "triton", "reference"),
    "draft_sampling": ("greedy", "probabilistic"),
    "scheduling": ("async", "sync"),
    "target_runtime": ("auto", "native", "transformers", "transformers-cache"),
    "recurrent_rows": ("auto", "exact", "at-once"),
    "all_reduce": ("auto", "nccl", "one-shot"),
}
"""Engine settings with a fixed set of values."""


def _require_count(name: str, value: object, minimum: int = 1) -> None:
    if not is_int(value) or value < minimum:
        raise InvalidConfig(name, value, f"an integer of at least {minimum}")


def _check_setting(name: str, value: object, least: int) -> None:
    if not is_int(value) or not least <= value < 2**63:
        is_low = is_int(value) and value < least
        expected = f"at least {least}" if is_low else f"an integer from {least} to 2**63 - 1"
        raise UsageError(field=name, found=value, expected=expected)
