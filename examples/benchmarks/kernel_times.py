"""Check every kernel in bf16 against float64, and time it, at the shapes of Qwen3-8B with a draft of 5 layers.

    python3 examples/benchmarks/kernel_times.py [--only attention] [--sweep]

Needs a CUDA device. `attention.py` measures attention of plain blocks. Times are medians of CUDA graph replays over
rotating inputs, so that caches stay cold. The floor is the number of bytes that must move over the measured rate of a
copy.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from dflash_kernels.attention import tree_attention
from dflash_kernels.attention.attention_config import attention_shape
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.drafts.candidate_walk import Codebooks
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.launch_config import VocabShape
from dflash_kernels.logits import logit_tiles
from dflash_kernels.products.activation import silu_mul, silu_mul_ref
from dflash_kernels.suite import REFERENCE, triton_kernels
from timing.ceilings import measure_rates, median_us

HEADS, KV, HEAD_DIM, HIDDEN, INNER, LAYERS, VOCAB, PAGE, ROWS = 32, 8, 128, 4096, 12_288, 5, 151_936, 16, 16
KERNELS = triton_kernels()
NUM_CALLS = 24
"""Calls in one timed graph."""

Case = tuple[str, Callable[[], object], float, float]
"""Name, call to time, relative error, bytes that must move."""


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def paged_caches(num_pages: int) -> tuple[Tensor, Tensor]:
    """Keys and values of several layers [L, P, PAGE, KV, D], stored in pages like a `KVCache`."""
    keys, values = normal(num_pages, LAYERS, 2, PAGE, KV, HEAD_DIM).permute(2, 1, 0, 3, 4, 5)
    return keys, values


def rotating(make: Callable[[], Sequence[Tensor]], call: Callable[..., object], copies: int) -> Callable[[], object]:
    """A function that calls `call` with the next of several input sets."""
    sets = [make() for _ in range(copies)]
    turns = itertools.cycle(sets)
    return lambda: call(*next(turns))


def relative_error(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def attention_case(
    requests: int, context: int, rows: int, *, is_causal: bool, window: int | None = None, softmax: Softmax = PLAIN
) -> Case:
    pages = -(-context // PAGE) + 2
    options = {"is_causal": is_causal, "window": window, "softmax": softmax}
    attend = functools.partial(KERNELS.block_attention, **options)
    attend_ref = functools.partial(REFERENCE.block_attention, **options)
    lens = torch.full((requests,), context, device="cuda")
    seen = min(context, window) if window else context
    moved = 2 * requests * (2 * KV * (seen + rows) + 2 * HEADS * rows) * HEAD_DIM

    def make() -> list[Tensor]:
        table = (torch.randperm(requests * pages, device="cuda") + 1).view(requests, pages)
        caches = [cache[0] for cache in paged_caches(requests * pages + 1)]
        block = [normal(requests, rows, heads, HEAD_DIM) for heads in (HEADS, KV, KV)]
        return [*block, *caches, table, lens]

    query, keys, values, *cached = make()
    out = attend(query, keys, values, *cached)[:1]
    wide = [tensor[:1].double() for tensor in (query, keys, values)]
    key_cache, value_cache, table, _ = cached
    exact = attend_ref(*wide, key_cache.double(), value_cache.double(), table[:1], lens[:1])
    copies = max(2, min(8, int(2e8 / max(moved, 1)) + 1))
    kind = ("causal" if is_causal else "full") + (f" window {window}" if window else "")
    kind += (" capped" if softmax.cap else "") + (" sinks" if softmax.sinks is not None else "")
    name = f"attention R {requests} N {rows} context {context} {kind}"
    call = rotating(make, attend, copies)
    return name, call, relative_error(out, exact), moved


def small_cases(requests: int) -> list[Case]:
    """Kernels that run once or twice per layer, and the store of context KV."""
    tokens = requests * ROWS
    weight, head_norms, layer_weights = normal(HIDDEN), normal(HEADS + KV, HEAD_DIM), normal(LAYERS, HEAD_DIM)
    cos, sin = normal(tokens, HEAD_DIM), normal(tokens, HEAD_DIM)
    slots = torch.randperm(tokens + PAGE, device="cuda")[:tokens]
    caches = paged_caches(tokens // PAGE + 1)
    hidden, residual = normal(tokens, HIDDEN), normal(tokens, HIDDEN)
    parts = normal(1, tokens, (HEADS + 2 * KV) * HEAD_DIM)
    projected = normal(tokens, LAYERS, 2, KV, HEAD_DIM)
    wide_cos, wide_sin = cos.double(), sin.double()
    exact_norm, _ = REFERENCE.add_rms_norm(hidden[None].double(), residual.double(), weight.double(), 1e-6)
    normed = relative_error(KERNELS.add_rms_norm(hidden[None], residual, weight, 1e-6)[0], exact_norm)
    place = KVPlace(caches[0][0], caches[1][0], slots)
    wide_place = KVPlace(caches[0][0].double(), caches[1][0].double(), slots)
    exact_heads = REFERENCE.rope_store(parts.double(), head_norms.double(), 1e-6, wide_cos, wide_sin, KV, wide_place)
    rotated = relative_error(KERNELS.rope_store(parts, head_norms, 1e-6, cos, sin, KV, place), exact_heads)
    exact = caches[0].double(), caches[1].double()
    KERNELS.context_kv_store(projected, layer_weights, 1e-6, cos, sin, *caches, slots)
    REFERENCE.context_kv_store(
        projected.double(), layer_weights.double(), 1e-6, wide_cos, wide_sin, *exact, slots
    )  # fmt: skip
    stored = max(relative_error(cache, true) for cache, true in zip(caches, exact, strict=True))
    row = 2 * tokens * HEAD_DIM
    gate_up = normal(tokens, 2 * INNER)
    gated = relative_error(silu_mul(gate_up), silu_mul_ref(gate_up.double()))
    return [
        (f"silu_mul T {tokens}", lambda: silu_mul(gate_up), gated, 3 * 2 * tokens * INNER),
        (f"add_rms_norm T {tokens}", lambda: KERNELS.add_rms_norm(hidden[None], residual, weight, 1e-6), normed,
         4 * 2 * tokens * HIDDEN),
        (f"rope_store T {tokens}", lambda: KERNELS.rope_store(parts, head_norms, 1e-6, cos, sin, KV, place), rotated,
         2 * row * HEADS + 6 * row * KV),
        (f"context_kv_store T {tokens}",
         lambda: KERNELS.context_kv_store(projected, layer_weights, 1e-6, cos, sin, *caches, slots), stored,
         4 * row * KV * LAYERS),
    ]  # fmt: skip


def draft_cases(requests: int) -> list[Case]:
    """Kernels of DFlash 2 and of DSpark's bias."""
    tokens, drafted, taps, groups, rank, count = requests * ROWS, requests * (ROWS - 1), 2, HIDDEN // 16, 256, 16
    parts = 8 if tokens <= 16 else 1
    dtype = torch.float32 if parts > 1 else torch.bfloat16
    dynamic, added = (normal(parts, tokens, width).to(dtype) for width in (4 * groups, HIDDEN))
    dynamic = dynamic.view(parts, tokens, 2, taps, groups)
    hidden, residual, weight, kernel = (
        normal(tokens, HIDDEN),
        normal(tokens, HIDDEN),
        normal(HIDDEN),
        normal(taps, HIDDEN),
    )
    before, after = dynamic[:, :, 0], dynamic[:, :, 1]
    rest = residual, weight
    convolved = KERNELS.block_conv(hidden, kernel, before, ROWS)
    exact = REFERENCE.block_conv(hidden.double(), kernel.double(), before.double(), ROWS)
    normed = KERNELS.conv_add_norm(added, kernel, after, ROWS, *rest, 1e-6)[0]
    wide = (item.double() for item in (added, kernel, after, *rest))
    exact_normed = _exact_norm(*wide)
    logits, books = normal(drafted, VOCAB) * 3, Codebooks(normal(VOCAB, rank), normal(VOCAB, rank) * 0.1)
    best, values = (item.view(requests, ROWS - 1, count) for item in KERNELS.top_tokens(logits, count))
    right = REFERENCE.top_tokens(logits, count)[0].view_as(best)
    projected, anchors = normal(1, drafted, rank), torch.arange(requests, device="cuda")
    walked = KERNELS.candidate_walk(values, best, projected, books, anchors).token_ids
    slow = REFERENCE.candidate_walk(values, best, projected, books, anchors).token_ids
    rows = logits.view(requests, ROWS - 1, VOCAB)
    biased = KERNELS.markov_walk(rows, *books[:2], anchors)
    pairs = 2 * rank * (1 + 2 * count) * drafted
    return [
        (f"block_conv T {tokens}", lambda: KERNELS.block_conv(hidden, kernel, before, ROWS),
         relative_error(convolved, exact), 4 * tokens * HIDDEN),
        (f"conv_add_norm T {tokens}", lambda: KERNELS.conv_add_norm(added, kernel, after, ROWS, *rest, 1e-6),
         relative_error(normed, exact_normed), (6 + added.element_size() * parts) * tokens * HIDDEN),
        (f"add_rms_norm in parts T {tokens}", lambda: KERNELS.add_rms_norm(added, *rest, 1e-6), 0.0,
         (6 + added.element_size() * parts) * tokens * HIDDEN),
        (f"top_tokens T {drafted}", lambda: KERNELS.top_tokens(logits, count), _share(best, right),
         2 * drafted * VOCAB),
        (f"argmax of as many rows T {drafted}", lambda: KERNELS.argmax(logits), 0.0, 2 * drafted * VOCAB),
        (f"torch.topk T {drafted}", lambda: logits.topk(count, sorted=False), 0.0, 2 * drafted * VOCAB),
        (f"candidate_walk R {requests}", lambda: KERNELS.candidate_walk(values, best, projected, books, anchors),
         _share(walked, slow), pairs),
        (f"markov_walk R {requests}", lambda: KERNELS.markov_walk(rows, *books[:2], anchors),
         _share(biased, REFERENCE.markov_walk(rows, *books[:2], anchors)),
         (ROWS - 1) * 2 * VOCAB * (rank + requests)),
    ]  # fmt: skip


