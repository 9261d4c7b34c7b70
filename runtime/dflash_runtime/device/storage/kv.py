"""KV tensors in pages, and attention over them.

Target and draft have separate tensors and share page numbers: the page that holds a token's target KV also holds its
draft context KV.

Axis letters: P pages, L layers, W numbers in a row's keys in the widest layer, R requests, N rows per request,
T flat rows (R * N), H heads, KV heads of keys and values, D head dim.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_kernels.attention.attention_config import MOST_ROW_GROUPS
from dflash_kernels.attention.row_attention import RowContext
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.drafts.draft_tree import TreeRows
from dflash_kernels.kv.kv_format import UNSCALED, KVScales
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.kv.slot_mapping import PAD
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_kernels.suite import Kernels
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.models.layers import Recall
from dflash_runtime.models.placement import Placement
from dflash_runtime.target_config import TargetConfig


class KVCache:
    """Keys and values of every layer, with slots `page * page_size + offset`.

    pages          [P, L, 2, page_size, W], keys then values. A page is contiguous over all layers: one piece to send.
    keys, values   views [L, P, page_size, KV, D], or [L, P, page_size, 1, W] if layers differ in their heads
    layers         number of a layer -> views of its keys and values in its own shape, [P, page_size, KV, D]
    dtype          the dtype of the run: of rows before they are stored, and of attention
    scales         number of a layer -> scales of its pages in FP8, if they are not 1
    arrivals       zeros in which `row_attention` counts its programs

    L counts the layers with KV.
    """

    def __init__(
        self,
        config: TargetConfig | DraftConfig,
        num_pages: int,
        page_size: int,
        placement: Placement,
        scales: Mapping[int, KVScales] | None = None,
    ) -> None:
        shapes, width = {layer: config.kv_shapes[layer] for layer in config.kv_layers}, _width(config)
        self.page_size = page_size
        self.dtype = placement.dtype
        self.scales = scales or {}
        self.arrivals = torch.zeros(MOST_ROW_GROUPS, dtype=torch.int32, device=placement.device)
        self.pages = _zeros((num_pages, len(shapes), 2, page_size, width), placement)
        common = next(iter(shapes.values())) if len(set(shapes.values())) == 1 else (1, width)
        by_layer = self.pages.permute(2, 1, 0, 3, 4)
        self.keys, self.values = by_layer.view(*by_layer.shape[:4], *common)
        self.layers = {
            layer: (_shaped(by_layer[0, index], *shape), _shaped(by_layer[1, index], *shape))
            for index, (layer, shape) in enumerate(shapes.items())
        }

    @property
    def is_rounded(self) -> bool:
        """Whether pages hold fewer bits than rows: attention must read rounded rows in every step."""
        return bool(self.pages.dtype != self.dtype)

    @property
    def itemsizes(self) -> dict[str, int]:
        """Bytes of a number of a row, and of a number in pages, as `launch_config` names them."""
        return {"itemsize": self.dtype.itemsize, "kv_itemsize": self.pages.itemsize}

    def scales_of(self, layer: int) -> KVScales:
        """The scales of a layer's keys and values."""
        return self.scales.get(layer, UNSCALED)

    def place(self, layer: int, slots: Tensor) -> KVPlace:
        """Where a layer's keys and values of rows [T] with these slots are stored."""
        return KVPlace(*self.layers[layer], slots, self.scales_of(layer))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return math.prod(self.pages.shape[1:]) * self.pages.itemsize


