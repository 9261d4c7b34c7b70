"""The parts that native targets share: embedding, layers, head and their tensors. A family describes its layers.

Importing this file needs no torch, so that a family's tensors are known from headers.

Axis letters: T flat rows, F feature width.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from dflash_runtime.checkpoint.layout import Shape
from dflash_runtime.models.expert_shapes import experts_shapes
from dflash_runtime.target_config import TargetConfig

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_runtime.models.layers import Attend, DecoderStack, LayerReader, Linear
    from dflash_runtime.models.placement import Placement
    from dflash_runtime.models.weights import Weights

PREFIX = "model."


def dense_shapes(config: TargetConfig) -> dict[str, Shape]:
    """Return the tensors of a feed-forward without experts, by their names in the layer."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, Shape] = {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.mlp_bias:
        shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items()}
    return shapes


class DecoderTarget:
    """A decoder with attention and feed-forward in each layer. `attend` owns its KV."""

    has_head_norms: ClassVar[bool] = False
    """Whether the queries and keys of each head are normalised."""

    def __init__(self, config: TargetConfig, weights: "Weights", placement: "Placement") -> None:
        from torch import Tensor

        from dflash_runtime.models.layers import Linear
        from dflash_runtime.models.split_ends import SplitEmbedding, SplitHead, padded_rows
        from dflash_runtime.models.weights import find_matrix

        self.config = config
        rows, ranks = weights[f"{self.prefix(config)}embed_tokens.weight"], placement.ranks
        self.embedding = rows
        head = rows if config.tie_word_embeddings else find_matrix(weights, "lm_head")
        if ranks.size > 1:
            split = SplitEmbedding(rows, config.vocab_size, ranks)
            self.embedding = cast(Tensor, split)
            assert isinstance(head, Tensor), "a head is never in FP8"
            is_tied = config.tie_word_embeddings
            head = split.own_rows if is_tied else padded_rows(head, config.vocab_size, ranks)
        self.head = self.make_head(Linear(head, kernels=placement.kernels), config)
        if ranks.size > 1:
            self.head = SplitHead.around(self.head, config.vocab_size, ranks)
        self._decoder = self.make_stack(config, weights, placement)

    @classmethod
    def make_stack(cls, config: TargetConfig, weights: "Weights", placement: "Placement") -> "DecoderStack":
        """Return the layers between embedding and head."""
        from dflash_runtime.models.layers import DecoderStack

        return DecoderStack(weights, cls.prefix(config), config, placement, cls.layer_reader(), placement.ranks)

    @classmethod
    def layer_reader(cls) -> "LayerReader":
        """Return the function that reads one layer."""
        from dflash_runtime.models.layers import DecoderLayer

        return DecoderLayer.read

    @classmethod
    def prefix(cls, config: TargetConfig) -> str:
        """Return the prefix of the decoder's tensors."""
        return PREFIX

    @classmethod
    def make_head(cls, head: "Linear", config: TargetConfig) -> "Linear":
        """Return the head that multiplies with the weight of `head`."""
        return head

    @property
    def follows_from_shapes(self) -> bool:
        """See `models.target.Target`."""
        return self._decoder.follows_from_shapes

    @property
    def embedding_scale(self) -> float:
        """See `models.target.TargetEnds`."""
        return self.config.embedding_scale

    def __call__(
        self,
        token_ids: "Tensor",
        positions: "Tensor",
        attend: "Attend",
        taps: Sequence[int],
        wanted: "Tensor | None" = None,
    ) -> "tuple[Tensor, Tensor | None]":
        """See `models.target.Target`. A tap on the last layer gives the residual before the final norm."""
        import torch

        hidden, outputs = self._decoder(self.embed(token_ids), positions, attend, taps, wanted)
        return hidden, torch.cat([outputs[tap] for tap in taps], dim=-1) if taps else None

    def embed(self, token_ids: "Tensor") -> "Tensor":
        """Token ids [T] -> the residual stream before the first layer, [T, hidden]."""
        return self.embedding[token_ids]

    @classmethod
    def expected_shapes(cls, config: TargetConfig) -> dict[str, Shape]:
        """Return every tensor that a target must have, with its shape."""
        hidden, prefix = config.hidden_size, cls.prefix(config)
        shapes: dict[str, Shape] = {
            f"{prefix}embed_tokens.weight": (config.vocab_size, hidden),
            f"{prefix}norm.weight": (hidden,),
        }
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        for index in range(config.num_layers):
            parts = {
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
                **cls.mixer_shapes(config, index),
                **cls.mlp_shapes(config, index),
            }
            shapes |= {f"{prefix}layers.{index}.{name}": shape for name, shape in parts.items()}
        return shapes

    @classmethod
    def mixer_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        """Return the tensors between a layer's first norm and its residual, by their names in the layer."""
        return cls.attention_shapes(config)

    @classmethod
    def joined_parts(cls, config: TargetConfig, name: str) -> tuple[int, ...] | None:
        """Return the widths of the parts that a tensor joins along the axis that ranks split; None for one part."""
        if name.endswith("experts.gate_up_proj") and config.experts is not None:
            return (config.experts.intermediate_size,) * 2
        if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) and config.recurrence is not None:
            own = config.recurrence
            return own.keys_width, own.keys_width, own.values_width
        return None

    @classmethod
    def attention_shapes(cls, config: TargetConfig) -> dict[str, Shape]:
        """Return the tensors of one layer's attention, by their names in the layer."""
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heights = {"q": queries, "k": keys, "v": keys}
        shapes: dict[str, Shape] = {
            f"self_attn.{part}_proj.weight": (height, config.hidden_size) for part, height in heights.items()
        }
        shapes["self_attn.o_proj.weight"] = (config.hidden_size, queries)
        heights["o"] = config.hidden_size
        shapes |= {f"self_attn.{part}_proj.bias": (heights[part],) for part in cls.biased_projections(config)}
        if cls.has_head_norms:
            shapes |= {f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
        return shapes

    @classmethod
    def biased_projections(cls, config: TargetConfig) -> str:
        """Return the letters of the attention projections (q, k, v, o) with a bias."""
        return "qkvo" if config.attention_bias else ""

    @classmethod
    def mlp_shapes(cls, config: TargetConfig, layer: int) -> dict[str, Shape]:
        """Return the tensors of a layer's feed-forward or of its experts, by their names in the layer."""
        experts = config.experts
        if experts is None or layer not in experts.layers:
            return dense_shapes(config)
        return experts_shapes(experts, config.hidden_size)
