"""Pairs of real shapes with random weights, created on the device. Nothing is downloaded."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dflash_kernels.suite import pick_kernels
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.device.settings import rows_of_a_step
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.models.decoder_target import DecoderTarget
from dflash_runtime.models.expert_stacks import stack_experts
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.qwen3 import Qwen3Target
from dflash_runtime.models.qwen3_5 import Qwen35Target
from dflash_runtime.models.qwen3_5_moe import Qwen35MoeTarget
from dflash_runtime.models.target import TargetFamily, family_cuts, target_families
from dflash_runtime.models.target_shares import share_config
from dflash_runtime.models.weights import Weights, stack_projections
from dflash_runtime.ranks.rank_group import ALONE, Ranks
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.target_config import ExpertsConfig, RecurrenceConfig, TargetConfig

BLOCK = 16
MASK_FROM_END = 267
"""Distance of the mask token from the end of the vocabulary. Published drafts use 151669 of 151936."""


@dataclass(frozen=True)
class Recurrence:
    """Sizes of the recurrent layers of a target, of which every `attention_every`-th attends."""

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
        2560,
        9216,
        32,
        16,
        (1, 8, 15, 22, 29),
        is_tied=True,
        vocab=248320,
        kv_heads=4,
        head_dim=256,
        draft_heads=(32, 8, 128),
        recurrence=Recurrence(key_heads=16, value_heads=32),
    ),
    "qwen3.8-27b": Shape(
        5120,
        17408,
        64,
        24,
        (5, 19, 33, 47, 61),
        is_tied=False,
        vocab=248320,
        kv_heads=4,
        head_dim=256,
        draft_heads=(32, 8, 128),
        recurrence=Recurrence(key_heads=16, value_heads=48),
    ),
    "qwen3.6-35b-a3b": Shape(
        2048,
        6144,
        40,
        16,
        (1, 10, 19, 28, 37),
        is_tied=False,
        vocab=248320,
        kv_heads=2,
        head_dim=256,
        draft_layers=8,
        draft_heads=(32, 4, 128),
        recurrence=Recurrence(key_heads=16, value_heads=32),
        experts=RoutedExperts(count=256, chosen=8, inner=512),
    ),
    "gpt-oss-20b": Shape(
        2880,
        7680,
        24,
        64,
        (1, 6, 11, 16, 21),
        is_tied=False,
        vocab=201088,
        head_dim=64,
        draft_layers=8,
        family="gpt_oss",
        window=128,
        full_every=2,
        experts=RoutedExperts(count=32, chosen=4, inner=2880, beside=0, weight_bytes=17 / 32),
    ),
    "gemma-4-31b": Shape(
        5376,
        21504,
        60,
        32,
        (1, 13, 24, 35, 46, 57),
        is_tied=True,
        vocab=262144,
        kv_heads=16,
        head_dim=256,
        draft_heads=(64, 8, 128),
        family="gemma4_text",
        window=1024,
        full_every=6,
        full_heads=(4, 512),
        has_equal_kv=True,
    ),
    "gemma-4-26b-a4b": Shape(
        2816,
        2112,
        30,
        16,
        (1, 8, 14, 20, 27),
        is_tied=True,
        vocab=262144,
        kv_heads=8,
        head_dim=256,
        draft_heads=(32, 8, 128),
        family="gemma4_text",
        window=1024,
        full_every=6,
        full_heads=(2, 512),
        has_equal_kv=True,
        experts=RoutedExperts(count=128, chosen=8, inner=704, beside=2112),
    ),
    "small-gemma": Shape(
        128,
        256,
        4,
        4,
        (0, 3),
        is_tied=True,
        vocab=512,
        kv_heads=2,
        head_dim=64,
        draft_layers=1,
        draft_heads=(4, 2, 64),
        family="gemma4_text",
        window=64,
        full_every=2,
        full_heads=(1, 128),
        has_equal_kv=True,
        experts=RoutedExperts(count=8, chosen=2, inner=64, beside=256),
    ),
    "small-gpt-oss": Shape(
        128,
        256,
        4,
        4,
        (0, 3),
        is_tied=False,
        vocab=512,
        kv_heads=2,
        head_dim=64,
        draft_layers=1,
        family="gpt_oss",
        window=128,
        full_every=2,
        experts=RoutedExperts(count=8, chosen=2, inner=64, beside=0, weight_bytes=17 / 32),
    ),
    "small-experts": Shape(
        128,
        256,
        4,
        4,
        (0, 3),
        is_tied=True,
        vocab=512,
        kv_heads=2,
        draft_layers=1,
        recurrence=Recurrence(key_heads=2, value_heads=4, head_size=32),
        experts=RoutedExperts(count=8, chosen=2, inner=32),
    ),
    "small-hybrid": Shape(
        128,
        256,
        4,
        4,
        (0, 3),
        is_tied=True,
        vocab=512,
        kv_heads=2,
        draft_layers=1,
        recurrence=Recurrence(key_heads=2, value_heads=4, head_size=32),
    ),
    "small": Shape(128, 256, 2, 4, (0, 1), is_tied=True, vocab=512, kv_heads=2, draft_layers=1),
}


Tensors = Iterator[tuple[str, Tensor]]

MODEL_TYPES: Mapping[type[DecoderTarget], str] = {
    Qwen3Target: "qwen3", Qwen35Target: "qwen3_5_text", Qwen35MoeTarget: "qwen3_5_moe_text",
}  # fmt: skip


@dataclass(frozen=True)
class RandomPair:
    """A pair, and its weights under the names that models read. `variants` has pairs of further arms.

    target_weights  gives the target's weights, which are read once more if they are in files
    """

    shape: Shape
    pair: LoadedPair
    target_weights: Callable[[], Weights]
    draft_weights: Weights
    variants: dict[str, LoadedPair] = field(default_factory=dict)


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `shape_of` reads."""
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument(
        "--block", type=int, choices=range(2, BLOCK + 1), default=BLOCK, metavar="ROWS",
        help=f"rows of a block, one more than the draft tokens, in both programs (default: {BLOCK})",
    )  # fmt: skip


