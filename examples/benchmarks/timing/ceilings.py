"""Measure the limits of the device: copy bandwidth, the rate of one large product, and all products of a step alone.

The chain of products uses the model's own weights and reads each once, so that caches stay cold. It is one CUDA graph
of cuBLAS calls by torch, with nothing between two products.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from timing.floors import Rates
from timing.pairs import RandomPair

Product = tuple[int, Tensor]
"""Number of rows, and the weight [outputs, inputs]."""

REPEATS = 15


def device_ms(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Median milliseconds of a call: graph replays on a GPU, wall time on the CPU."""
    call()
    if device.type != "cuda":
        return statistics.median(_wall_ms(call) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times[2:]))


def median_us(call: Callable[[], object], calls: int) -> float:
    """Median microseconds per call on the GPU, from replays of a graph of `calls` calls."""
    return device_ms(lambda: [call() for _ in range(calls)], torch.device("cuda", 0)) * 1000 / calls


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Bandwidth of a copy (bytes read and written) and operations per second of a large product."""
    num_bytes, side = (2**31, 8192) if device.type == "cuda" else (2**24, 512)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    # In a graph, a kernel that reads and writes as many bytes is faster than a copy.
    wide = source.view(torch.float32), sink.view(torch.float32)
    copies = [lambda: sink.copy_(source), lambda: torch.neg(wide[0], out=wide[1])]
    copy_ms = min(device_ms(copy, device) for copy in copies)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    product_ms = device_ms(lambda: torch.mm(left, right.t(), out=out), device)
    return Rates(2 * num_bytes / copy_ms * 1000, 2 * side**3 / product_ms * 1000, "measured")


def step_products(random: RandomPair, batch: int, *, is_drafting: bool) -> list[Product]:
    """The matrix products of one decode step, in order."""
    draft, taps, pair = random.draft_weights, len(random.shape.taps), random.pair
    head = pair.target.head.plain
    if not is_drafting:
        return [*_layers(pair.target, batch), (batch, head)]
    rows = batch * random.shape.block
    _, kv_heads, head_dim = random.shape.heads_of_draft
    names = (f"layers.{index}.self_attn.qkv_proj.weight" for index in range(random.shape.draft_layers))
    context = torch.cat([draft[name][-2 * kv_heads * head_dim :] for name in names])
    assert draft["fc.weight"].shape[1] == taps * random.shape.hidden
    return [
        *_layers(pair.draft, rows),
        (rows - batch, head),
        *_layers(pair.target, rows),
        (rows, head),
        (rows, draft["fc.weight"]),
        (rows, context),
    ]


def chain_ms(products: Sequence[Product]) -> float:
    """Milliseconds of all products in a row."""
    inputs: dict[tuple[int, int], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    calls = []
    for rows, weight in products:
        num_outputs, num_inputs = weight.shape
        if (rows, num_inputs) not in inputs:
            inputs[rows, num_inputs] = torch.randn(rows, num_inputs, device=weight.device, dtype=weight.dtype)
        if (rows, num_outputs) not in outputs:
            outputs[rows, num_outputs] = weight.new_empty((rows, num_outputs))
        calls.append((inputs[rows, num_inputs], weight.t(), outputs[rows, num_outputs]))

    def run() -> None:
        for left, right, out in calls:
            torch.mm(left, right, out=out)

    return device_ms(run, products[0][1].device)


def _layers(model: object, rows: int) -> list[Product]:
    """The products of a model's layers. A mixer with several inputs makes them in one product."""
    products = []
    for layer in model._decoder.layers:  # type: ignore[attr-defined]
        inputs = layer.mixer.inputs if hasattr(layer.mixer, "inputs") else layer.mixer.qkv
        joined = [item.linear for item in inputs] if isinstance(inputs, tuple) else [inputs]
        linears = (*joined, layer.mixer.output, layer.mlp.gate_up, layer.mlp.down)
        products += [(rows, linear.weight) for linear in linears]
    return products


def _wall_ms(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1000
