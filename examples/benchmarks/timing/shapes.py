"""Sizes of targets and their drafts, published ones and small ones."""

from dataclasses import dataclass

BLOCK = 16


@dataclass(frozen=True)
class Recurrence:
    """Sizes of the recurrent layers of a target. Every `attention_every`-th layer attends instead."""

    key_heads: int
    value_heads: int
    head_size: int = 128
    taps: int = 4
    attention_every: int = 4

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.head_size

    @property
    def state_bytes(self) -> int:
        """Bytes of one layer's state of a text, in float32."""
        return 4 * self.value_heads * self.head_size**2


@dataclass(frozen=True)
class RoutedExperts:
    """Sizes of the experts in every layer of a target. A row uses `chosen` of them.

    beside        inner width of the feed-forward that every row uses besides; None: as wide as an expert
    weight_bytes  bytes of one weight of an expert, if they differ from the bytes of other weights
    """

    count: int
    chosen: int
    inner: int
    beside: int | None = None
    weight_bytes: float | None = None

    def distinct(self, rows: float) -> float:
        """Expected number of routed experts that some of the rows choose, if all experts are equally likely."""
        return self.count * (1 - float((1 - self.chosen / self.count) ** rows))


@dataclass(frozen=True)
class Shape:
    """Sizes of a target. Its draft has attention and dense feed-forwards, with other heads if `draft_heads` are given.

    inner        inner width of dense feed-forwards, which only the draft has if the target has experts
    draft_heads  query heads, KV heads and head size of the draft
    family       model type of a target with a config reader of its own
    window       window of sliding layers; None: every layer has full attention
    full_every   every n-th layer has full attention
    full_heads   KV heads and head size of full layers, if they differ from sliding layers
    has_equal_kv  full layers have one projection for keys and values
    block        rows of a block, one more than the draft tokens
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    taps: tuple[int, ...]
    is_tied: bool
    vocab: int = 151936
    kv_heads: int = 8
    head_dim: int = 128
    draft_layers: int = 5
    positions: int = 40960
    draft_heads: tuple[int, int, int] | None = None
    recurrence: Recurrence | None = None
    experts: RoutedExperts | None = None
    family: str | None = None
    window: int | None = None
    full_every: int = 1
    full_heads: tuple[int, int] | None = None
    has_equal_kv: bool = False
    block: int = BLOCK

    @property
    def attention_layers(self) -> list[tuple[int, int, int | None]]:
        """KV heads, head size and window of each layer that attends."""
        usual, full = (self.kv_heads, self.head_dim), self.full_heads or (self.kv_heads, self.head_dim)
        return [
            (*full, None) if not (layer + 1) % self.full_every else (*usual, self.window)
            for layer in range(self.layers)
            if layer not in self.recurrent_layers
        ]

    @property
    def heads_of_draft(self) -> tuple[int, int, int]:
        """Query heads, KV heads and head size of the draft."""
        return self.draft_heads or (self.heads, self.kv_heads, self.head_dim)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        if self.recurrence is None:
            return ()
        return tuple(index for index in range(self.layers) if (index + 1) % self.recurrence.attention_every)


SHAPES = {
    "qwen3-8b": Shape(4096, 12288, 36, 32, (1, 9, 17, 25, 33), is_tied=False),
    "qwen3-4b": Shape(2560, 9728, 36, 32, (1, 9, 17, 25, 33), is_tied=True),
    "qwen3.5-4b": Shape(
        2560, 9216, 32, 16, (1, 8, 15, 22, 29), is_tied=True, vocab=248320, kv_heads=4, head_dim=256,
        draft_heads=(32, 8, 128), recurrence=Recurrence(key_heads=16, value_heads=32),
    ),
    "qwen3.8-27b": Shape(
        5120, 17408, 64, 24, (5, 19, 33, 47, 61), is_tied=False, vocab=248320, kv_heads=4, head_dim=256,
        draft_heads=(32, 8, 128), recurrence=Recurrence(key_heads=16, value_heads=48),
    ),
    "qwen3.6-35b-a3b": Shape(
        2048, 6144, 40, 16, (1, 10, 19, 28, 37), is_tied=False, vocab=248320, kv_heads=2, head_dim=256, draft_layers=8,
        draft_heads=(32, 4, 128), recurrence=Recurrence(key_heads=16, value_heads=32),
        experts=RoutedExperts(count=256, chosen=8, inner=512),
    ),
    "gpt-oss-20b": Shape(
        2880, 7680, 24, 64, (1, 6, 11, 16, 21), is_tied=False, vocab=201088, head_dim=64, draft_layers=8,
        family="gpt_oss", window=128, full_every=2,
        experts=RoutedExperts(count=32, chosen=4, inner=2880, beside=0, weight_bytes=17 / 32),
    ),
    "gemma-4-31b": Shape(
        5376, 21504, 60, 32, (1, 13, 24, 35, 46, 57), is_tied=True, vocab=262144, kv_heads=16, head_dim=256,
        draft_heads=(64, 8, 128), family="gemma4_text", window=1024, full_every=6, full_heads=(4, 512),
        has_equal_kv=True,
    ),
    "gemma-4-26b-a4b": Shape(
        2816, 2112, 30, 16, (1, 8, 14, 20, 27), is_tied=True, vocab=262144, kv_heads=8, head_dim=256,
        draft_heads=(32, 8, 128), family="gemma4_text", window=1024, full_every=6, full_heads=(2, 512),
        has_equal_kv=True, experts=RoutedExperts(count=128, chosen=8, inner=704, beside=2112),
    ),
    "small-gemma": Shape(
        128, 256, 4, 4, (0, 3), is_tied=True, vocab=512, kv_heads=2, head_dim=64, draft_layers=1,
        draft_heads=(4, 2, 64), family="gemma4_text", window=64, full_every=2, full_heads=(1, 128), has_equal_kv=True,
        experts=RoutedExperts(count=8, chosen=2, inner=64, beside=256),
    ),
    "small-gpt-oss": Shape(
        128, 256, 4, 4, (0, 3), is_tied=False, vocab=512, kv_heads=2, head_dim=64, draft_layers=1, family="gpt_oss",
        window=128, full_every=2, experts=RoutedExperts(count=8, chosen=2, inner=64, beside=0, weight_bytes=17 / 32),
    ),
    "small-experts": Shape(
        128, 256, 4, 4, (0, 3), is_tied=True, vocab=512, kv_heads=2, draft_layers=1,
        recurrence=Recurrence(key_heads=2, value_heads=4, head_size=32),
        experts=RoutedExperts(count=8, chosen=2, inner=32),
    ),
    "small-hybrid": Shape(
        128, 256, 4, 4, (0, 3), is_tied=True, vocab=512, kv_heads=2, draft_layers=1,
        recurrence=Recurrence(key_heads=2, value_heads=4, head_size=32),
    ),
    "small": Shape(128, 256, 2, 4, (0, 1), is_tied=True, vocab=512, kv_heads=2, draft_layers=1),
}  # fmt: skip
