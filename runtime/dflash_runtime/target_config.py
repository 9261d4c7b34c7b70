"""Frozen descriptions of a target. Nothing here reads a file or imports torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dflash_runtime.config_parts import RopeConfig, require_count
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.json_values import is_number


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
            require_count(name, getattr(self, name))


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
        require_count("num_experts", self.num_experts)
        require_count("num_experts_per_tok", self.num_chosen)
        require_count("moe_intermediate_size", self.intermediate_size)
        if self.shared_size is not None:
            require_count("shared_expert_intermediate_size", self.shared_size)
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
            require_count(name, getattr(self, name))
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
            require_count(name, getattr(self, name))
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
