"""Pairs for tests: the bundled one, small random ones, and drafts that are always right or always wrong."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention

from dflash_cli.checkpoints.opening import DraftCheckpoint, open_draft, open_target
from dflash_cli.checkpoints.references import Role, fetch_directory, tiny_directory
from dflash_cli.generation.tokenizer import Tokenizer
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.kv_format import KVScales
from dflash_kernels.recurrent.delta_rule import Gates
from dflash_kernels.suite import REFERENCE, Kernels
from dflash_runtime.checkpoint.layout import DRAFT_TO_TARGET, owned_shapes
from dflash_runtime.checkpoint.pair import DraftSource
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.device.setup.settings import resolve_kernels, resolve_kv_dtype, rows_of_a_step
from dflash_runtime.device.storage.recurrent import recall_alone
from dflash_runtime.draft_config import ConvolutionConfig, DraftConfig, MarkovConfig, SelectorConfig
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.drafts.draft import Draft, build_draft, load_draft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.families.qwen3 import Qwen3Target
from dflash_runtime.models.layers import Attend, PagedKV, Recall
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.target_config import TargetConfig

CPU = torch.device("cpu")
NUM_POSITIONS = 4096


def placement(dtype: torch.dtype = torch.float32, num_positions: int = NUM_POSITIONS) -> Placement:
    """The CPU with the references."""
    return Placement(CPU, dtype, REFERENCE, num_positions)


@cache
def bundled_draft(name: str = "tiny") -> DraftCheckpoint:
    """`tiny` or `tiny:reduced`, from headers."""
    return open_draft(fetch_directory(name, Role.DRAFT))


@cache
def bundled_target_model(dtype: torch.dtype = torch.float32) -> Target:
    """The bundled target on the CPU."""
    return load_target(open_target(tiny_directory() / "target"), placement(dtype))


def save_bundled_target(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """The bundled target with changed or added tensors and config keys."""
    source = tiny_directory() / "target"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    save_file({**load_file(source / "model.safetensors"), **tensors}, path / "model.safetensors")
    return path


@cache
def bundled_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_directory() / "target")


@cache
def bundled_prompts() -> tuple[tuple[int, ...], ...]:
    """Token ids of the bundled held-out prompts."""
    lines = (tiny_directory() / "prompts.jsonl").read_text().splitlines()
    return tuple(tuple(bundled_tokenizer().encode(json.loads(line)["prompt"])) for line in lines)


def bundled_draft_model(name: str = "tiny", dtype: torch.dtype = torch.float32, **changes: Any) -> Draft:
    """A bundled draft, optionally read differently: `causal=(True, True, True)`."""
    source = bundled_draft(name).source
    source = DraftSource(replace(source.config, **changes), source.checkpoint)
    return load_draft(source, bundled_target_model(dtype), placement(dtype))


def bundled_llm(
    draft: Draft | None,
    num_draft_tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    max_num_requests: int = 1,
    max_model_len: int | None = None,
    **engine: Any,
) -> LLM:
    """The bundled target with any draft object, on a synchronous engine unless asked otherwise."""
    engine["max_num_requests"] = max_num_requests
    return random_llm(bundled_target_model(dtype), draft, num_draft_tokens, max_model_len=max_model_len, **engine)


class ScriptedDraft:
    """Proposes what a function says, knowing which positions it is asked about.

    `script(position) -> token id`. It keeps context KV like any draft, so that the engine around it does all its work.
    """

    def __init__(self, draft: Draft, script: Callable[[int], int]) -> None:
        self.config = draft.config
        self.target_ids: Tensor | None = None
        self._draft = draft
        self._script = script

    def write_context(self, features: Tensor, positions: Tensor, cache: PagedKV, slots: Tensor) -> None:
        self._draft.write_context(features, positions, cache, slots)

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        drafted = torch.tensor([[self._script(int(position)) for position in row[1:]] for row in positions])
        return one_hot(drafted, self.config.vocab_size).float()[:, :num_drafts]


def always_right(draft: Draft, sequence: Sequence[int]) -> ScriptedDraft:
    """A draft that knows the whole sequence, prompt included; past its end it says 0."""
    return ScriptedDraft(draft, lambda position: sequence[position] if position < len(sequence) else 0)


def always_wrong(draft: Draft, sequence: Sequence[int]) -> ScriptedDraft:
    """A draft that avoids the right token at every position."""
    return ScriptedDraft(draft, lambda position: (sequence[position] + 1) % 7 if position < len(sequence) else 0)


def always_mask(draft: Draft) -> ScriptedDraft:
    """A draft that proposes its mask token."""
    return ScriptedDraft(draft, lambda position: draft.config.mask_token_id)


def random_target(
    dtype: torch.dtype = torch.float32,
    *,
    seed: int = 0,
    scale: float = 0.3,
    kernels: Kernels = REFERENCE,
    **changes: Any,
) -> Qwen3Target:
    """A small target with random weights; a smaller `scale` gives flatter distributions."""
    values: dict[str, Any] = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope": RopeConfig(theta=10_000.0),
        "vocab_size": 97,
    }
    values |= changes
    values.setdefault("windows", (None,) * values["num_layers"])
    config = TargetConfig(**values)
    weights = random_weights(Qwen3Target.expected_shapes(config), dtype, seed, scale)
    return Qwen3Target(config, stack_projections(weights.items()), replace(placement(dtype), kernels=kernels))


def random_draft_config(target: TargetConfig, **changes: Any) -> DraftConfig:
    """A two-layer draft for a target."""
    values: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": target.max_position_embeddings,
        "rope": RopeConfig(theta=target.rope.theta),
        "block_size": 8,
        "target_layer_ids": (0, target.num_layers - 2),
        "mask_token_id": target.vocab_size - 1,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
    }
    values |= changes
    values.setdefault("causal", (False,) * values["num_layers"])
    values.setdefault("windows", (None,) * values["num_layers"])
    return DraftConfig(**values)


def random_draft(
    target: Target, dtype: torch.dtype = torch.float32, *, seed: int = 1, kernels: Kernels = REFERENCE, **changes: Any
) -> DFlashDraft:
    """A small draft with random weights, bound to a target."""
    config = random_draft_config(target.config, **changes)
    weights = random_weights(owned_shapes(config), dtype, seed)
    if config.has_reduced_vocab:
        ids = torch.linspace(0, config.vocab_size - 1, config.draft_vocab_size).long()
        weights[DRAFT_TO_TARGET] = ids - torch.arange(config.draft_vocab_size)
    placed = replace(placement(dtype), kernels=kernels)
    draft = build_draft(config, stack_projections(weights.items()), target, placed)
    assert isinstance(draft, DFlashDraft)
    return draft


DFLASH2: dict[str, Any] = {
    "family": "dflash2",
    "convolution": ConvolutionConfig(kernel_size=2, group_size=4),
    "selector": SelectorConfig(rank=5, top_k=4),
}
"""Changes that make a random draft a DFlash 2 draft."""

DSPARK: dict[str, Any] = {
    "family": "dspark",
    "markov": MarkovConfig(rank=5, head_type="gated"),
    "sample_from_anchor": True,
    "block_size": 7,
    "has_confidence": True,
}
"""Changes that make a random draft a DSpark draft with 7 draft tokens."""


def random_llm(
    target: Target,
    draft: Draft | None,
    num_draft_tokens: int,
    *,
    max_model_len: int | None = None,
    kv_scales: Mapping[int, KVScales] | None = None,
    **engine: Any,
) -> LLM:
    """An LLM around loaded models, on a synchronous engine unless asked otherwise."""
    settings: dict[str, Any] = {"scheduling": "sync", "num_pages": 1000} | engine
    config = EngineConfig(**settings)
    limits = Limits(
        num_draft_tokens=num_draft_tokens,
        max_model_len=max_model_len or target.config.max_position_embeddings,
        max_num_requests=config.max_num_requests,
        vocab_size=target.config.vocab_size,
        max_batched_tokens=rows_of_a_step(config, REFERENCE),
        num_tree_nodes=config.num_tree_nodes or 0 if num_draft_tokens else 0,
    )
    kernels = REFERENCE if config.kernels == "auto" else resolve_kernels(config.kernels, CPU, target.embedding.dtype)
    kv_dtype = resolve_kv_dtype(config.kv_dtype)
    placed = replace(placement(target.embedding.dtype), kernels=kernels, kv_dtype=kv_dtype)
    return LLM(
        LoadedPair(
            target=target, draft=draft, placement=placed, limits=limits, config=config, kv_scales=kv_scales or {}
        )
    )


def random_weights(
    shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int, scale: float = 0.3
) -> dict[str, Tensor]:
    """Normal matrices and norm scales near one."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * scale + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


