"""Frozen descriptions of a draft, a target and an engine; everything derived is a property.

Nothing here reads a file or imports torch. Dialects are turned into `DraftConfig` by the command line's `formats`
package and nowhere else, so every field below has one meaning:

* `target_layer_ids`: 0-based indices of the target's decoder layers whose OUTPUT feeds the draft.
* `block_size`: tokens in a block, the anchor included.
* `causal`, `windows`: one entry a draft layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dflash_runtime.errors import InvalidConfig, UsageError
from dflash_runtime.json_values import is_int, is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding in one form. `params` holds what the type needs beyond theta (factor, beta_fast, ...)."""

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
    """The target a checkpoint names for itself."""

    name_or_path: str
    architectures: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """A DFlash draft, whatever dialect it was read from. `family` names the file in `drafts/` that runs it.

    With `has_sinks` every layer has an attention sink for each of its heads.
    With `has_target_scale` rows of the target's embedding are also multiplied as the target does it: the native dialect
    where it states no scale. No key says so, and it is no part of what drafts are compared by.
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
    final_logit_softcapping: float | None = None
    sample_from_anchor: bool = False
    dtype: str | None = None
    model_type: str = "qwen3"
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
        """K as the draft was trained: every block position but the anchor."""
        return self.block_size - 1

    @property
    def num_taps(self) -> int:
        """How many target layers feed the draft."""
        return len(self.target_layer_ids)

    @property
    def feature_size(self) -> int:
        """Width of one tapped target layer."""
        return self.target_hidden_size if self.target_hidden_size is not None else self.hidden_size

    @property
    def has_own_width(self) -> bool:
        """Whether the target's embedding and head are of another width, so that the draft brings its own."""
        return self.feature_size != self.hidden_size

    @property
    def has_reduced_vocab(self) -> bool:
        """Whether the draft proposes over fewer ids than the target has, and so needs an id map."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def kv_shapes(self) -> tuple[tuple[int, int], ...]:
        """KV heads and their size, one entry a layer."""
        return ((self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def is_causal(self) -> bool | None:
        """The one causality of all layers, or None where they differ."""
        return self.causal[0] if len(set(self.causal)) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """What a draft has to know of its target, whatever its layers are. None is what the config does not state.

    layer_kinds   one a layer: full, sliding, chunked, latent, linear, convolution, mamba or feed-forward, or the name
                  that the config has for another kind; empty where the config does not say
    windows       one a layer, None where it has none; empty where it is not known
    rope          the one rope of all layers; where kinds of layers differ, `ropes` has one for each kind that has any
    nested_in     the key of a wrapper's config that the decoder's is found in
    quantization  how the weights are packed, as the config names it
    not_known     what the config says beyond a dense decoder of full and sliding layers, such as experts. A target
                  with anything in it can be served by engines, and is not run here.
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
        """What the target multiplies rows of its embedding with as it looks them up. Source: transformers' Gemma."""
        return float(self.hidden_size**0.5) if self.model_type.lower().startswith("gemma") else 1.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "vocab_size"):
            _require_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """Feed-forwards of which a router chooses `num_chosen` for each row, in place of one, in some layers.

    Scores are the router's probabilities; with `has_normalised_scores` those of the chosen experts sum to one.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    has_normalised_scores: bool
    layers: tuple[int, ...]

    def __post_init__(self) -> None:
        _require_count("num_experts", self.num_experts)
        _require_count("num_experts_per_tok", self.num_chosen)
        _require_count("moe_intermediate_size", self.intermediate_size)
        if self.num_chosen > self.num_experts:
            raise InvalidConfig("num_experts_per_tok", self.num_chosen, f"at most num_experts {self.num_experts}")


@dataclass(frozen=True, slots=True)
class OwnCache:
    """Bytes of a cache that a target keeps by itself: of each token, and of each text besides."""

    token_bytes: int = 0
    text_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig(TargetFacts):
    """A decoder target, known well enough to be run: of full and sliding layers, unless it keeps its own cache.

    `other_kv_shapes` has KV heads and their size of the layers in which they are others than those of the config.
    With `own_cache` none of its KV is in our pages, and heads and windows are nobody's to read but its own code's.
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
        """KV heads and their size, one entry a layer."""
        usual = (self.num_kv_heads, self.head_dim)
        return tuple(self.other_kv_shapes.get(layer, usual) for layer in range(self.num_layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs. None and "auto" mean "decide from the checkpoints and the machine".

    A step with prompts has `max_batched_tokens` rows at most, those of requests that decode included; a quarter is
    for prompts in any case. `kv_memory_bytes` sets the size of the page pool; without it the pool takes the memory
    that `gpu_memory_utilization` allows. `max_in_flight` steps are queued ahead of their results when scheduling is
    asynchronous. Requests without a seed get theirs from `seed`; with None, that is another number each time. With
    `graphs`, decode steps on a GPU are captured as CUDA graphs. With `adaptive_width` steps verify as many rows of
    a block as promise the most tokens a second on this GPU, or decode plainly: the text is the same, and the
    acceptance that is counted is capped. `target_runtime` says whose code runs the target: a native family,
    transformers, or with "auto" transformers where no native family serves it. transformers' code keeps its own
    cache where our pages do not do, and with "transformers-cache" in any case. `device_map` spreads the target over
    devices, which only transformers' code does: "auto", a device, or a JSON file of modules and devices. In the
    folder `prefix_store` prompts that were run are kept, for later runs of the same pair to begin with.
    """

    device: str = "auto"
    dtype: str = "auto"
    kernels: str = "auto"
    num_draft_tokens: int | None = None
    draft_sampling: str = "greedy"
    max_model_len: int | None = None
    max_num_requests: int = 16
    max_batched_tokens: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True
    prefix_store: str | None = None
    scheduling: str = "async"
    max_in_flight: int = 2
    graphs: bool = True
    adaptive_width: bool = False
    target_runtime: str = "auto"
    device_map: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} {getattr(self, name)!r} is not one of {', '.join(choices)}")
        for name in ("max_num_requests", "page_size", "max_in_flight"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_draft_tokens", "max_model_len", "max_batched_tokens", "num_pages", "kv_memory_bytes"):
            value = getattr(self, name)
            if value is not None and value < (0 if name == "num_draft_tokens" else 1):
                raise UsageError(f"{name} must be positive, got {value}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.device_map is not None and self.target_runtime == "native":
            raise UsageError("a device map is for targets that transformers runs, not for --target-runtime native")

    @property
    def wanted_runtime(self) -> str:
        """Whose code is to run the target, or `auto`."""
        is_hosted = self.device_map is not None and self.target_runtime != "transformers-cache"
        return "transformers" if is_hosted else self.target_runtime

    @property
    def is_async(self) -> bool:
        return self.scheduling == "async"


CHOICES = {
    "dtype": ("auto", "float32", "bfloat16", "float64"),
    "kernels": ("auto", "triton", "reference"),
    "draft_sampling": ("greedy", "probabilistic"),
    "scheduling": ("async", "sync"),
    "target_runtime": ("auto", "native", "transformers", "transformers-cache"),
}
"""What each engine setting that is a word may be."""


def _require_count(name: str, value: object, minimum: int = 1) -> None:
    if not is_int(value) or value < minimum:
        raise InvalidConfig(name, value, f"an integer of at least {minimum}")