def shape_of(given: argparse.Namespace) -> Shape:
    """The asked shape, with blocks of the asked number of rows."""
    return replace(SHAPES[given.shape], block=given.block)


def open_device(name: str) -> torch.device:
    """The device to measure on, made current. Ends the program if a CUDA device is missing."""
    device = torch.device(name)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device, or --device cpu with --shape small")
    device = torch.device("cuda", device.index or 0)
    torch.cuda.set_device(device)
    return device


def run_dtype(device: torch.device) -> torch.dtype:
    """The dtype of models on the device."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def counts(text: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    return [int(part) for part in text.split(",")]


def log_uniform(levels: Tensor, shortest: int, longest: int) -> list[int]:
    """Log-uniform lengths from levels in [0, 1)."""
    return [round(shortest * (longest / shortest) ** level) for level in levels.tolist()]


def build_pair(shape: Shape, max_model_len: int, device: torch.device, ranks: Ranks = ALONE) -> RandomPair:
    """A random pair: bfloat16 and Triton on a GPU, float32 and reference kernels on the CPU.

    Of several ranks, each has its share of the weights that one rank would have.
    """
    dtype = run_dtype(device)
    kernels = pick_kernels("auto", device, dtype)
    placement = Placement(device, dtype, kernels, max_model_len + BLOCK, ranks=ranks)
    whole, draft_config = model_configs(shape)
    target_config, family = share_config(whole, ranks.size), family_of(shape)
    drawn, draft_own = drawn_weights(shape, placement)
    cuts = family_cuts(family, whole, ranks) if ranks.size > 1 else {}
    own = ((name, cuts[name].of(tensor).contiguous() if name in cuts else tensor) for name, tensor in drawn)
    target_weights = stacked_weights(family, target_config, own)
    draft_weights = stack_projections(draft_own)
    target = family(target_config, target_weights, placement)
    limits = Limits(
        num_draft_tokens=shape.block - 1, max_model_len=max_model_len, max_num_requests=1, vocab_size=shape.vocab,
        max_batched_tokens=rows_of_a_step(EngineConfig(), placement.kernels),
    )  # fmt: skip
    draft = DFlashDraft(draft_config, draft_weights, target, placement)
    pair = LoadedPair(target=target, draft=draft, placement=placement, limits=limits, config=EngineConfig())
    return RandomPair(shape, pair, lambda: target_weights, draft_weights)


def stacked_weights(family: TargetFamily, config: TargetConfig, tensors: Tensors) -> Weights:
    """A checkpoint's tensors as a native target of the family reads them."""
    arrange = getattr(family, "arrange", lambda _, tensor: tensor)
    arranged = ((name, arrange(name, tensor)) for name, tensor in tensors)
    return stack_projections(stack_experts(arranged, family.expected_shapes(config)))


