"""Loops on transformers' modules with random weights of the same shape, for comparison.

`generate` is transformers' own method. The reference loop drafts and verifies blocks like research code: one request,
one kernel launched at a time, a dynamic cache that is cropped after each step, and a host that waits for the number of
accepted draft tokens. It was written for this comparison and is not released code of any project.
"""

import random as host_random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from timing.arguments import run_dtype
from timing.engine_arms import wait
from timing.forced import acceptance_rates
from timing.pairs import random_prompt
from timing.shape_configs import MASK_FROM_END, hf_config
from timing.shapes import Shape

NUM_WARM_STEPS = 3


def build_target(shape: Shape, device: torch.device) -> Qwen3ForCausalLM:
    """transformers' model with torch's attention kernels."""
    names = ("architectures", "model_type", "rope_theta", "torch_dtype", "bos_token_id", "eos_token_id")
    values: dict[str, Any] = {name: value for name, value in hf_config(shape).items() if name not in names}
    config = Qwen3Config(**values, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, eos_token_id=None)
    config._attn_implementation = "sdpa"
    with _making(device):
        model: Qwen3ForCausalLM = Qwen3ForCausalLM(config).eval().requires_grad_(False)
        return model


@torch.inference_mode()
def generate_ms(model: Any, shape: Shape, batch: int, context: int, num_tokens: int) -> float:
    """Milliseconds per token of `generate`, from the difference of a long and a short answer."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.tensor([random_prompt(shape, context, generator) for _ in range(batch)], device=model.device)
    short = 4

    def seconds(length: int) -> float:
        wait(model.device)
        started = time.perf_counter()
        model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=length,
            min_new_tokens=length, pad_token_id=0,
        )  # fmt: skip
        wait(model.device)
        return time.perf_counter() - started

    seconds(short)
    begun, ended = seconds(short), seconds(short + num_tokens)
    return (ended - begun) * 1000 / num_tokens


class ReferenceDraft(nn.Module):
    """A draft made of transformers' modules. Each layer caches keys and values of its context."""

    def __init__(self, config: Qwen3Config, num_layers: int, num_taps: int) -> None:
        super().__init__()
        sizes: Any = config
        hidden, heads, kv_heads = sizes.hidden_size, sizes.num_attention_heads, sizes.num_key_value_heads
        self.head_dim: int = sizes.head_dim
        self.features = nn.Linear(num_taps * hidden, hidden, bias=False)
        self.feature_norm = Qwen3RMSNorm(hidden, config.rms_norm_eps)
        self.rope = Qwen3RotaryEmbedding(config)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            parts = {
                "input_norm": Qwen3RMSNorm(hidden, config.rms_norm_eps),
                "query": nn.Linear(hidden, heads * self.head_dim, bias=False),
                "key": nn.Linear(hidden, kv_heads * self.head_dim, bias=False),
                "value": nn.Linear(hidden, kv_heads * self.head_dim, bias=False),
                "output": nn.Linear(heads * self.head_dim, hidden, bias=False),
                "query_norm": Qwen3RMSNorm(self.head_dim, config.rms_norm_eps),
                "key_norm": Qwen3RMSNorm(self.head_dim, config.rms_norm_eps),
                "mlp_norm": Qwen3RMSNorm(hidden, config.rms_norm_eps),
                "mlp": Qwen3MLP(config),
            }
            self.layers.append(nn.ModuleDict(parts))
        self.norm = Qwen3RMSNorm(hidden, config.rms_norm_eps)

    def forward(self, block: Tensor, features: Tensor, cache: DynamicCache, start: int) -> Tensor:
        """Hidden states of a block [1, N, hidden] at position `start`, after features [1, C, taps * hidden]."""
        context = self.feature_norm(self.features(features))
        num_context = context.shape[1]
        positions = torch.arange(start - num_context, start + block.shape[1], device=block.device)[None]
        cos, sin = self.rope(block, positions)
        hidden = block
        for index, layer in enumerate(self.layers):
            parts: Any = layer
            normed = parts["input_norm"](hidden)
            query = parts["query_norm"](self._heads(parts["query"](normed)))
            rows = torch.cat((context, normed), dim=1)
            key, value = parts["key_norm"](self._heads(parts["key"](rows))), self._heads(parts["value"](rows))
            query, key = query.transpose(1, 2), key.transpose(1, 2)
            _, key = apply_rotary_pos_emb(key, key, cos, sin)
            query, _ = apply_rotary_pos_emb(query, query, cos[:, num_context:], sin[:, num_context:])
            keys, values = cache.update(key, value.transpose(1, 2), index)
            attended = nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
            hidden = hidden + parts["output"](attended.transpose(1, 2).flatten(2))
            hidden = hidden + parts["mlp"](parts["mlp_norm"](hidden))
        cache.crop(-block.shape[1])  # remove the block's rows
        normed_out: Tensor = self.norm(hidden)
        return normed_out

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], -1, self.head_dim)


