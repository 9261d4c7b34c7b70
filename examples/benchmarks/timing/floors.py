"""The least time of a step, by formula: bytes that must be read, and operations that must be done.

A part of a step takes the longer of two times: bytes of weights or KV over the bandwidth, or operations over the rate
of matrix products. Weights are read once per forward, for any number of rows. A routed expert is read if some row
chooses it; the number of these is the expected one, with all experts equally likely. The embedding is not counted.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from timing.shapes import Shape


@dataclass(frozen=True)
class Rates:
    """Rates of a device: bytes of memory traffic per second, and operations per second of large products."""

    bandwidth: float
    operations: float
    origin: str


DATA_SHEETS = {"H200": (4.8e12, 989e12), "H100": (3.35e12, 989e12), "A100": (2.04e12, 312e12)}
"""Part of a device name -> bytes and dense bfloat16 operations per second, as the maker states."""


def stated_rates(device_name: str) -> Rates | None:
    """Rates of a known device from its data sheet, or None."""
    known = next((rates for name, rates in DATA_SHEETS.items() if name in device_name), None)
    return Rates(*known, "data sheet") if known else None


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one part of a step."""

    num_bytes: float
    operations: float

    def seconds(self, rates: Rates) -> float:
        return max(self.num_bytes / rates.bandwidth, self.operations / rates.operations)


def least_ms(work: Iterable[Work], rates: Rates) -> float:
    """Least milliseconds of parts that run one after another."""
    return 1000 * sum(part.seconds(rates) for part in work)


