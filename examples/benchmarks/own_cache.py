"""Time targets with their own cache beside transformers' plain `generate` with the same weights.

    python3 examples/benchmarks/own_cache.py [--families lfm2,rwkv] [--one-by-one] [--requests 8] [--tokens 96]
    python3 examples/benchmarks/own_cache.py --device cpu --size tiny

Each family is a model of transformers with random weights: 8 layers of width 1024, or 4 layers of width 128 with
`--size tiny`. The requests are equally long. `generate` runs them as one greedy batch, with transformers' default
attention and cache. Our engine runs them with a draft of 2 layers and blocks of 8 tokens. Random weights accept almost
nothing, so acceptance is forced to 3.5 tokens per step (`timing/forced.py`).

"ratio" is our tokens per second over `generate`'s. With `--one-by-one` every family is also timed with one request per
forward. "batching" is the result of the trial after loading. A family that this release of transformers lacks, or that
fails, prints one line. The table and the median come last.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.suite import pick_kernels
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.hosting.own_cache import Batching, OwnCacheTarget
from dflash_runtime.models.hosting.own_cache_trial import own_cache_target
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target_loading import find_target_runtime
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.sampling_params import SamplingParams
from hosted import make_draft
from timing.arguments import open_device, run_dtype
from timing.engine_arms import wait
from timing.forced import force_acceptance
from timing.report import release, say, table

MAX_LEN = 1024
PROMPT = 64
BLOCK = 8
ACCEPTANCE = 3.5
DRAFT_LAYERS = 2
HEAD = 64
Sizes = dict[str, Any]
Row = list[object]


def body(width: int, layers: int, vocab: int) -> Sizes:
    """Sizes that every family has."""
    return {
        "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD * 2, "num_key_value_heads": max(2, width // HEAD // 2),
        "head_dim": HEAD // 2, "vocab_size": vocab, "max_position_embeddings": MAX_LEN, "bos_token_id": None,
        "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip


def mamba2(width: int) -> Sizes:
    return {"mamba_n_heads": 2 * width // HEAD, "mamba_d_head": HEAD, "mamba_n_groups": 1, "mamba_d_state": 64}


def kinds(layers: int, usual: str, other: str) -> list[str]:
    """Layer types: three of `usual`, then one of `other`, and so on."""
    return [other if index % 4 == 3 else usual for index in range(layers)]


def experts(width: int) -> Sizes:
    return {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width}


def latent(width: int) -> Sizes:
    return {
        "kv_lora_rank": width // 4, "q_lora_rank": width // 2, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": width // HEAD * 2,
    }  # fmt: skip


FAMILIES: Mapping[str, Callable[[int, int], Sizes]] = {
    "lfm2": lambda width, layers: {"layer_types": kinds(layers, "conv", "full_attention")},
    "lfm2_moe": lambda width, layers: {
        "layer_types": kinds(layers, "conv", "full_attention"), **experts(width), "num_dense_layers": 1,
    },
    "lfm3": lambda width, layers: {},
    "falcon_h1": lambda width, layers: {**mamba2(width), "mamba_d_ssm": 2 * width, "mamba_expand": 2},
    "bamba": lambda width, layers: {**mamba2(width), "attn_layer_indices": list(range(3, layers, 4))},
    "granitemoehybrid": lambda width, layers: {
        **mamba2(width), "layer_types": kinds(layers, "mamba", "attention"), "num_local_experts": 8,
        "num_experts_per_tok": 2, "shared_intermediate_size": width,
    },
    "nemotron_h": lambda width, layers: {
        "layers_block_type": ["mamba", "mlp", "mamba", "attention"] * (layers // 4), "n_groups": 1,
        "mamba_num_heads": 2 * width // HEAD, "mamba_head_dim": HEAD, "ssm_state_size": 64,
    },
    "zamba2": lambda width, layers: {
        "mamba_d_state": 64, "n_mamba_heads": 2 * width // HEAD, "mamba_headdim": HEAD, "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid"] * (layers // 2),
    },
    "mamba2": lambda width, layers: {"state_size": 64, "num_heads": 2 * width // HEAD, "head_dim": HEAD, "n_groups": 1},
    "jamba": lambda width, layers: {
        "attn_layer_period": 4, "attn_layer_offset": 3, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 8, "mamba_d_state": 16,
    },
    "mamba": lambda width, layers: {"state_size": 16},
    "falcon_mamba": lambda width, layers: {"state_size": 16},
    "rwkv": lambda width, layers: {"attention_hidden_size": width},
    "kimi_linear": lambda width, layers: {
        **latent(width), "num_experts": 8, "num_experts_per_token": 2,
        "linear_attn_config": {
            "full_attn_layers": list(range(4, layers + 1, 4)),
            "kda_layers": [index for index in range(1, layers + 1) if index % 4], "head_dim": HEAD,
            "num_heads": width // HEAD, "short_conv_kernel_size": 4,
        },
    },
    "bailing_hybrid": lambda width, layers: {
        **latent(width), "layer_types": kinds(layers, "linear_attention", "full_attention"),
    },
    "olmo_hybrid": lambda width, layers: {
        "layer_types": kinds(layers, "linear_attention", "full_attention"), "linear_num_value_heads": width // HEAD,
        "linear_num_key_heads": width // HEAD, "linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD,
    },
    "minimax": lambda width, layers: {
        "layer_types": kinds(layers, "linear_attention", "full_attention"), "num_local_experts": 8,
    },
    "inkling_text": lambda width, layers: {
        "layer_types": kinds(layers, "hybrid_sliding", "hybrid"), "sliding_window_size": 128, "d_rel": 16,
        "swa_num_attention_heads": width // HEAD, "swa_num_key_value_heads": 2, "swa_head_dim": HEAD, "rel_extent": 128,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": width,
    },
    "llama4_text": lambda width, layers: {
        "layer_types": kinds(layers, "chunked_attention", "full_attention"), "attention_chunk_size": 256,
        "num_local_experts": 8, "intermediate_size_mlp": 2 * width, "interleave_moe_layer_step": 2,
    },
    "mimo_v2_flash": lambda width, layers: {
        "layer_types": kinds(layers, "sliding_attention", "full_attention"), "sliding_window": 128,
        "v_head_dim": HEAD // 2,
    },
    "deepseek_v32": lambda width, layers: {
        **latent(width), "index_topk": 128, "index_n_heads": 16, "index_head_dim": HEAD,
    },
    "diffllama": lambda width, layers: {},
}  # fmt: skip
"""Model type -> the keys of its config beyond `body`, by width and number of layers."""

SIZES = {"mid": (1024, 8, 32768), "tiny": (128, 4, 512)}
"""Width, layers and vocabulary."""


def make_model(family: str, size: str, placement: Placement) -> Any:
    """A random model of transformers on the device, with transformers' default attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    width, layers, vocab = SIZES[size]
    config = AutoConfig.for_model(family, **{**body(width, layers, vocab), **FAMILIES[family](width, layers)})
    torch.manual_seed(5)
    with placement.device:
        model = AutoModelForCausalLM.from_config(config, dtype=placement.dtype)
    return model.eval().requires_grad_(False)


