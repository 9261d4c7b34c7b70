"""Launch the kernels of a pair with attention once with compute-sanitizer, at sizes that do not divide their tiles.

    compute-sanitizer --tool memcheck python3 examples/benchmarks/sanitize_kernels.py
    compute-sanitizer --tool racecheck python3 examples/benchmarks/sanitize_kernels.py

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor has its own allocation, so that memcheck sees its bounds.
"""

import itertools

import torch
from torch import Tensor

from dflash_kernels.attention.ragged_attention import Segment, plan_ragged
from dflash_kernels.attention.ragged_config import ragged_shape
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.rope_store import KVPlace
from dflash_kernels.kv.slot_mapping import slot_mapping_ref
from dflash_kernels.suite import Kernels, triton_kernels

REQUESTS, ROWS, HEADS, KV, HEAD_DIM, LAYERS, VOCAB, PAGE = 3, 7, 6, 2, 24, 3, 9001, 16


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def softmaxes() -> tuple[Softmax, ...]:
    return PLAIN, Softmax(30.0, normal(HEADS))


def products(kernels: Kernels, hidden: Tensor) -> None:
    for rows in (hidden[:17], hidden):
        for call in (kernels.product, kernels.product_parts, kernels.gated_product):
            call(rows, normal(300, hidden.shape[1]))


def experts(kernels: Kernels, hidden: Tensor) -> None:
    for rows in (hidden[:1], hidden[:3], hidden):
        chosen, scores = kernels.choose_experts(rows, normal(11, rows.shape[1]), 3, True)
        kernels.experts(rows, normal(11, 2 * 40, rows.shape[1]), normal(11, rows.shape[1], 40), chosen, scores)


def prefill(kernels: Kernels, rows: list[Tensor], key_cache: Tensor, value_cache: Tensor, table: Tensor) -> None:
    for lens, contexts in (([7, 1, 392], [20, 0, 5]), ([400, 0, 0], [33, 0, 0])):
        firsts = (0, lens[0], lens[0] + lens[1])
        segments = [Segment(*item) for item in zip(firsts, lens, contexts, range(3), strict=True) if item[1]]
        plan = plan_ragged(segments, HEADS, KV, ragged_shape(HEAD_DIM, 2, 0, table.device), table.device)
        for softmax in softmaxes():
            kernels.ragged_attention(
                *(tensor[0] for tensor in rows), key_cache, value_cache, table, plan,
                torch.tensor(plan.ints, device="cuda"), window=None, softmax=softmax,
            )  # fmt: skip


def main() -> None:
    kernels = triton_kernels()
    lens = torch.tensor([0, 17, 130], device="cuda")
    table = torch.arange(1, 1 + REQUESTS * 10, device="cuda").view(REQUESTS, 10)
    num_rows = REQUESTS * ROWS
    slots = slot_mapping_ref(table, lens[:, None] + torch.arange(ROWS, device="cuda"), lens + 5, PAGE).flatten()
    hidden, weight = normal(num_rows, 1000), normal(1000)
    kernels.rms_norm(hidden, weight, 1e-6)
    kernels.add_rms_norm(torch.stack((hidden, hidden)), hidden, weight, 1e-6)
    products(kernels, hidden)
    experts(kernels, hidden)
    cos, sin, head_norms = normal(num_rows, HEAD_DIM), normal(num_rows, HEAD_DIM), normal(HEADS + KV, HEAD_DIM)
    key_cache, value_cache = normal(REQUESTS * 10 + 1, LAYERS, 2, PAGE, KV, HEAD_DIM).permute(2, 1, 0, 3, 4, 5)
    place = KVPlace(key_cache[0], value_cache[0], slots)
    parts = normal(2, num_rows, (HEADS + 2 * KV) * HEAD_DIM)
    heads = kernels.rope_store(parts, head_norms, 1e-6, cos, sin, KV, place)
    query, keys, values = heads.split((HEADS, KV, KV), dim=1)
    kernels.kv_store(keys, values, key_cache[0], value_cache[0], slots)
    projected, norm_weights = normal(num_rows, LAYERS, 2, KV, HEAD_DIM), normal(LAYERS, HEAD_DIM)
    kernels.context_kv_store(projected, norm_weights, 1e-6, cos, sin, key_cache, value_cache, slots)
    for is_causal, window, softmax in itertools.product((True, False), (None, 20), softmaxes()):
        kernels.block_attention(
            *(tensor.unflatten(0, (REQUESTS, ROWS)) for tensor in (query, keys, values)),
            key_cache[0], value_cache[0], table, lens, is_causal=is_causal, window=window,
            softmax=softmax,
        )  # fmt: skip
    long = [normal(1, 400, heads, HEAD_DIM) for heads in (HEADS, KV, KV)]
    kernels.block_attention(*long, key_cache[0], value_cache[0], table[:1], lens[:1], is_causal=True, window=None)
    prefill(kernels, long, key_cache[0], value_cache[0], table)
    ids = torch.randint(0, 3, (REQUESTS, ROWS), device="cuda")
    most = torch.full_like(lens, ROWS)
    temperatures, top_ps = torch.tensor([[0.0, 0.5, 1.0], [1.0, 0.9, 0.5]], device="cuda", dtype=torch.float64)
    filters = temperatures, lens, top_ps
    logits = normal(REQUESTS, VOCAB)
    for is_greedy in (True, False):
        for has_filters in (True, False):
            kernels.sample(logits, *filters, lens, lens, is_greedy=is_greedy, has_filters=has_filters)
    places = torch.arange(VOCAB, device="cuda") - 3
    rows = lens[:, None] + torch.arange(ROWS, device="cuda")
    target = kernels.sample(normal(REQUESTS * ROWS, VOCAB), *filters, lens, rows.flatten())
    draft = kernels.sample(normal(REQUESTS * (ROWS - 1), VOCAB - 3), *filters, lens, rows[:, 1:].flatten())
    sampled = target.token_ids.view(REQUESTS, ROWS)
    kernels.reject(ids[:, :-1], sampled, target.distribution, draft.distribution, places, lens, lens, most)
    torch.cuda.synchronize()
    print("all kernels were launched")


if __name__ == "__main__":
    main()
