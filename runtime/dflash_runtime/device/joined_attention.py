"""Attention of one forward over blocks of decoding requests, followed by prompt rows.

Axis letters: T flat rows, H heads, KV heads of keys and values, D head dim.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_kernels.attention.attention_rows import room_for
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_runtime.device.prefill import RaggedAttention
from dflash_runtime.device.shared_rows import SharedAttention
from dflash_runtime.device.storage.kv import PagedAttention
from dflash_runtime.models.layers import Attend


@dataclass(frozen=True, slots=True)
class JoinedAttention(Attend):
    """An `Attend` over blocks and prompts in one cache. One launch stores the KV of both.

    With `prompt_stream`, the attention of prompts runs in parallel with the attention of blocks.
    """

    blocks: PagedAttention | SharedAttention
    prompts: RaggedAttention
    slots: Tensor  # [T]
    prompt_stream: torch.cuda.Stream | None = None

    @classmethod
    def join(
        cls,
        blocks: PagedAttention | SharedAttention,
        prompts: RaggedAttention,
        prompt_stream: torch.cuda.Stream | None = None,
    ) -> "JoinedAttention":
        """Join the attention of blocks and prompts."""
        assert blocks.slots is not None
        return cls(blocks, prompts, torch.cat((blocks.slots.flatten(), prompts.slots)), prompt_stream)

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        """See `models.layers.Recall`."""
        count = len(self.slots) - len(self.prompts.slots)
        given, parts = (None, None) if out is None else (out[:count], out[count:]), gates.split(count)
        with self._beside():
            prompts = self.prompts.recall(layer, rows[count:], taps, parts[1], given[1])
        blocks = self.blocks.recall(layer, rows[:count], taps, parts[0], given[0])
        if self.prompt_stream is not None:
            torch.cuda.current_stream().wait_stream(self.prompt_stream)
        return torch.cat((blocks, prompts)) if out is None else out

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        """[T, H, D], [T, KV, D] twice -> [T, H, D]."""
        keys, values = self.prompts.kernels.kv_store(keys, values, *self.place(layer))
        return self.read(layer, query, keys, values, softmax)

    def place(self, layer: int) -> KVPlace:
        """See `models.layers.Attend`."""
        return self.prompts.place(layer)._replace(slots=self.slots)

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
        count = len(self.slots) - len(self.prompts.slots)
        out = room_for(query) if out is None else out
        with self._beside():
            self.prompts.read(layer, query[count:], keys[count:], values[count:], softmax, out[count:])
        self.blocks.read(layer, query[:count], keys[:count], values[:count], softmax, out[:count])
        if self.prompt_stream is not None:
            torch.cuda.current_stream().wait_stream(self.prompt_stream)
        return out

    def _beside(self) -> AbstractContextManager[object]:
        """A context in which launches go to the stream of prompts, after everything queued so far."""
        if self.prompt_stream is None:
            return nullcontext()
        self.prompt_stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.prompt_stream)