def _zeros(shape: tuple[int, ...], placement: Placement) -> Tensor:
    """A tensor of zeros. On the CPU a page takes memory only when it is first written."""
    dtype = placement.page_dtype
    num_bytes = math.prod(shape) * dtype.itemsize
    if placement.device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, device=placement.device, dtype=dtype)
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def _shaped(rows: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """The part of a layer's rows [P, page_size, W] that its heads use, [P, page_size, KV, D]."""
    return rows[:, :, : num_heads * head_dim].view(*rows.shape[:2], num_heads, head_dim)


def bytes_per_token(config: TargetConfig | DraftConfig, dtype: torch.dtype) -> int:
    """KV bytes per token over all layers, in pages or in the target's own cache."""
    own_cache = getattr(config, "own_cache", None)
    if own_cache is not None:
        return int(own_cache.token_bytes)
    return 2 * len(config.kv_layers) * _width(config) * dtype.itemsize


def _width(config: TargetConfig | DraftConfig) -> int:
    """Numbers in the keys of one token in the widest layer."""
    return max((heads * size for heads, size in (config.kv_shapes[layer] for layer in config.kv_layers)), default=0)


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """An `Attend` over one cache for one forward: the context is read from pages, the block is dense.

    With `slots` [R, N] the block's K and V are stored in pages too. A draft's block is never stored there,
    and keeps the dtype of the run. With `tree` the rows of a block see their ancestors instead of all earlier rows.
    """

    kernels: Kernels
    cache: KVCache
    page_table: Tensor  # [R, pages of a request]
    context_lens: Tensor  # [R]
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    slots: Tensor | None = None
    memory: Recall | None = None
    tree: TreeRows | None = None

    @classmethod
    def in_order(
        cls,
        kernels: Kernels,
        cache: KVCache,
        context_len: int,
        causal: tuple[bool, ...],
        windows: tuple[int | None, ...],
    ) -> "PagedAttention":
        """Attention of one request with its context in the cache's first pages, in order. Its block is not stored."""
        num_pages = max(1, -(-context_len // cache.page_size))
        table = torch.arange(num_pages, device=cache.pages.device)[None]
        return cls(kernels, cache, table, table.new_full((1,), context_len), causal, windows)

    @classmethod
    def of_text(
        cls,
        kernels: Kernels,
        cache: KVCache,
        num_rows: int,
        windows: tuple[int | None, ...],
        memory: Recall | None = None,
    ) -> "PagedAttention":
        """Causal attention of a target's rows without context, which are not stored but rounded as stored rows are."""
        table = torch.zeros((1, 1), dtype=torch.int64, device=cache.pages.device)
        slots = table.new_full((1, num_rows), PAD) if cache.is_rounded else None
        causal = (True,) * len(windows)
        return cls(kernels, cache, table, table.new_zeros(1), causal, windows, slots, memory)

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """See `models.layers.Recall`."""
        assert self.memory is not None
        return self.memory.recall(layer, rows, taps, gates, out)

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """[T, H, D], [T, KV, D] twice -> [T, H, D]."""
        place = self.place(layer)
        if place is not None:
            keys, values = self.kernels.kv_store(keys, values, *place)
        return self.read(layer, query, keys, values, softmax)

    def place(self, layer: int) -> KVPlace | None:
        """See `models.layers.Attend`."""
        return None if self.slots is None else self.cache.place(layer, self.slots.flatten())

    def row(self, layer: int) -> RowContext | None:
        """See `models.layers.Attend`. Attention of a new row reads its key before it is rounded for pages in FP8."""
        if self.slots is None or self.slots.shape[1] > 1 or self.tree is not None or self.cache.is_rounded:
            return None
        place = self.cache.place(layer, self.slots.flatten())
        return RowContext(place, self.page_table, self.context_lens, self.windows[layer], self.cache.arrivals)

    def read(
        self,
        layer: int,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        softmax: Softmax = PLAIN,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `models.layers.Attend`; writes into `out` [T, H, D] if it is given."""
        num_requests = self.context_lens.shape[0]
        blocks = [item.view(num_requests, -1, *item.shape[1:]) for item in (query, keys, values)]
        given = (*blocks, *self.cache.layers[layer], self.page_table, self.context_lens)
        window, scales = self.windows[layer], self.cache.scales_of(layer)
        out = None if out is None else out.view(blocks[0].shape)
        if self.tree is not None:
            attended = self.kernels.tree_attention(
                *given, self.tree, window=window, softmax=softmax, scales=scales, out=out
            )
        else:
            attended = self.kernels.block_attention(
                *given, is_causal=self.causal[layer], window=window, softmax=softmax, scales=scales, out=out
            )
        return attended.reshape(query.shape)
