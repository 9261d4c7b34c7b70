"""Time steps of targets that run through transformers' code, beside the native family of the same shape.

    python3 examples/benchmarks/hosted.py [--quick] [--shapes qwen3-4b,qwen3-30b-a3b] [--batches 1,8] [--arms dflash]
    python3 examples/benchmarks/hosted.py --device cpu --shapes small,small-moe --batches 1

Random weights of transformers' classes are made on the device. Ways to run a target:

native              this package's family, with the same weights
swapped             over our pages, with our kernels in modules where they agree
unswapped           over our pages, without them
uncaptured          as unswapped, without CUDA graphs
transformers-cache  with transformers' own cache, after saving and loading

A drafting step accepts almost nothing, so nearly every block must be taken back. "captured" says whether steps are CUDA
graphs, and "ratio" divides by the native step. "wrong" counts tokens of a text that are not the target's best choice in
one forward; "ties" are within rounding. --quick uses fewer layers with experts, fewer steps, and judges no text. A way
that fails prints one line, and every result is printed when it is known. The table comes last.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.suite import pick_kernels
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.expert_stacks import stack_experts
from dflash_runtime.models.hosting.hosted import HostedTarget, host_model
from dflash_runtime.models.hosting.hosted_attention import TRIAL, register_attention
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target, target_families
from dflash_runtime.models.target_loading import find_target_runtime, load_target
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.scheduling.sampling_params import SamplingParams
from experts import make
from timing.arguments import counts, open_device, run_dtype
from timing.long_runs import step_ms
from timing.report import release, say, table
from timing.shapes import BLOCK

MAX_LEN = 1024
Row = list[object]


OVER_PAGES = ("native", "swapped", "unswapped", "uncaptured")


@dataclass(frozen=True)
class Shape:
    """A model type with its sizes, and the ways to time.

    quick_layers   layers with --quick, if fewer
    """

    model_type: str
    vocab: int
    sizes: Mapping[str, Any]
    ways: tuple[str, ...] = OVER_PAGES
    steps: int = 24
    quick_layers: int | None = None

    def quick(self) -> "Shape":
        """The shape with fewer layers and fewer steps."""
        layers = {} if self.quick_layers is None else {"num_hidden_layers": self.quick_layers}
        ways = tuple(way for way in self.ways if way != "uncaptured")
        return replace(self, sizes={**self.sizes, **layers}, steps=max(4, self.steps // 2), ways=ways)


def linear(layers: int, **sizes: Any) -> dict[str, Any]:
    """Sizes of a model with gated delta nets in all layers except every fourth."""
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (layers // 4)
    return {"num_hidden_layers": layers, "layer_types": kinds, **sizes}


SMALL = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8}  # fmt: skip

SHAPES = {
    "qwen3-4b": Shape(
        "qwen3", 151936,
        {
            "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3_moe", 151936,
        {
            "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768, "norm_topk_prob": True, "tie_word_embeddings": False,
        },
        quick_layers=12,
    ),
    "gemma2-9b": Shape(
        "gemma2", 256000,
        {
            "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096,
        },
        OVER_PAGES[1:], quick_layers=21,
    ),
    "qwen3.5-4b": Shape(
        "qwen3_5_text", 248320,
        linear(
            32, hidden_size=2560, intermediate_size=9216, num_attention_heads=16, num_key_value_heads=4, head_dim=256,
            linear_num_value_heads=32, linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
        ("transformers-cache",),
    ),
    "small": Shape("qwen3", 256, {**SMALL, "tie_word_embeddings": True}, steps=4),
    "small-moe": Shape(
        "qwen3_moe", 256,
        {
            **SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        steps=4,
    ),
    "small-hybrid": Shape(
        "qwen3_5_text", 256,
        linear(
            4, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        ),
        ("transformers-cache",), 4,
    ),
}  # fmt: skip


def make_model(shape: Shape, placement: Placement) -> Any:
    """A random model of transformers on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    stated = {"vocab_size": shape.vocab, "max_position_embeddings": MAX_LEN, "eos_token_id": 1, "pad_token_id": None}
    config = AutoConfig.for_model(shape.model_type, **stated, **shape.sizes)
    torch.manual_seed(5)
    register_attention()
    with placement.device:
        model = AutoModelForCausalLM.from_config(config, dtype=placement.dtype, attn_implementation=TRIAL)
    return model.eval()


def make_target(shape: Shape, way: str, folder: Path, placement: Placement) -> Target:
    """A target with random weights that runs in this way."""
    model = make_model(shape, placement)
    if way == "transformers-cache":
        model.save_pretrained(folder)
        del model
        return load_target(open_target(folder), placement, way)
    model.config.save_pretrained(folder)
    save_file({}, folder / "model.safetensors")  # the config alone is read
    if way != "native":
        _, config = find_target_runtime(open_target(folder), "transformers")
        return host_model(model, config, replace(placement, has_swaps=way == "swapped"))
    _, config = find_target_runtime(open_target(folder), "native")
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    del model
    weights = stack_projections(
        stack_experts(tensors.items(), {name: tuple(item.shape) for name, item in tensors.items()})
    )
    return target_families()[config.model_type](config, weights, placement)