class DenseAttention(Attend):
    """A plain `Attend` over the rows alone, kept nowhere; one call of torch's attention.

    `memory` serves recurrent layers.
    """

    def __init__(self, *, is_causal: bool, memory: Recall | None = None) -> None:
        self._is_causal, self._memory = is_causal, memory

    def recall(self, layer: int, rows: Tensor, taps: Tensor, gates: Gates, out: Tensor | None = None) -> Tensor:
        assert self._memory is not None, "these models have no recurrent layer"
        return self._memory.recall(layer, rows, taps, gates, out)

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        if softmax != PLAIN:
            return self._attend(query, keys, values, softmax)
        query, keys, values = (heads[None].transpose(1, 2) for heads in (query, keys, values))
        attended = scaled_dot_product_attention(query, keys, values, is_causal=self._is_causal, enable_gqa=True)
        return attended.transpose(1, 2)[0]

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax) -> Tensor:
        """Attention with sinks."""
        assert softmax.sinks is not None
        assert softmax.cap is None
        group = query.shape[1] // keys.shape[1]
        scores = torch.einsum("thd,shd->hts", query, keys.repeat_interleave(group, 1)) * query.shape[2] ** -0.5
        if self._is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[1:], dtype=torch.bool).tril(), -torch.inf)
        sinks = softmax.sinks[:, None, None].expand(-1, len(query), 1)
        weights = torch.cat((scores, sinks), dim=2).softmax(2)[..., :-1]
        return torch.einsum("hts,shd->thd", weights, values.repeat_interleave(group, 1))

    read = __call__

    def place(self, layer: int) -> None:
        return None


def target_logits(target: Target, tokens: Sequence[int]) -> Tensor:
    """[T, V] logits of a plain forward over a text, by no part of the engine but the model and one attention call."""
    memory = recall_alone(target.config.recurrence, len(tokens), placement(target.embedding.dtype))
    attend = DenseAttention(is_causal=True, memory=memory)
    with torch.inference_mode():
        hidden, _ = target(torch.tensor(tokens), torch.arange(len(tokens)), attend, ())
        logits: Tensor = target.head(hidden)
    return logits