def _exact_norm(*wide: Tensor) -> Tensor:
    added, kernel, dynamic, residual, weight = wide
    return REFERENCE.conv_add_norm(added, kernel, dynamic, ROWS, residual, weight, 1e-6)[0]


def _share(found: Tensor, wanted: Tensor) -> float:
    """The share of elements that differ."""
    return float((found != wanted).double().mean())


def token_cases(requests: int) -> list[Case]:
    """Kernels that run once per step."""
    tokens = requests * ROWS
    logits = normal(tokens, VOCAB) * 3
    seeds = torch.arange(tokens, device="cuda")
    ones, zeros = torch.ones(tokens, dtype=torch.float64, device="cuda"), torch.zeros_like(seeds)
    plain, cut = (ones, zeros, ones, seeds, seeds), (ones * 0.6, zeros + 20, ones * 0.95, seeds, seeds)
    nucleus, wide = (ones * 0.6, zeros, ones * 0.95, seeds, seeds), (ones, zeros, ones * 0.9, seeds, seeds)
    # One request samples, all others are greedy.
    mixed = ((ones * 0.6) * (seeds < ROWS), *cut[1:])
    ids = KERNELS.argmax(logits).view(requests, ROWS)
    most = torch.full((requests,), ROWS, device="cuda")

    def mismatch(kernel: Tensor, reference: Tensor) -> float:
        return float((kernel != reference).double().mean())

    def sampled(name: str, rows: Sequence[Tensor], **options: bool) -> Case:
        error = mismatch(KERNELS.sample(logits, *rows, **options).token_ids,
                         REFERENCE.sample(logits, *rows, **options).token_ids)  # fmt: skip
        return f"sample {name} T {tokens}", lambda: KERNELS.sample(logits, *rows, **options), error, 2 * tokens * VOCAB

    cases: list[Case] = [
        (f"argmax T {tokens}", lambda: KERNELS.argmax(logits), mismatch(ids.flatten(), logits.argmax(-1)),
         2 * tokens * VOCAB),
        (f"largest_probability T {tokens}", lambda: KERNELS.largest_probability(logits),
         relative_error(*(suite.largest_probability(item).probabilities
                          for suite, item in ((KERNELS, logits), (REFERENCE, logits.double())))),
         2 * tokens * VOCAB),
        sampled("greedy", plain, is_greedy=True), sampled("unfiltered", plain, has_filters=False),
        sampled("top-k top-p", cut), sampled("top-p", nucleus), sampled("top-p of thousands", wide),
        sampled("top-k top-p in one request", mixed),
    ]  # fmt: skip
    values = (ones[:requests], zeros[:requests], ones[:requests], seeds[:requests])
    target = KERNELS.sample(logits, *values, seeds, has_filters=False)
    draft = KERNELS.sample(normal(requests * (ROWS - 1), VOCAB) * 3, *values, seeds[requests:], has_filters=False)
    given = (target.token_ids.view(requests, ROWS), target.distribution, draft.distribution, None)
    drawn = draft.token_ids.view(requests, ROWS - 1)
    cases.append((f"reject R {requests}", lambda: KERNELS.reject(drawn, *given, seeds[:requests], most, most), 0.0,
                  2 * 2 * requests * VOCAB))  # fmt: skip
    return cases