def make_draft(target: Target, placement: Placement, num_layers: int = 5, block: int = BLOCK) -> DFlashDraft:
    config = target.config
    last = config.num_layers - 1
    heads = max(4, config.hidden_size // 128)
    draft = DraftConfig(
        hidden_size=config.hidden_size, intermediate_size=3 * config.hidden_size, num_layers=num_layers,
        num_heads=heads, num_kv_heads=4, head_dim=128 if heads > 4 else 8, rms_norm_eps=1e-6,
        max_position_embeddings=MAX_LEN, rope=RopeConfig(theta=1e6), block_size=block,
        target_layer_ids=(1, last // 2, last - 1), mask_token_id=0,
        vocab_size=config.vocab_size, draft_vocab_size=config.vocab_size, causal=(False,) * num_layers,
        windows=(None,) * num_layers,
    )  # fmt: skip
    weights = {name: make(name, size, placement) for name, size in owned_shapes(draft).items()}
    return DFlashDraft(draft, stack_projections(weights.items()), target, placement)


def measure(
    shape: Shape,
    name: str,
    way: str,
    arms: Sequence[str],
    batches: Sequence[int],
    placement: Placement,
    *,
    judges: bool,
) -> list[Row]:
    """Rows of one way: shape, way, captured, arm, batch, ms per step, wrong tokens, ties."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(shape, way, Path(folder), placement)
    say(f"{name} {way}: made and tried in {time.perf_counter() - began:.0f} s{facts(target)}")
    draft, rows = make_draft(target, placement), []
    for arm in arms:
        for batch in batches:
            num_drafts = BLOCK - 1 if arm == "dflash" else 0
            limits = Limits(
                num_draft_tokens=num_drafts, max_model_len=MAX_LEN, max_num_requests=batch, vocab_size=shape.vocab,
                max_batched_tokens=2048,
            )  # fmt: skip
            config = EngineConfig(
                max_num_requests=batch, num_pages=80 * batch + 16, prefix_cache=False, graphs=way != "uncaptured"
            )
            pair = LoadedPair(
                target=target, draft=draft if num_drafts else None, placement=placement, limits=limits, config=config
            )
            began = time.perf_counter()
            milliseconds = step_ms(LLM(pair), batch, shape.vocab, shape.steps)
            judged = judge(pair, shape) if judges else (None, None)
            rows.append([name, way, pair.has_graphs, arm, batch, milliseconds, *judged])
            say(
                f"{' '.join(map(str, rows[-1][:5]))}: {milliseconds:.2f} ms, {time.perf_counter() - began:.0f} s in all"
            )
    return rows


def facts(target: Target) -> str:
    """The results of a hosted target's trial, as text."""
    if not isinstance(target, HostedTarget):
        return ""
    return f", swapped {target.swaps.counts}, not captured because: {target.uncaptured}"


def judge(pair: LoadedPair, shape: Shape) -> tuple[int, int]:
    """Numbers of wrong tokens and near-ties in one text."""
    prompt = torch.randint(1, shape.vocab - 1, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    llm = LLM(pair)
    verdict = llm.check_lossless(llm.generate([prompt], SamplingParams(max_new_tokens=64, ignore_eos=True)))
    return verdict.num_wrong, verdict.num_near_ties


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, each with its step over the native step of the same shape, arm and batch."""
    native = {(row[0], row[3], row[4]): float(str(row[5])) for row in rows if row[1] == "native"}
    found: list[Row] = []
    for row in rows:
        base = native.get((row[0], row[3], row[4]))
        found.append([*row[:6], None if base is None else float(str(row[5])) / base, *row[6:]])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-4b,qwen3-30b-a3b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--ways", default="", help="ways to time (default: all of a shape)")
    parser.add_argument("--arms", default="", help="plain, dflash (default: both, with --quick dflash)")
    parser.add_argument("--batches", type=counts, default="1,8")
    parser.add_argument("--quick", action="store_true", help="fewer layers with experts, fewer steps, no judged text")
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    device = open_device(given.device)
    dtype = run_dtype(device)
    placement = Placement(device, dtype, pick_kernels("auto", device, dtype), MAX_LEN + BLOCK)
    arms = (given.arms or ("dflash" if given.quick else "dflash,plain")).split(",")
    rows: list[Row] = []
    num_failures = 0
    for name in given.shapes.split(","):
        shape = SHAPES[name].quick() if given.quick else SHAPES[name]
        for way in [way for way in shape.ways if not given.ways or way in given.ways.split(",")]:
            try:
                with torch.inference_mode():
                    rows += measure(shape, name, way, arms, given.batches, placement, judges=not given.quick)
            except Exception as error:
                num_failures += 1
                say(f"{name} {way} failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
            release()
    headings = ("shape", "way", "captured", "arm", "batch", "ms per step", "ratio", "wrong", "ties")
    print(table(headings, with_ratios(rows)))
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
