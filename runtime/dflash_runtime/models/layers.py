"""The parts of a decoder that targets and drafts share, without gradients.

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim, F inner width, L layers, P pages.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dflash_kernels.attention.row_attention import RowContext
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.fp8.fp8_weight import Fp8Weight, Rows, plain_rows
from dflash_kernels.kv.rope_store import HALVES, KVPlace, Turn
from dflash_kernels.norms.rope_norm import add_rms_norm_of_ranks
from dflash_kernels.products.activation import GELU, SILU, Gate, gate_ref
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_kernels.suite import REFERENCE, Kernels
from dflash_runtime.checkpoint.layout import SINKS
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models.experts import Experts
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.rope import RopeTable
from dflash_runtime.models.weights import Matrix, Weights, find_matrix, rows_between
from dflash_runtime.ranks.rank_group import ALONE, Ranks
from dflash_runtime.target_config import TargetConfig


class Attend(Protocol):
    """The attention of one forward. It owns the KV pages, and the states of recurrent layers.

    A model calls it with queries, keys and values, or takes two steps. First it asks for a layer's `place`, and stores
    keys and values there in the launch that makes them. Then it calls `read`. If a layer has a `row` for each request,
    one launch may do all of this.
    """

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """Query [T, H, D], keys and values [T, KV, D] -> [T, H, D]."""
        ...

    def place(self, layer: int) -> KVPlace | None:
        """Return where to store the rows' keys and values, or None if they are not stored."""
        ...

    def read(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """Compute the same attention as a call, after the keys and values have been stored."""
        ...

    def row(self, layer: int) -> RowContext | None:
        """Return what `row_attention` needs, or None unless each request has one new row."""
        return None

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """See `Recall`."""
        ...


class Recall(Protocol):
    """The memory of recurrent layers in one forward. It owns the states and the latest rows of every text."""

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """Convolve rows [T, C] with taps [C, S], and run the gated delta rule over them -> `out` [T, H, V]."""
        ...


class PagedKV(Protocol):
    """KV in pages, as tensors into which a model writes rows by slot."""

    @property
    def keys(self) -> Tensor:
        """[L, P, page_size, KV, D]."""
        ...

    @property
    def values(self) -> Tensor:
        """[L, P, page_size, KV, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """`x @ weight.T + bias`, rows [T, K] -> [T, N]. Rows may have been rounded for the weight."""

    weight: Matrix
    bias: Tensor | None = None
    kernels: Kernels = REFERENCE

    @classmethod
    def read(cls, weights: Weights, name: str, kernels: Kernels) -> "Linear":
        return cls(find_matrix(weights, name), weights.get(f"{name}.bias"), kernels)

    def __call__(self, hidden: Rows) -> Tensor:
        if isinstance(self.weight, Fp8Weight):
            found = self.kernels.fp8_product(hidden, self.weight)
            return found if self.bias is None else found + self.bias
        return self.kernels.product(plain_rows(hidden), self.weight, self.bias)

    def parts(self, hidden: Rows) -> Tensor:
        """[T, K] -> parts of the product, [P, T, N], that the reader sums."""
        if isinstance(self.weight, Fp8Weight):
            is_whole = self.bias is not None
            return self(hidden)[None] if is_whole else self.kernels.fp8_product_parts(hidden, self.weight)
        return self.kernels.product_parts(plain_rows(hidden), self.weight, self.bias)

    def gated(self, hidden: Rows, gate: Gate = SILU) -> Tensor:
        """The gate of a product with both weights, [T, K] -> [T, N / 2]."""
        if self.bias is not None:
            return gate_ref(self(hidden), gate)
        if isinstance(self.weight, Fp8Weight):
            if gate != SILU:
                return gate_ref(self(hidden), gate)
            return self.kernels.fp8_gated_product(hidden, self.weight)
        return self.kernels.gated_product(plain_rows(hidden), self.weight, gate)

    @property
    def rounded_for(self) -> Fp8Weight | None:
        """The weight if its products round their rows. Whatever makes the rows may then round them."""
        is_rounding = isinstance(self.weight, Fp8Weight) and self.weight.rounding != "none"
        return self.weight if is_rounding else None  # type: ignore[return-value]

    @property
    def plain(self) -> Tensor:
        """The weight of a projection that is never in FP8."""
        assert isinstance(self.weight, Tensor), "a weight in the dtype of the run"
        return self.weight

    def rows(self, begin: int, end: int) -> "Linear":
        """Return the part that makes columns [begin, end) of the product."""
        bias = None if self.bias is None else self.bias[begin:end]
        return Linear(rows_between(self.weight, begin, end), bias, self.kernels)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Root mean square normalisation with a learned scale."""

    weight: Tensor
    eps: float
    kernels: Kernels

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.kernels.rms_norm(hidden, self.weight, self.eps)

    def sum(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalise the sum of a product's parts [P, T, D], which has the model's dtype -> [T, D]."""
        return self.kernels.sum_rms_norm(parts, self.weight, self.eps, dtype)

    def add(
        self, parts: Tensor, residual: Tensor, ranks: Ranks = ALONE, reader: Fp8Weight | None = None
    ) -> tuple[Rows, Tensor]:
        """Add a sublayer's output to the residual stream -> the normalised sum, and the sum.

        Each of `ranks` has parts [P, T, D] of the output. The normalised sum is rounded for a product with `reader`,
        unless this launch adds up the parts of several ranks.
        """
        rooms = ranks.rooms_for(parts) if self.kernels.name == "triton" else None
        if rooms is not None:
            return add_rms_norm_of_ranks(parts, residual, self.weight, self.eps, rooms)
        total = ranks.total(parts)
        if reader is None:
            return self.kernels.add_rms_norm(total, residual, self.weight, self.eps)
        return self.kernels.add_round_norm(total, residual, self.weight, self.eps, reader)


@dataclass(frozen=True, slots=True)
class MLP:
    """Gated feed-forward: down(gate(x) * up(x)), with gate and up in one product."""

    gate_up: Linear
    down: Linear
    gate: Gate = SILU

    @classmethod
    def read(cls, weights: Weights, name: str, kernels: Kernels, gate: Gate = SILU) -> "MLP":
        gate_up, down = (Linear.read(weights, f"{name}.{part}_proj", kernels) for part in ("gate_up", "down"))
        return cls(gate_up, down, gate)

    @property
    def follows_from_shapes(self) -> bool:
        """See `models.target.Target`."""
        return True

    @property
    def rounded_for(self) -> Fp8Weight | None:
        """See `Linear`."""
        return self.gate_up.rounded_for

    def __call__(self, hidden: Rows) -> Tensor:
        """[T, hidden] -> parts [P, T, hidden]."""
        return self.down.parts(self.gate_up.gated(hidden, self.gate))


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections and rotary positions. With `head_norms`, the queries and keys of each head are normalised."""

    qkv: Linear
    output: Linear
    head_norms: Tensor | None  # [H + KV, D]: the query norm for each query head, then the key norm for each key head
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kernels: Kernels
    softmax: Softmax = PLAIN
    turn: Turn = HALVES

    @classmethod
    def read(cls, weights: Weights, name: str, config: TargetConfig | DraftConfig, kernels: Kernels) -> "Attention":
        qkv, output = (Linear.read(weights, f"{name}.{part}_proj", kernels) for part in ("qkv", "o"))
        counts = (config.num_heads, config.num_kv_heads)
        norms, sinks = _head_norms(weights, name, counts), weights.get(f"{name}.{SINKS}")
        softmax = PLAIN if sinks is None else Softmax(sinks=sinks)
        return cls(qkv, output, norms, config.rms_norm_eps, *counts, config.head_dim, kernels, softmax)

    @property
    def rounded_for(self) -> Fp8Weight | None:
        """See `Linear`."""
        return self.qkv.rounded_for

    def project(self, hidden: Rows, cos: Tensor, sin: Tensor, place: KVPlace | None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, hidden] -> rotated queries [T, H, D] and keys [T, KV, D], and values [T, KV, D].

        All are views of wider rows. With a `place`, keys and values are stored there.
        """
        return self.rotate(self.qkv.parts(hidden), cos, sin, place)

    def rotate(self, parts: Tensor, cos: Tensor, sin: Tensor, place: KVPlace | None) -> tuple[Tensor, Tensor, Tensor]:
        """As `project`, after the product, in parts [P, T, (H + 2 KV) * D]."""
        rows = self.kernels.rope_store(parts, self.head_norms, self.eps, cos, sin, self.num_kv_heads, place, self.turn)
        query, keys, values = rows.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return query, keys, values

    def __call__(self, layer: int, hidden: Rows, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """See `Mixer`: rows [T, H * D]."""
        parts, row = self.qkv.parts(hidden), attend.row(layer)
        if row is not None:
            return self.kernels.row_attention(
                parts, self.head_norms, self.eps, cos, sin, self.num_kv_heads, row, self.turn, self.softmax
            ).flatten(-2)
        query, keys, values = self.rotate(parts, cos, sin, attend.place(layer))
        return attend.read(layer, query, keys, values, self.softmax).flatten(-2)

    @property
    def key_norm(self) -> Tensor:
        """[D]."""
        assert self.head_norms is not None, "the attention of a draft has head norms"
        return self.head_norms[-1]

    @property
    def key_value(self) -> Linear:
        """The rows of the projection that make keys and values, [2 * KV * D, hidden]."""
        return self.qkv.rows(self.num_heads * self.head_dim, len(self.qkv.weight))


def _head_norms(weights: Weights, name: str, counts: tuple[int, int]) -> Tensor | None:
    """Return `Attention.head_norms`, or None for a family without head norms."""
    if f"{name}.q_norm.weight" not in weights:
        return None
    norms = (weights[f"{name}.{part}_norm.weight"] for part in "qk")
    return torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=True)])


class Mixer(Protocol):
    """A sublayer in which rows read each other: attention, or a recurrent layer."""

    @property
    def output(self) -> Linear:
        """The projection to the residual stream."""
        ...

    @property
    def rounded_for(self) -> Fp8Weight | None:
        """The weight that reads the normalised rows, if it rounds them."""
        ...

    def __call__(self, layer: int, hidden: Rows, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Normalised rows [T, hidden] -> rows for the output projection."""
        ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Mixer and feed-forward on a residual stream, each after a norm. The caller applies the first norm.

    Each of `ranks` computes a part of both outputs, and the norms add the parts up.
    """

    mixer: Mixer
    mlp: MLP | Experts
    mlp_norm: RMSNorm
    ranks: Ranks = ALONE

    @classmethod
    def read(cls, weights: Weights, name: str, config: TargetConfig | DraftConfig, kernels: Kernels) -> "DecoderLayer":
        """Read a layer with attention."""
        return cls.around(Attention.read(weights, f"{name}.self_attn", config, kernels), weights, name, config, kernels)

    @classmethod
    def around(
        cls, mixer: Mixer, weights: Weights, name: str, config: TargetConfig | DraftConfig, kernels: Kernels
    ) -> "DecoderLayer":
        """Read the feed-forward and its norm of a layer with this mixer."""
        mlp = read_mlp(weights, f"{name}.mlp", config, kernels)
        norm = RMSNorm(weights[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps, kernels)
        return cls(mixer, mlp, norm)

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that attends."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    def __call__(
        self,
        layer: int,
        normed: Rows,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Normalised rows and residual stream, both [T, hidden] -> parts to add to the stream, and the stream.

        The next norm adds the parts of all ranks. With `wanted` [S] both results have only these rows;
        of other rows only the mixer is computed.
        """
        mixed = self.mixer(layer, normed, cos, sin, attend)
        if wanted is not None:
            mixed, residual = mixed[wanted], residual[wanted]
        added = self.mixer.output.parts(mixed)
        rows, residual = self.mlp_norm.add(added, residual, self.ranks, self.mlp.rounded_for)
        return self.mlp(rows), residual


LayerReader = Callable[[Weights, str, TargetConfig | DraftConfig, Kernels], DecoderLayer]

GATES = {"silu": SILU, "gelu_pytorch_tanh": GELU}
"""`hidden_act` of a config -> the gate of feed-forwards."""


def read_mlp(weights: Weights, name: str, config: TargetConfig | DraftConfig, kernels: Kernels) -> MLP | Experts:
    """Read a layer's feed-forward, or its experts if it has a router.

    Raises:
        UnsupportedError: another activation than silu and the tanh form of gelu.
    """
    if config.hidden_act not in GATES:
        known = " or ".join(GATES)
        raise UnsupportedError(
            id="activation-not-run", field="hidden_act", found=config.hidden_act, expected=f"{known} in this runtime"
        )
    experts = config.experts if isinstance(config, TargetConfig) else None
    if experts is not None and f"{name}.gate.weight" in weights:
        return Experts.read(weights, name, experts, kernels, GATES[config.hidden_act])
    return MLP.read(weights, name, kernels, GATES[config.hidden_act])


class DecoderStack:
    """The layers between an embedding and a head, with rope, each layer's input norm, and the final norm.

    `ranks` are the ranks that share the layers. A draft is whole on every rank.
    """

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        config: TargetConfig | DraftConfig,
        placement: Placement,
        read_layer: LayerReader = DecoderLayer.read,
        ranks: Ranks = ALONE,
    ) -> None:
        kernels, layers = placement.kernels, range(config.num_layers)
        read = (read_layer(weights, f"{prefix}layers.{index}", config, kernels) for index in layers)
        self.layers, self._ranks = [replace(layer, ranks=ranks) for layer in read], ranks
        self._readers = [*(layer.mixer.rounded_for for layer in self.layers[1:]), None]
        names = [*(f"layers.{index}.input_layernorm" for index in layers), "norm"]
        self.norms = [RMSNorm(weights[f"{prefix}{name}.weight"], config.rms_norm_eps, kernels) for name in names]
        rotary_dim = config.rotary_dim if isinstance(config, TargetConfig) else None
        self.rope = RopeTable(config.rope, config.head_dim, config.max_position_embeddings, placement, rotary_dim)

    @property
    def follows_from_shapes(self) -> bool:
        """Whether no layer reads a tensor's value on the host. Only experts may do so."""
        return all(layer.mlp.follows_from_shapes for layer in self.layers)

    def __call__(
        self,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        taps: Container[int] = (),
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Embedded rows [T, hidden] at positions [T] -> normalised rows [T, hidden], and the outputs of `taps`.

        A layer's output is the residual stream after it, before the final norm. With `wanted` [S] only these rows are
        normalised, [S, hidden], and only they run through the last layer unless it is tapped.
        """
        cos, sin = self.rope.rows(positions)
        outputs: dict[int, Tensor] = {}
        residual, rows = hidden, self.norms[0](hidden)
        normed: Rows = rows
        last = len(self.layers) - 1
        kept = wanted if last not in taps else None
        for index, (layer, reader) in enumerate(zip(self.layers, self._readers, strict=True)):
            added, residual = layer(index, normed, residual, cos, sin, attend, kept if index == last else None)
            normed, residual = self.norms[index + 1].add(added, residual, self._ranks, reader)
            if index in taps:
                outputs[index] = residual
        rows = plain_rows(normed)
        return rows if wanted is None or kept is not None else rows[wanted], outputs
