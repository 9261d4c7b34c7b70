"""Time a target with experts at the shape of Qwen3-30B-A3B with random weights: the experts of a layer, and whole
steps.

    python3 examples/benchmarks/experts.py [--parts layer,steps] [--rows 1,16] [--ways captured,kernels] [--batches 1,8]
    python3 examples/benchmarks/experts.py --device cpu --shape small

Ways to compute the experts of a layer: one_by_one, grouped (torch's grouped products), captured (grouped as a CUDA
graph), kernels (our own, also captured), and choosing (only the routing of kernels). "other %" is the share of rows
for which a way chooses other experts than torch: 16-bit logits tie often, and another order of summation rounds
differently.

The floor is the time to read the weights at the rate of a copy, which is measured. A layer reads the experts that its
rows choose. A step reads every layer, the head, and the draft if there is one. The number of experts that a step reads
is computed as if each row chose at random: of 128 experts with 8 per row, one row uses 8, the 16 rows of a block use
82, and 128 rows use all. "captured" says whether steps are CUDA graphs. A part that fails prints one line. The tables
come last.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dflash_kernels.suite import REFERENCE, Kernels, pick_kernels
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.config_parts import RopeConfig
from dflash_runtime.device.setup.loading import LoadedPair
from dflash_runtime.draft_config import DraftConfig
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.llm import LLM
from dflash_runtime.models.experts import Experts
from dflash_runtime.models.families.qwen3_moe import Qwen3MoeTarget
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.limits import Limits
from dflash_runtime.target_config import ExpertsConfig, TargetConfig
from timing.arguments import counts, open_device, run_dtype
from timing.ceilings import device_ms, measure_rates
from timing.engine_arms import wait
from timing.long_runs import step_ms
from timing.report import release, say, table
from timing.shapes import BLOCK

MAX_LEN = 1024
NUM_LAYERS = 4
"""Number of layers that are timed one after another."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    num_experts: int
    num_chosen: int
    taps: tuple[int, ...]
    rows: tuple[int, ...]
    steps: int
    num_shared: int = 0

    @property
    def num_stacked(self) -> int:
        """Experts in memory, shared ones included."""
        return self.num_experts + self.num_shared


SHAPES = {
    "qwen3.6-35b-a3b": Shape(
        2048, 512, 40, 16, 2, 248320, 256, 8, (1, 10, 19, 28, 37), (1, 8, 16, 64, 128, 256, 512, 2048), 64, 1
    ),
    "small-shared": Shape(64, 32, 2, 4, 2, 256, 8, 2, (0, 1), (1, 8), 4, 1),
    "qwen3-30b-a3b": Shape(
        2048, 768, 48, 32, 4, 151936, 128, 8, (1, 12, 23, 34, 45), (1, 8, 16, 64, 128, 512, 2048), 64
    ),
    "small": Shape(64, 32, 2, 4, 2, 256, 8, 2, (0, 1), (1, 8), 4),
}


Row = list[object]