def drawn_weights(shape: Shape, placement: Placement) -> tuple[Tensors, Tensors]:
    """Weights of target and draft under a checkpoint's names. Read the target's first: one generator draws both."""
    torch.manual_seed(0)
    target, draft = model_configs(shape)
    return (
        normal_weights(family_of(shape).expected_shapes(target), placement),
        normal_weights(owned_shapes(draft), placement),
    )


def family_of(shape: Shape) -> type[DecoderTarget]:
    """The class of a target."""
    if shape.family is not None:
        return cast(type[DecoderTarget], target_families()[shape.family])
    if shape.recurrence is None:
        return Qwen3Target
    return Qwen35Target if shape.experts is None else Qwen35MoeTarget


def random_prompt(shape: Shape, length: int, generator: torch.Generator) -> tuple[int, ...]:
    """Random ids from the middle of the vocabulary, without special tokens."""
    ids = torch.randint(shape.vocab // 100, shape.vocab * 98 // 100, (length,), generator=generator)
    return tuple(ids.tolist())


def hf_config(shape: Shape) -> dict[str, Any]:
    """The target's config in the form of a checkpoint, for other engines.

    Raises:
        NotImplementedError: the target is a Qwen with experts.
    """
    if shape.family is not None:
        return FAMILY_CONFIGS[shape.family](shape)
    if shape.experts is not None:
        raise NotImplementedError("configs of targets with experts are not written")
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    config = _config(shape, heads, shape.layers) | {"tie_word_embeddings": shape.is_tied}
    own = shape.recurrence
    if own is None:
        return config
    rope = {"rope_type": "default", "rope_theta": 1000000, "partial_rotary_factor": 0.25}
    return config | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "attn_output_gate": True,
        "full_attention_interval": own.attention_every, "linear_conv_kernel_dim": own.taps,
        "layer_types": [
            "linear_attention" if layer in shape.recurrent_layers else "full_attention" for layer in range(shape.layers)
        ],
        "linear_key_head_dim": own.head_size, "linear_value_head_dim": own.head_size,
        "linear_num_key_heads": own.key_heads, "linear_num_value_heads": own.value_heads,
        "mamba_ssm_dtype": "float32", "partial_rotary_factor": 0.25,
        "rope_parameters": rope | {"mrope_section": [11, 11, 10], "mrope_interleaved": True},
    }  # fmt: skip


def hf_draft_config(shape: Shape) -> dict[str, Any]:
    """The draft's config in the native dialect."""
    return _config(shape, shape.heads_of_draft, shape.draft_layers) | {
        "architectures": ["DFlashDraftModel"], "block_size": shape.block, "tie_word_embeddings": shape.is_tied,
        "num_target_layers": shape.layers, "layer_types": ["full_attention"] * shape.draft_layers,
        "dflash_config": {"mask_token_id": shape.vocab - MASK_FROM_END, "target_layer_ids": list(shape.taps)},
    }  # fmt: skip