class ReferenceLoop:
    """One request, block after block. `acceptance` is the forced mean length; None measures real acceptance."""

    def __init__(self, model: Qwen3ForCausalLM, shape: Shape, acceptance: float | None) -> None:
        self.model, self.shape = model, shape
        with _making(model.device):
            self.draft = ReferenceDraft(model.config, shape.draft_layers, len(shape.taps)).eval().requires_grad_(False)
        self.rates = None if acceptance is None else acceptance_rates(acceptance, shape.block)
        self.levels: list[float] = []

    @torch.inference_mode()
    def step_ms(self, context: int, num_steps: int) -> tuple[float, float]:
        """Milliseconds and tokens per step."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.tensor([random_prompt(self.shape, context, generator)], device=self.model.device)
        caches = DynamicCache(), DynamicCache()
        self.levels = _levels(num_steps)
        chosen, features = self._verify(ids, caches[0], 0)
        length, anchor = context, chosen[:, -1:]
        num_tokens, started = 0, 0.0
        for step in range(num_steps + NUM_WARM_STEPS):
            if step == NUM_WARM_STEPS:  # the first steps load kernels
                wait(self.model.device)
                num_tokens, started = 0, time.perf_counter()
            block = self._propose(anchor, features, caches[1], length)
            chosen, found = self._verify(block, caches[0], length)
            count = self._count(block, chosen) + 1
            if count < self.shape.block:
                caches[0].crop(count - self.shape.block)
            anchor, features = chosen[:, count - 1 : count], found[:, :count]
            length += count
            num_tokens += count
        wait(self.model.device)
        seconds = time.perf_counter() - started
        return seconds * 1000 / num_steps, num_tokens / num_steps

    def _propose(self, anchor: Tensor, features: Tensor, cache: DynamicCache, start: int) -> Tensor:
        """The anchor and the draft tokens [1, N]."""
        masks = anchor.new_full((1, self.shape.block - 1), self.shape.vocab - MASK_FROM_END)
        embedded = self.model.model.embed_tokens(torch.cat((anchor, masks), dim=1))
        hidden = self.draft(embedded, features, cache, start)
        drafted = self.model.lm_head(hidden[:, 1:]).argmax(-1)
        return torch.cat((anchor, drafted), dim=1)

    def _verify(self, ids: Tensor, cache: DynamicCache, start: int) -> tuple[Tensor, Tensor]:
        """The target's token after each row, and the outputs of the tapped layers."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        out = self.model(
            ids, position_ids=positions, past_key_values=cache, use_cache=True, output_hidden_states=True,
            logits_to_keep=self.shape.block,
        )  # fmt: skip
        tapped: list[Tensor] = [out.hidden_states[tap + 1] for tap in self.shape.taps]
        return out.logits.argmax(-1), torch.cat(tapped, dim=-1)

    def _count(self, block: Tensor, chosen: Tensor) -> int:
        """Number of accepted draft tokens. The host waits for it, as research code does."""
        real = int((block[:, 1:] == chosen[:, :-1]).long().cumprod(1).sum())
        if self.rates is None:
            return real
        level = self.levels.pop()
        return sum(level < rate for rate in self.rates)


def _levels(num_steps: int) -> list[float]:
    """Evenly spread levels in random order. Steps take levels from the end of the list, the warm-up steps first."""
    levels = [(index + 0.5) / num_steps for index in range(num_steps)]
    host_random.Random(0).shuffle(levels)
    return [*levels, *[0.5] * NUM_WARM_STEPS]


@contextmanager
def _making(device: torch.device) -> Iterator[None]:
    """Create modules on a device in its run dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(run_dtype(device))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