def attempt(what: Sequence[object], call: Callable[[], Row], width: int) -> Row:
    """A table row: `what`, then the values that the call returns, or `width` times None if the call fails."""
    try:
        return [*what, *call()]
    except Exception as error:
        say(f"{' '.join(map(str, what))} failed: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
        return [*what, *[None] * width]
    finally:
        release()


def normal(shape: Sequence[int], placement: Placement) -> Tensor:
    return torch.empty(*shape, device=placement.device, dtype=placement.dtype).normal_(std=0.02)


def make_experts(shape: Shape, placement: Placement) -> Experts:
    """The experts of a layer with random weights."""
    return Experts(
        normal((shape.num_experts + bool(shape.num_shared), shape.hidden), placement),
        normal((shape.num_stacked, 2 * shape.inner, shape.hidden), placement),
        normal((shape.num_stacked, shape.hidden, shape.inner), placement),
        shape.num_chosen,
        has_normalised_scores=True,
        num_shared=shape.num_shared,
    )


def layer_rows(
    shape: Shape, placement: Placement, bandwidth: float, row_counts: Sequence[int], ways: Sequence[str]
) -> Iterator[Row]:
    """Rows, way, microseconds, floor, error % and other % of each measurement, means over layers.

    The error compares the first layer with `one_by_one` on the same choices. Other is the share of rows for which the
    way chooses other experts than torch.
    """
    layers = [make_experts(shape, placement) for _ in range(NUM_LAYERS)]
    bytes_of_one = 3 * shape.inner * shape.hidden * placement.dtype.itemsize
    for count in row_counts:
        hidden = normal((count, shape.hidden), placement) * 50
        num_read = sum(int(layer.choose(hidden)[0].unique().numel()) for layer in layers) / len(layers)
        for way in ways:
            kernels = placement.kernels if way in OURS else REFERENCE
            chain = [partial(run_way, way, replace(layer, kernels=kernels), hidden) for layer in layers]
            row = attempt([count, way], partial(chain_us, chain, placement.device, is_captured=way in CAPTURED), 1)
            compared = [None, None] if row[-1] is None else compare(way, layers[0], kernels, hidden)
            yield [*row, num_read * bytes_of_one / bandwidth * 1e6, *compared]


WAYS = ("one_by_one", "grouped", "captured", "kernels", "choosing")
CAPTURED, OURS = ("captured", "kernels", "choosing"), ("kernels", "choosing")
"""The ways that run as CUDA graphs on a GPU, and the ways that use our kernels."""


def run_way(way: str, experts: Experts, hidden: Tensor) -> None:
    """Run one way. Parts are not added up, because the next norm of a step does that."""
    routes = experts.choose(hidden)
    if way != "choosing":
        compute(way, experts, hidden, *routes)


def compute(way: str, experts: Experts, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """The experts' output as parts [P, T, hidden]."""
    if way == "one_by_one":
        return experts.one_by_one(hidden, chosen, scores)[None]
    return experts.grouped(hidden, chosen, scores)


def compare(way: str, layer: Experts, kernels: Kernels, hidden: Tensor) -> Row:
    """The relative error of the experts' outputs (None for choosing) and the share of rows with other experts, in %."""
    routes, ours = layer.choose(hidden), replace(layer, kernels=kernels)
    is_other = (ours.choose(hidden)[0].sort().values != routes[0].sort().values).any(1)
    share = 100 * float(is_other.double().mean())
    if way == "choosing":
        return [None, share]
    wanted = layer.one_by_one(hidden, *routes).double()
    found = compute(way, ours, hidden, *routes).double().sum(0)
    return [100 * float((found - wanted).norm() / wanted.norm()), share]


def chain_us(chain: Sequence[Callable[[], object]], device: torch.device, *, is_captured: bool) -> Row:
    """Microseconds per layer. Several layers run in a row, so that no cache holds the next layer's weights."""

    def run() -> None:
        for call in chain:
            call()

    return [(device_ms if is_captured else wall_ms)(run, device) / len(chain) * 1000]


def wall_ms(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Milliseconds of a call, launched one after another."""
    for _ in range(3):
        call()
    wait(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - began) / repeats * 1000


def configs(shape: Shape) -> tuple[TargetConfig, DraftConfig]:
    experts = ExpertsConfig(
        num_experts=shape.num_experts, num_chosen=shape.num_chosen, intermediate_size=shape.inner,
        has_normalised_scores=True, layers=tuple(range(shape.layers)),
        shared_size=shape.num_shared * shape.inner or None,
    )  # fmt: skip
    target = TargetConfig(
        model_type="qwen3_moe", hidden_size=shape.hidden, intermediate_size=3 * shape.hidden, num_layers=shape.layers,
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=128, rms_norm_eps=1e-6, vocab_size=shape.vocab,
        max_position_embeddings=MAX_LEN, rope=RopeConfig(theta=1e6), windows=(None,) * shape.layers, experts=experts,
    )  # fmt: skip
    draft = DraftConfig(
        hidden_size=shape.hidden, intermediate_size=3 * shape.hidden, num_layers=5, num_heads=shape.heads,
        num_kv_heads=shape.kv_heads, head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=MAX_LEN,
        rope=RopeConfig(theta=1e6), block_size=BLOCK, target_layer_ids=shape.taps, mask_token_id=shape.vocab - 1,
        vocab_size=shape.vocab, draft_vocab_size=shape.vocab, causal=(False,) * 5, windows=(None,) * 5,
    )  # fmt: skip
    return target, draft


def target_weights(shape: Shape, config: TargetConfig, placement: Placement) -> dict[str, Tensor]:
    """Random weights, with stacked experts as after loading."""
    shapes = Qwen3MoeTarget.expected_shapes(config)
    plain = {name: size for name, size in shapes.items() if not re.search(r"\.(experts|shared_expert)\.", name)}
    weights = dict(stack_projections((name, make(name, size, placement)) for name, size in plain.items()))
    for layer in range(shape.layers):
        name = f"model.layers.{layer}.mlp.experts"
        weights[f"{name}.gate_up_proj.weight"] = normal((shape.num_stacked, 2 * shape.inner, shape.hidden), placement)
        weights[f"{name}.down_proj.weight"] = normal((shape.num_stacked, shape.hidden, shape.inner), placement)
    return weights


def make(name: str, size: tuple[int, ...], placement: Placement) -> Tensor:
    return (
        torch.ones(size, device=placement.device, dtype=placement.dtype) if "norm" in name else normal(size, placement)
    )


def step_rows(shape: Shape, placement: Placement, batches: Sequence[int], bandwidth: float) -> Iterator[Row]:
    """Arm, batch, captured, ms per step, and the floor of each measurement."""
    target_config, draft_config = configs(shape)
    weights = target_weights(shape, target_config, placement)
    draft_weights = {name: make(name, size, placement) for name, size in owned_shapes(draft_config).items()}
    target = Qwen3MoeTarget(target_config, weights, placement)
    draft = DFlashDraft(draft_config, stack_projections(draft_weights.items()), target, placement)
    for graphs in (False, True) if placement.device.type == "cuda" else (False,):
        for arm in ("plain", "dflash"):
            for batch in batches:
                read = read_bytes(shape, weights, batch * (BLOCK if arm == "dflash" else 1))
                if arm == "dflash":  # the draft uses the target's head
                    read += sum(tensor.nbytes for tensor in (*draft_weights.values(), target.head.plain))
                pair = LoadedPair(
                    target=target, draft=draft if arm == "dflash" else None, placement=placement,
                    limits=Limits(
                        num_draft_tokens=BLOCK - 1 if arm == "dflash" else 0, max_model_len=MAX_LEN,
                        max_num_requests=batch, vocab_size=shape.vocab, max_batched_tokens=2048,
                    ),
                    config=EngineConfig(max_num_requests=batch, num_pages=80 * batch + 16, graphs=graphs),
                )  # fmt: skip
                what = [arm, batch, pair.has_graphs]
                yield [*attempt(what, partial(warm_step_ms, pair, shape, batch), 1), read / bandwidth * 1000]


def read_bytes(shape: Shape, weights: dict[str, Tensor], num_rows: int) -> float:
    """Bytes of weights that `num_rows` rows read: all but the embedding, and the experts that random choices use."""
    share = 1 - (1 - shape.num_chosen / shape.num_experts) ** num_rows
    used = {name: tensor for name, tensor in weights.items() if "embed_tokens" not in name}
    return sum(tensor.nbytes * (share if ".experts." in name else 1) for name, tensor in used.items())


def warm_step_ms(pair: LoadedPair, shape: Shape, batch: int) -> Row:
    """Milliseconds per step after a warm-up."""
    llm = LLM(pair)
    llm.warm_up()
    return [step_ms(llm, batch, shape.vocab, shape.steps)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--parts", default="layer,steps", help="parts to time (default: layer,steps)")
    parser.add_argument("--rows", type=counts, help="numbers of rows of a layer (default: the shape's)")
    parser.add_argument(
        "--ways", default="captured,kernels,choosing", help=f"ways to compute a layer: {', '.join(WAYS)}"
    )
    parser.add_argument("--batches", type=counts, default="1,8")
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    device, shape = open_device(given.device), SHAPES[given.shape]
    dtype = run_dtype(device)
    placement = Placement(device, dtype, pick_kernels("auto", device, dtype), MAX_LEN + BLOCK)
    bandwidth = measure_rates(device, dtype).bandwidth
    parts, ways = given.parts.split(","), given.ways.split(",")
    layers: list[Row] = []
    steps: list[Row] = []
    if "layer" in parts:
        with torch.inference_mode():
            layers = list(layer_rows(shape, placement, bandwidth, given.rows or shape.rows, ways))
        print(table(("rows", "experts of a layer", "us", "floor us", "error %", "other %"), layers) + "\n", flush=True)
    if "steps" in parts:
        for row in step_rows(shape, placement, given.batches, bandwidth):
            steps.append(row)
            say(f"{row[0]}, batch {row[1]}, captured {row[2]}: {row[3]} ms")
        print(f"copies {bandwidth / 1e12:.2f} TB/s; the floor of a step reads every weight that its rows use once")
        print(table(("step", "batch", "captured", "ms", "floor ms"), steps))
    return 1 if any(row[-2] is None for row in (*steps, *(row[:-2] for row in layers))) else 0


if __name__ == "__main__":
    sys.exit(main())