def _config(shape: Shape, heads: tuple[int, int, int], num_layers: int) -> dict[str, Any]:
    """The keys of a Qwen3 of this width, vocabulary, and heads: query heads, KV heads, head size."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": shape.hidden,
        "intermediate_size": shape.inner, "num_hidden_layers": num_layers, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": heads[2], "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": num_layers,
        "bos_token_id": shape.vocab - 2, "eos_token_id": shape.vocab - 1,
    }  # fmt: skip


def model_configs(shape: Shape) -> tuple[TargetConfig, DraftConfig]:
    """The configs of target and draft, as the runtime reads them."""
    common: dict[str, Any] = {
        "hidden_size": shape.hidden, "intermediate_size": shape.inner, "num_heads": shape.heads,
        "num_kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "rms_norm_eps": 1e-6,
        "max_position_embeddings": shape.positions, "rope": RopeConfig(theta=1e6), "vocab_size": shape.vocab,
    }  # fmt: skip
    target = read_family_config(shape) if shape.family is not None else _qwen_config(shape, common)
    heads, kv_heads, head_dim = shape.heads_of_draft
    common |= {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    draft = DraftConfig(
        num_layers=shape.draft_layers, block_size=shape.block, target_layer_ids=shape.taps,
        num_target_layers=shape.layers, mask_token_id=shape.vocab - MASK_FROM_END, draft_vocab_size=shape.vocab,
        causal=(False,) * shape.draft_layers, windows=(None,) * shape.draft_layers, **common,
    )  # fmt: skip
    return target, draft


def _qwen_config(shape: Shape, common: dict[str, Any]) -> TargetConfig:
    return TargetConfig(
        model_type=MODEL_TYPES[family_of(shape)], num_layers=shape.layers, experts=_experts(shape),
        tie_word_embeddings=shape.is_tied, windows=(None,) * shape.layers, eos_token_ids=(),
        recurrence=_recurrence(shape), rotary_dim=None if shape.recurrence is None else shape.head_dim // 4, **common,
    )  # fmt: skip


def read_family_config(shape: Shape) -> TargetConfig:
    """The config of a target, read by its family."""
    read: Any = family_of(shape).read_config  # type: ignore[attr-defined]
    config: TargetConfig = read(hf_config(shape), Path("config.json"))
    return config


def _gpt_oss_config(shape: Shape) -> dict[str, Any]:
    own = shape.experts
    assert own is not None
    yarn = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    return {
        **_config(shape, (shape.heads, shape.kv_heads, shape.head_dim), shape.layers),
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "intermediate_size": own.inner, "num_local_experts": own.count, "num_experts_per_tok": own.chosen,
        "use_sliding_window": None, "sliding_window": shape.window, "layer_types": _layer_types(shape),
        "rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "truncate": False, **yarn}, "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0, "quantization_config": {"quant_method": "mxfp4"}, "tie_word_embeddings": False,
    }  # fmt: skip


def _layer_types(shape: Shape) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for *_, window in shape.attention_layers]


def _gemma4_config(shape: Shape) -> dict[str, Any]:
    own, full_heads = shape.experts, shape.full_heads or (shape.kv_heads, shape.head_dim)
    experts = {} if own is None else {
        "enable_moe_block": True, "num_experts": own.count, "top_k_experts": own.chosen,
        "moe_intermediate_size": own.inner, "intermediate_size": own.beside,
    }  # fmt: skip
    turned = {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}
    config = _config(shape, (shape.heads, shape.kv_heads, shape.head_dim), shape.layers)
    return {
        **{key: item for key, item in config.items() if key not in ("rope_theta", "use_sliding_window")},
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "attention_k_eq_v": shape.has_equal_kv,
        "final_logit_softcapping": 30.0, "global_head_dim": full_heads[1], "num_global_key_value_heads": full_heads[0],
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "layer_types": _layer_types(shape), "sliding_window": shape.window, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": turned, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}
        },
        **experts,
    }  # fmt: skip


FAMILY_CONFIGS: Mapping[str, Callable[[Shape], dict[str, Any]]] = {
    "gpt_oss": _gpt_oss_config, "gemma4_text": _gemma4_config
}  # fmt: skip
"""Model type -> its config in the form of a checkpoint."""


def _experts(shape: Shape) -> ExpertsConfig | None:
    own = shape.experts
    if own is None:
        return None
    return ExpertsConfig(
        num_experts=own.count, num_chosen=own.chosen, intermediate_size=own.inner, shared_size=own.inner,
        has_normalised_scores=True, layers=tuple(range(shape.layers)),
    )  # fmt: skip


def _recurrence(shape: Shape) -> RecurrenceConfig | None:
    own = shape.recurrence
    if own is None:
        return None
    return RecurrenceConfig(
        layers=shape.recurrent_layers, num_key_heads=own.key_heads, num_value_heads=own.value_heads,
        key_size=own.head_size, value_size=own.head_size, num_taps=own.taps,
    )  # fmt: skip


def normal_weights(shapes: Mapping[str, tuple[int, ...]], placement: Placement) -> Iterator[tuple[str, Tensor]]:
    """Random matrices, and norm weights of 1. Zeros would make products too fast."""
    for name, shape in shapes.items():
        if name.endswith(("_blocks", "_scales")):  # packed numbers, and exponents of about 2 ** -5
            low, high = (0, 256) if name.endswith("_blocks") else (120, 124)
            yield name, torch.randint(low, high, shape, device=placement.device, dtype=torch.uint8)
        elif len(shape) == 1:
            yield name, torch.ones(shape, device=placement.device, dtype=placement.dtype)
        else:
            yield name, torch.randn(shape, device=placement.device, dtype=placement.dtype) * 0.02