def tree_cases(requests: int, nodes: int) -> list[Case]:
    """Build trees from candidates of 15 positions, in one launch and as the reference. The error counts other trees."""
    logits = torch.randn(requests, 15, VOCAB, device="cuda") * 4
    flat = logits.flatten(0, 1).bfloat16()
    others = float((KERNELS.likely_tokens(flat, nodes)[0] != REFERENCE.likely_tokens(flat, nodes)[0]).double().mean())
    log_probs, ids = logits.log_softmax(-1).topk(nodes, dim=-1)
    given = log_probs[:, :, None].contiguous(), ids, ids[:, 0, 0], ids[:, 0, 0], nodes
    trees = [kernels.build_tree(*given) for kernels in (KERNELS, REFERENCE)]
    pairs = zip(*((*tree[:3], *tree.rows) for tree in trees), strict=True)
    wrong = max(float((own != other).double().mean()) for own, other in pairs)
    name = f"R {requests} nodes {nodes}"
    return [
        (f"likely_tokens {name}", lambda: KERNELS.likely_tokens(flat, nodes), others, 2.0 * len(flat) * VOCAB),
        (f"build_tree {name}", lambda: KERNELS.build_tree(*given), wrong, 0.0),
        (f"build_tree {name}, reference", lambda: REFERENCE.build_tree(*given), 0.0, 0.0),
    ]