@dataclass(frozen=True)
class StepFloor:
    """The work of decode steps of a shape, with weights and KV of `itemsize` bytes each."""

    shape: Shape
    itemsize: int = 2

    @property
    def body(self) -> int:
        """Number of weights in all layers of the target that one row uses."""
        shape, own = self.shape, self.shape.recurrence
        mixers = 0
        for kv_heads, head_dim, window in shape.attention_layers:
            is_joined = shape.has_equal_kv and window is None
            joined = shape.hidden * kv_heads * head_dim if is_joined else 0
            mixers += self._attention(shape.heads, kv_heads, head_dim) - joined
        if own is not None:
            mixers += len(shape.attention_layers) * shape.hidden * shape.heads * shape.head_dim  # the gate
            values = own.value_heads * own.head_size
            mixers += len(shape.recurrent_layers) * shape.hidden * (own.channels + 2 * values + 2 * own.value_heads)
        if shape.experts is None:
            return mixers + shape.layers * self._dense
        routers = shape.hidden * (shape.experts.count + 1)
        beside = shape.experts.inner if shape.experts.beside is None else shape.experts.beside
        used = shape.experts.chosen * self._expert + 3 * shape.hidden * beside
        return mixers + shape.layers * (routers + used)

    def experts_read(self, rows: float) -> float:
        """Expected number of weights of routed experts that these rows read, in all layers."""
        experts = self.shape.experts
        return 0 if experts is None else self.shape.layers * experts.distinct(rows) * self._expert

    def read(self, rows: float) -> float:
        """Expected number of weights in all layers of the target that these rows read."""
        return self.body if self.shape.experts is None else self.body - self.experts_read(1) + self.experts_read(rows)

    def bytes_read(self, rows: float) -> float:
        """Bytes of the weights in all layers that these rows read. Experts may be packed."""
        return self.itemsize * (self.read(rows) - self.experts_read(rows)) + self.experts_bytes(rows)

    def experts_bytes(self, rows: float) -> float:
        """Expected bytes of routed experts that these rows read, in all layers."""
        packed = None if self.shape.experts is None else self.shape.experts.weight_bytes
        return (self.itemsize if packed is None else packed) * self.experts_read(rows)

    @property
    def _expert(self) -> int:
        """Number of weights of one expert."""
        assert self.shape.experts is not None
        return 3 * self.shape.hidden * self.shape.experts.inner

    @property
    def _dense(self) -> int:
        """Number of weights of one dense feed-forward."""
        return 3 * self.shape.hidden * self.shape.inner

    def _attention(self, heads: int, kv_heads: int, head_dim: int) -> int:
        """Number of weights in one layer's attention."""
        return self.shape.hidden * (2 * heads * head_dim + 2 * kv_heads * head_dim)

    @property
    def head(self) -> int:
        return self.shape.vocab * self.shape.hidden

    def plain(self, batch: int, context: float) -> list[Work]:
        """Work of a plain decoding step."""
        return self._target(batch, 1, context)

    def verify(self, batch: int, context: float, width: float | None = None) -> list[Work]:
        """Work of the target in a step. `width` is the number of rows of each request; None: whole blocks."""
        return self._target(batch, self.shape.block if width is None else width, context)

    def draft(self, batch: int, context: float, acceptance: float) -> list[Work]:
        """Work of the draft in a step, context KV of the committed tokens included."""
        shape = self.shape
        features = shape.hidden * shape.hidden * len(shape.taps)
        heads = shape.heads_of_draft
        layers: list[AttentionLayer] = [(*heads[1:], None)] * shape.draft_layers
        context_kv = shape.draft_layers * 2 * heads[1] * heads[2] * shape.hidden
        body = shape.draft_layers * (self._attention(*heads) + self._dense)
        weights, attention = self._forward(
            body, self.itemsize * body, heads[0], layers, batch, shape.block, context, head_rows=shape.block - 1
        )
        entered = 2 * batch * acceptance * (features + context_kv)
        return [Work(weights.num_bytes + self.itemsize * features, weights.operations + entered), attention]

    def step(self, batch: int, context: float, acceptance: float | None) -> list[Work]:
        """Work of a step that drafts and verifies whole blocks. With acceptance None: of plain decoding."""
        if acceptance is None:
            return self.plain(batch, context)
        return [*self.draft(batch, context, acceptance), *self.verify(batch, context)]

    def prefill(self, lengths: Iterable[int], *, has_draft: bool) -> list[Work]:
        """Work of prompts until each has its first token. Each row attends to the rows before it."""
        shape, lengths = self.shape, list(lengths)
        used, num_bytes = self.body, self.bytes_read(sum(lengths))
        if has_draft:
            _, kv_heads, head_dim = shape.heads_of_draft
            added = shape.hidden**2 * len(shape.taps) + shape.draft_layers * 2 * kv_heads * head_dim * shape.hidden
            used, num_bytes = used + added, num_bytes + self.itemsize * added
        products = 2 * (used * sum(lengths) + self.head * len(lengths))
        attention = sum(
            4 * shape.heads * head_dim * sum(_pairs(length, window) for length in lengths)
            for _, head_dim, window in shape.attention_layers
        )
        return [Work(num_bytes + self.itemsize * self.head, products), Work(0, attention)]

    def _target(self, batch: int, width: float, context: float) -> list[Work]:
        """Work of the target. Each recurrent layer reads and writes one state of a request."""
        shape, own = self.shape, self.shape.recurrence
        num_recurrent = len(shape.recurrent_layers)
        body = (self.body, self.bytes_read(batch * width))
        parts = self._forward(*body, shape.heads, shape.attention_layers, batch, width, context, head_rows=width)
        return parts if own is None else [*parts, Work(2 * batch * num_recurrent * own.state_bytes, 0)]

    def _forward(
        self, body: int, num_bytes: float, num_heads: int, layers: "list[AttentionLayer]", batch: int, width: float,
        context: float, *, head_rows: float,
    ) -> list[Work]:  # fmt: skip
        """Work of a forward with `layers` that attend. A row uses `body` weights, and all rows read `num_bytes`."""
        products = 2 * batch * (body * width + self.head * head_rows)
        seen = [context + width if window is None else min(context, window) + width for *_, window in layers]
        sizes = [(kv_heads, head_dim) for kv_heads, head_dim, _ in layers]
        kv_numbers = sum(2 * kv_heads * head_dim * keys for (kv_heads, head_dim), keys in zip(sizes, seen, strict=True))
        attention = sum(
            4 * batch * width * keys * num_heads * head_dim for (_, head_dim), keys in zip(sizes, seen, strict=True)
        )
        return [
            Work(num_bytes + self.itemsize * self.head, products),
            Work(batch * self.itemsize * kv_numbers, attention),
        ]


AttentionLayer = tuple[int, int, int | None]
"""KV heads, head size and window of a layer."""


def _pairs(length: int, window: int | None) -> float:
    """Pairs of a row and a key that it sees, in a prompt."""
    if window is None or window >= length:
        return length * length / 2
    return window * window / 2 + (length - window) * window