def make_target(model: Any, placement: Placement) -> OwnCacheTarget:
    """The model as a target with its own cache."""
    model.set_attn_implementation("eager")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file({}, Path(folder) / "model.safetensors")  # the config alone is read
        _, config = find_target_runtime(open_target(Path(folder)), "transformers-cache")
        return own_cache_target(model, config, placement)


def random_prompts(vocab: int, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, vocab, (count, PROMPT), generator=generator).tolist()


def generated(model: Any, prompts: list[list[int]], num_tokens: int, device: torch.device) -> float:
    """Tokens per second of `generate`, the better of two runs after a first one."""
    ids = torch.tensor(prompts, device=device)
    model.generation_config.eos_token_id = None  # every text has all its tokens

    def run(length: int) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, pad_token_id=0,
        )  # fmt: skip

    run(8)
    return len(prompts) * num_tokens / min(seconds(lambda: run(num_tokens), device) for _ in range(2))


def ours(target: OwnCacheTarget, prompts: list[list[int]], num_tokens: int, placement: Placement) -> float:
    """Tokens per second of our engine, the better of two runs after a first one."""
    limits = Limits(
        num_draft_tokens=BLOCK - 1, max_model_len=MAX_LEN, max_num_requests=len(prompts),
        vocab_size=target.config.vocab_size, max_batched_tokens=2048,
    )  # fmt: skip
    config = EngineConfig(max_num_requests=len(prompts), num_pages=80 * len(prompts) + 16, prefix_cache=False)
    draft = make_draft(target, placement, DRAFT_LAYERS, BLOCK)
    pair = LoadedPair(target=target, draft=draft, placement=placement, limits=limits, config=config)
    llm = LLM(force_acceptance(pair, ACCEPTANCE))

    def run(length: int) -> None:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=length, ignore_eos=True))
        failed = [output.error for output in outputs if output.error is not None or len(output.token_ids) != length]
        if failed:
            raise RuntimeError(f"a request failed: {failed[0]}")

    run(8)
    return len(prompts) * num_tokens / min(seconds(lambda: run(num_tokens), placement.device) for _ in range(2))


def seconds(run: Callable[[], None], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - began


def measure(family: str, given: argparse.Namespace, placement: Placement) -> Row:
    """Row of a family: name, how it is read, batching, tokens per second of each way, and ratios."""
    model = make_model(family, given.size, placement)
    prompts = random_prompts(SIZES[given.size][2], given.requests)
    with torch.inference_mode():
        theirs = generated(model, prompts, given.tokens, placement.device)
        target = make_target(model, placement)
        after = ours(target, prompts, given.tokens, placement)
        before, batching = None, target.batching
        if given.one_by_one:
            target.batching = Batching()
            before = ours(target, prompts, given.tokens, placement)
    reads = "at once" if target.reads_at_once else "one token"
    shared = "any length" if batching.any_length else "equal length" if batching.same_length else "one by one"
    return [family, reads, shared, theirs, before, after, None if before is None else before / theirs, after / theirs]


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="model types (default: all)")
    parser.add_argument("--one-by-one", action="store_true", help="also time one request per forward")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each request")
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    device = open_device(given.device)
    dtype = run_dtype(device)
    placement = Placement(device, dtype, pick_kernels("auto", device, dtype), MAX_LEN + BLOCK)
    from transformers import CONFIG_MAPPING, logging

    logging.set_verbosity_error()
    rows: list[Row] = []
    num_failures = 0
    for family in given.families.split(","):
        if family not in CONFIG_MAPPING:
            say(f"{family}: this release of transformers lacks it")
            continue
        began = time.perf_counter()
        try:
            rows.append(measure(family, given, placement))
            say(f"{', '.join(map(_cell, rows[-1]))}; {time.perf_counter() - began:.0f} s in all")
        except Exception as error:
            num_failures += 1
            say(f"{family} failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        release()
    headings = ("family", "blocks", "batching", "generate tok/s", "one by one tok/s", "ours tok/s", "before", "ratio")
    print(table(headings, rows))
    if rows:
        print(f"median ratio {statistics.median(float(str(row[-1])) for row in rows):.2f}")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