def tree_attention_cases(requests: int, context: int, nodes: int) -> list[Case]:
    """Attention of trees with the parts of the launch table, and in one part."""
    pages, rows = -(-context // PAGE) + 1, nodes + 1
    log_probs, ids = torch.randn(requests, 15, VOCAB, device="cuda").mul(4).log_softmax(-1).topk(nodes, dim=-1)
    anchors = ids[:, 0, 0]
    tree_rows = KERNELS.build_tree(log_probs[:, :, None].contiguous(), ids, anchors, anchors, nodes).rows
    table = (torch.randperm(requests * pages, device="cuda") + 1).view(requests, pages)
    lens = torch.full((requests,), context, device="cuda")
    attend = functools.partial(KERNELS.tree_attention, window=None)

    def make() -> list[Tensor]:
        caches = [cache[0] for cache in paged_caches(requests * pages + 1)]
        return [*(normal(requests, rows, heads, HEAD_DIM) for heads in (HEADS, KV, KV)), *caches, table, lens]

    given = make()
    wide = [tensor.double() for tensor in given[:5]]
    exact = REFERENCE.tree_attention(*wide, table, lens, tree_rows, window=None)
    error = relative_error(attend(*given, tree_rows), exact)
    moved = 2 * requests * (2 * KV * (context + rows) + 2 * HEADS * rows) * HEAD_DIM
    call = rotating(make, lambda *tensors: attend(*tensors, tree_rows), max(2, min(8, int(2e8 / moved) + 1)))

    def in_one_part() -> object:
        with mock.patch.object(
            tree_attention, "attention_shape", lambda *sizes: replace(attention_shape(*sizes), num_splits=1)
        ):
            return call()

    name = f"tree attention R {requests} nodes {nodes} context {context}"
    return [(name, call, error, moved), (f"{name}, one part", in_one_part, error, moved)]


def sweep(bandwidth: float) -> None:
    """Time the passes over logits with many launch parameters; * marks the parameters of `launch_config`."""
    print(f"{'pass':16s} {'T':>4s} {'tile':>6s} {'warps':>6s} {'us':>9s} {'floor':>8s}")
    for tokens in (16, 128, 480, 512):
        floor = 2 * tokens * VOCAB / bandwidth
        seeds = torch.arange(tokens, device="cuda")
        ones, zeros = torch.ones(tokens, dtype=torch.float64, device="cuda"), torch.zeros_like(seeds)
        copies = max(2, int(2e8 / (2 * tokens * VOCAB)))
        logits = itertools.cycle([normal(tokens, VOCAB) * 3 for _ in range(copies)])

        def unfiltered(rows: Tensor, *, values: Sequence[Tensor] = (ones, zeros, ones, seeds, seeds)) -> object:
            return KERNELS.sample(rows, *values, has_filters=False)

        calls: list[tuple[str, Callable[[Tensor], object], str, tuple[int, ...]]] = [
            ("argmax", KERNELS.argmax, "argmax_shape", (1024, 2048, 4096, 8192, 16384)),
            ("sample", unfiltered, "sampling_shape", (1024, 2048, 4096, 8192)),
        ]
        for (name, call, shape, tiles), warps in itertools.product(calls, (2, 4, 8, 16)):
            chosen = getattr(logit_tiles, shape)
            own = chosen(tokens) if name == "argmax" else chosen()
            for tile in (tile for tile in tiles if 256 <= tile // warps <= 4096):
                tried = VocabShape(tile, warps)
                setattr(logit_tiles, shape, lambda *_, tried=tried: tried)
                taken = median_us(lambda call=call, logits=logits: call(next(logits)), NUM_CALLS)  # type: ignore[misc]
                mark = "*" if tried == own else ""
                print(f"{name:16s} {tokens:4d} {tile:6d} {warps:6d} {taken:9.1f} {floor:8.1f} {mark}", flush=True)
            setattr(logit_tiles, shape, chosen)
        del logits
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run only cases with this text in their name")
    parser.add_argument("--drafts", action="store_true", help="run only the kernels of DFlash 2 and DSpark")
    parser.add_argument(
        "--sweep", action="store_true", help="time only the passes over logits, with other tiles and warps"
    )
    options = parser.parse_args()
    only = options.only
    torch.manual_seed(0)
    bandwidth = measure_rates(torch.device("cuda", 0), torch.bfloat16).bandwidth / 1e6  # bytes per microsecond
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e6:.2f} TB/s")
    if options.sweep:
        return sweep(bandwidth)
    print(f"{'kernel':52s} {'us':>9s} {'floor':>8s} {'error':>9s}")
    cases = [functools.partial(draft_cases, requests) for requests in (1, 8, 32)] if options.drafts else makers()
    for make in cases:
        for name, call, error, moved in make():
            if only in name:
                print(f"{name:52s} {median_us(call, NUM_CALLS):9.1f} {moved / bandwidth:8.1f} {error:9.1e}", flush=True)
            del call
        torch.cuda.empty_cache()


def makers() -> list[Callable[[], list[Case]]]:
    made: list[Callable[[], list[Case]]] = []
    made.append(lambda: [attention_case(8, 4096, ROWS, is_causal=False)])
    made.append(lambda: [attention_case(8, 4096, ROWS, is_causal=False, window=2048)])
    for build in (lambda: Softmax(50.0), lambda: Softmax(sinks=normal(HEADS))):
        made.append(lambda b=build: [attention_case(8, 4096, ROWS, is_causal=True, softmax=b())])  # type: ignore[misc]
    made.append(lambda: [attention_case(1, 0, 2048, is_causal=True), attention_case(1, 2048, 2048, is_causal=True)])
    for requests, nodes in ((1, 8), (1, 64), (4, 64)):
        made.append(lambda r=requests, n=nodes: tree_cases(r, n))  # type: ignore[misc]
        for context in (512, 8192, 32_768):
            made.append(lambda r=requests, n=nodes, c=context: tree_attention_cases(r, c, n))  # type: ignore[misc]
    for requests in (1, 8, 32):
        made.append(lambda r=requests: small_cases(r))  # type: ignore[misc]
        made.append(lambda r=requests: token_cases(r))  # type: ignore[misc]
        made.append(lambda r=requests: draft_cases(r))  # type: ignore[misc]
    return made


if __name__ == "__main__":
    main()
