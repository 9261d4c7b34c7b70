"""The frozen description of a draft. Every derived value is a property.

Nothing here reads a file or imports torch. Only the `formats` package of the command line turns dialects into
`DraftConfig`, so every field has one meaning:

* `target_layer_ids`: 0-based indices of target layers. The draft reads the OUTPUT of these layers.
* `block_size`: tokens in a block, including the anchor.
* `causal`, `windows`: one entry per draft layer.
"""

from dataclasses import dataclass, field

from dflash_runtime.config_parts import RopeConfig, require_count
from dflash_runtime.errors import InvalidConfig
from dflash_runtime.json_values import is_int, is_number

MARKOV_HEADS = ("vanilla", "gated", "rnn")


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
        require_count("conv_kernel_size", self.kernel_size)
        require_count("conv_group_size", self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorConfig:
    """The choice among the `top_k` best tokens of each position, by codebooks of `rank` numbers per token."""

    rank: int
    top_k: int

    def __post_init__(self) -> None:
        require_count("selector_rank", self.rank)
        require_count("selector_top_k", self.top_k)


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
        require_count("markov_rank", self.rank)
        if self.head_type not in MARKOV_HEADS:
            raise InvalidConfig("markov_head_type", self.head_type, ", ".join(MARKOV_HEADS))
        if self.top_k is not None:
            require_count("dspark_draft_topk", self.top_k)


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
            require_count(name, getattr(self, name))
        for name in ("max_position_embeddings", "vocab_size", "draft_vocab_size"):
            require_count(name, getattr(self, name))
        for name in ("target_hidden_size", "num_target_layers"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name))
        require_count("block_size", self.block_size, minimum=2)
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
                require_count("sliding_window", window)

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
