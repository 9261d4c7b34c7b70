"""Time targets that run through transformers' code, over our pages and with its own cache, with random weights.

    python3 examples/benchmarks/hosted.py [--shape qwen3.5-4b] [--batches 1,4] [--device cpu --shape small]

A random model of transformers' classes is saved in a temporary folder and loaded like any target, trial included. A
drafting step accepts almost nothing, so nearly every block must be taken back. "wrong" counts tokens of a text that
are not the target's best choice in one forward without a cache; "ties" are within rounding. A runtime that fails
prints one line. The table comes last.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.suite import pick_kernels
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.config import DraftConfig, EngineConfig, RopeConfig
from dflash_runtime.device.loading import LoadedPair
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.llm import LLM
from dflash_runtime.models.own_cache import OwnCacheTarget
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target, load_target
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.request import SamplingParams
from experts import make, step_ms
from timing.pairs import BLOCK, counts, open_device, run_dtype
from timing.report import say, table

MAX_LEN = 1024
Row = list[object]


@dataclass(frozen=True)
class Shape:
    """A model type with its sizes, and the runtimes to time."""

    model_type: str
    vocab: int
    sizes: Mapping[str, Any]
    runtimes: tuple[str, ...]
    steps: int = 24


def linear(layers: int, **sizes: Any) -> dict[str, Any]:
    """Sizes of a model with gated delta nets in all layers except every fourth."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (layers // 4)
    return {"num_hidden_layers": layers, "layer_types": kinds, **sizes}


SHAPES = {
    "qwen3.5-4b": Shape(
        "qwen3_5_text", 248320,
        linear(
            32, hidden_size=2560, intermediate_size=9216, num_attention_heads=16, num_key_value_heads=4, head_dim=256,
            linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
        ("transformers-cache",),
    ),
    "qwen3-4b": Shape(
        "qwen3", 151936,
        {
            "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
        ("native", "transformers", "transformers-cache"),
    ),
    "small": Shape(
        "qwen3_5_text", 256,
        linear(
            4, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        ),
        ("transformers-cache",), 4,
    ),
}  # fmt: skip


def save_model(shape: Shape, path: Path, placement: Placement) -> None:
    """Save a random model as a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stated = {"vocab_size": shape.vocab, "max_position_embeddings": MAX_LEN, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(shape.model_type, **stated, **shape.sizes)
    with placement.device:
        model = AutoModelForCausalLM.from_config(config, dtype=placement.dtype)
    model.save_pretrained(path)


def make_draft(target: Target, placement: Placement) -> DFlashDraft:
    config = target.config
    last = config.num_layers - 1
    heads = max(4, config.hidden_size // 128)
    draft = DraftConfig(
        hidden_size=config.hidden_size, intermediate_size=3 * config.hidden_size, num_layers=5, num_heads=heads,
        num_kv_heads=4, head_dim=128 if heads > 4 else 8, rms_norm_eps=1e-6, max_position_embeddings=MAX_LEN,
        rope=RopeConfig(theta=1e6), block_size=BLOCK, target_layer_ids=(1, last // 2, last - 1), mask_token_id=0,
        vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size, causal=(False,) * 5, windows=(None,) * 5,
    )  # fmt: skip
    weights = {name: make(name, size, placement) for name, size in owned_shapes(draft).items()}
    return DFlashDraft(draft, stack_projections(weights.items()), target, placement)


def measure(shape: Shape, runtime: str, batches: Sequence[int], path: Path, placement: Placement) -> list[Row]:
    """Rows of one runtime: how blocks are read, arm, batch, ms per step, wrong tokens, ties."""
    began = time.perf_counter()
    target = load_target(open_target(path), placement, runtime)
    way = "paged"
    if isinstance(target, OwnCacheTarget):
        way = "cropped" if target.can_crop else "at once" if target.reads_at_once else "token by token"
    say(f"{runtime}: loaded and tried in {time.perf_counter() - began:.0f} s, {way}, {target.config.own_cache}")
    draft, rows = make_draft(target, placement), []
    for arm, num_drafts in (("plain", 0), ("dflash", BLOCK - 1)):
        for batch in batches:
            limits = Limits(
                num_draft_tokens=num_drafts, max_model_len=MAX_LEN, max_num_requests=batch, vocab_size=shape.vocab,
                max_batched_tokens=2048,
            )  # fmt: skip
            config = EngineConfig(max_num_requests=batch, num_pages=80 * batch + 16, prefix_cache=False)
            pair = LoadedPair(
                target=target, draft=draft if num_drafts else None, placement=placement, limits=limits, config=config
            )
            (milliseconds,) = step_ms(pair, shape, batch)  # type: ignore[arg-type]
            rows.append([runtime, way, arm, batch, milliseconds, *judge(pair, shape)])
            say(" ".join(map(str, rows[-1])))
    return rows


def judge(pair: LoadedPair, shape: Shape) -> tuple[int, int]:
    """Numbers of wrong tokens and near-ties in one text."""
    prompt = torch.randint(1, shape.vocab - 1, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    llm = LLM(pair)
    verdict = llm.check_lossless(llm.generate([prompt], SamplingParams(max_new_tokens=64, ignore_eos=True)))
    return verdict.num_wrong, verdict.num_near_ties


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-4b")
    parser.add_argument("--batches", type=counts, default="1,4")
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    device, shape = open_device(given.device), SHAPES[given.shape]
    dtype = run_dtype(device)
    placement = Placement(device, dtype, pick_kernels("auto", device, dtype), MAX_LEN + BLOCK)
    rows: list[Row] = []
    num_failures = 0
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        save_model(shape, Path(folder), placement)
        for runtime in shape.runtimes:
            gc.collect()
            try:
                rows += measure(shape, runtime, given.batches, Path(folder), placement)
            except Exception as error:
                num_failures += 1
                say(f"{runtime} failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
    print(table(("runtime", "blocks", "arm", "batch", "ms per step", "wrong", "ties"), rows))
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
