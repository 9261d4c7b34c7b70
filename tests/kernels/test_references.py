"""The references that define the kernels, compared with plain loops and with transformers."""

import math

import pytest
import torch
from torch import Tensor

from dflash_kernels.attention.block_attention import block_attention_ref
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.kv.kv_store import kv_store_ref
from dflash_kernels.kv.slot_mapping import PAD, slot_mapping_ref
from dflash_kernels.logits.categorical import categorical_ref
from dflash_kernels.logits.sampling import filtered_probs_ref, sample_ref
from dflash_kernels.logits.uniform import uniform_ref
from dflash_kernels.norms.rope_norm import rms_norm_ref, rope_ref
from dflash_testing.tensors import SOFTMAXES, between_layers, random_softmax

pytestmark = pytest.mark.reference

PAGE = 4


def test_slots_follow_the_page_table_and_are_pad_otherwise() -> None:
    table = torch.tensor([[3, 5, 0], [2, 0, 0]])
    positions = torch.tensor([[0, 3, 4, 7, 8, -1], [1, 3, 4, 11, 12, 99]])
    slots = slot_mapping_ref(table, positions, torch.tensor([8, 4]), PAGE)
    assert slots.tolist() == [[12, 15, 20, 23, PAD, PAD], [9, 11, PAD, PAD, PAD, PAD]]


def test_positions_after_the_reservation_are_pad_even_inside_a_page() -> None:
    slots = slot_mapping_ref(torch.tensor([[1, 2]]), torch.tensor([[5, 6, 7]]), torch.tensor([6]), PAGE)
    assert slots.tolist() == [[9, PAD, PAD]]


def test_positions_without_a_page_are_pad_even_inside_the_reservation() -> None:
    slots = slot_mapping_ref(torch.tensor([[3, 0]]), torch.tensor([[3, 4, 7]]), torch.tensor([8]), PAGE)
    assert slots.tolist() == [[15, PAD, PAD]]


def test_padded_rows_store_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    cache_k = torch.randn(2, 4, 2, 3, generator=generator)
    cache_v = torch.randn(2, 4, 2, 3, generator=generator)
    before_k, before_v = cache_k.clone(), cache_v.clone()
    keys, values = torch.ones(3, 2, 3), torch.full((3, 2, 3), 2.0)
    kv_store_ref(keys, values, cache_k, cache_v, torch.tensor([PAD, 6, PAD]))
    before_k[1, 2], before_v[1, 2] = 1, 2
    assert torch.equal(cache_k, before_k)
    assert torch.equal(cache_v, before_v)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 15])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
def test_attention_equals_its_definition(num_rows: int, is_causal: bool, window: int | None) -> None:
    check_attention(num_rows, is_causal, window, PLAIN)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", SOFTMAXES)
def test_sinks_and_caps_equal_their_definition(is_causal: bool, window: int | None, kind: str) -> None:
    check_attention(5, is_causal, window, random_softmax(kind, 6, device=torch.device("cpu")))


def check_attention(num_rows: int, is_causal: bool, window: int | None, softmax: Softmax) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    lens = [0, 1, PAGE - 1, PAGE, PAGE + 1, 13]
    num_requests, num_pages = len(lens), 4
    table = (torch.randperm(num_requests * num_pages, generator=generator) + 1).view(num_requests, num_pages)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    num_slots = (num_requests * num_pages + 1) * PAGE
    query, keys, values = (draw(num_requests, num_rows, heads, 8) for heads in (6, 2, 2))
    cache_k, cache_v = draw(num_slots, 2, 8), draw(num_slots, 2, 8)
    caches = (rows.view(-1, PAGE, 2, 8) for rows in poisoned(cache_k, cache_v, table, lens))
    out = block_attention_ref(
        query, keys, values, *between_layers(*caches), table, torch.tensor(lens),
        is_causal=is_causal, window=window, softmax=softmax,
    )  # fmt: skip
    sinks = [-math.inf] * 6 if softmax.sinks is None else softmax.sinks.tolist()
    for request, length in enumerate(lens):
        slots = [int(table[request, place // PAGE]) * PAGE + place % PAGE for place in range(length)]
        all_k = torch.cat((cache_k[slots], keys[request]))
        all_v = torch.cat((cache_v[slots], values[request]))
        for row in range(num_rows):
            for head in range(6):
                expected = attend_one(
                    query[request, row, head], all_k[:, head // 3], all_v[:, head // 3], length + row, is_causal,
                    window, softmax.cap, sinks[head],
                )  # fmt: skip
                assert torch.allclose(out[request, row, head], expected, atol=1e-12)


def poisoned(cache_k: Tensor, cache_v: Tensor, table: Tensor, lens: list[int]) -> tuple[Tensor, Tensor]:
    """Return copies with NaN in every slot outside the contexts."""
    is_context = torch.zeros(len(cache_k), dtype=torch.bool)
    for request, length in enumerate(lens):
        for place in range(length):
            is_context[int(table[request, place // PAGE]) * PAGE + place % PAGE] = True
    hole = ~is_context[:, None, None]
    return cache_k.masked_fill(hole, torch.nan), cache_v.masked_fill(hole, torch.nan)


def attend_one(
    query: Tensor, keys: Tensor, values: Tensor, position: int, is_causal: bool, window: int | None,
    cap: float | None, sink: float,
) -> Tensor:  # fmt: skip
    """Compute attention of one head of one row in plain Python."""
    weights, total = [], math.exp(sink)
    for place in range(len(keys)):
        distance = position - place
        is_seen = (distance >= 0 or not is_causal) and (window is None or abs(distance) < window)
        score = float(query @ keys[place]) / math.sqrt(len(query))
        score = score if cap is None else cap * math.tanh(score / cap)
        weight = math.exp(score) if is_seen else 0.0
        weights.append(weight)
        total += weight
    return torch.tensor(weights, dtype=torch.float64) @ values / total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rope_equal_transformers(dtype: torch.dtype) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 3, 16, generator=generator).to(dtype)
    norm = Qwen3RMSNorm(16, eps=1e-6).to(dtype)
    norm.weight.data = torch.randn(16, generator=generator).to(dtype)
    assert torch.equal(rms_norm_ref(hidden, norm.weight, 1e-6), norm(hidden))
    angles = torch.randn(2, 5, 8, generator=generator)
    cos, sin = (torch.cat((angle, angle), -1).to(dtype) for angle in (angles.cos(), angles.sin()))
    expected, _ = apply_rotary_pos_emb(hidden.transpose(1, 2), hidden.transpose(1, 2), cos, sin)
    assert torch.equal(rope_ref(hidden, cos, sin), expected.transpose(1, 2))


def test_filters_keep_the_expected_probabilities() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64)
    logits = probs.log()

    def filtered(top_k: int, top_p: float, temperature: float = 1.0) -> list[float]:
        arguments = (torch.tensor([value], dtype=kind) for value, kind in
                     ((temperature, torch.float64), (top_k, torch.int64), (top_p, torch.float64)))  # fmt: skip
        return [round(value, 6) for value in filtered_probs_ref(logits, *arguments)[0].tolist()]

    assert filtered(0, 1.0) == [0.5, 0.25, 0.15, 0.1]
    assert filtered(2, 1.0) == [0.666667, 0.333333, 0, 0]
    assert filtered(0, 0.6) == [0.666667, 0.333333, 0, 0]
    assert filtered(0, 0.5) == [1, 0, 0, 0]
    assert filtered(3, 0.9) == [0.555556, 0.277778, 0.166667, 0]
    assert filtered(0, 1e-9) == [1, 0, 0, 0]
    assert filtered(1, 1.0, temperature=5.0) == [1, 0, 0, 0]
    assert filtered(0, 1.0, temperature=0.5) == [round(p * p / 0.345, 6) for p in (0.5, 0.25, 0.15, 0.1)]


def test_filters_agree_with_transformers() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(6, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    for temperature, top_k, top_p in [(0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8), (0.9, 40, 0.5)]:
        scores = TemperatureLogitsWarper(temperature)(None, logits)
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        ours = filtered_probs_ref(
            logits,
            torch.full((6,), temperature, dtype=torch.float64),
            torch.full((6,), top_k),
            torch.full((6,), top_p, dtype=torch.float64),
        )
        assert torch.allclose(ours, scores.softmax(-1), atol=1e-12)


def test_uniforms_are_uniform_and_unrelated() -> None:
    positions = torch.arange(200_000)
    seeds = torch.full_like(positions, 7)
    numbers = uniform_ref(seeds, positions, 1)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers.float(), 100, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 149  # the 0.999 quantile of chi-square with 99 degrees
    for other in (uniform_ref(seeds + 1, positions, 1), uniform_ref(seeds, positions, 2), numbers.roll(1)):
        assert abs(torch.corrcoef(torch.stack((numbers, other)))[0, 1]) < 0.01


def test_uniforms_are_the_published_generator() -> None:
    """splitmix64 with the seed 1234567 starts with 6457827717110365317. `uniform_ref` applies splitmix64 twice."""
    mask = 2**64 - 1

    def splitmix(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
        state = (state ^ state >> 27) * 0x94D049BB133111EB & mask
        return state ^ state >> 31

    golden = 0x9E3779B97F4A7C15
    assert splitmix(1234567 + golden & mask) == 6457827717110365317
    for seed, position, purpose in [(0, 0, 1), (5, 123, 1), (-3, 4095, 2), (2**62, 9, 3)]:
        state = splitmix(seed + golden * (purpose + 1) & mask)
        expected = (splitmix(state + golden * (position + 1) & mask) >> 11) * 2.0**-53
        assert uniform_ref(torch.tensor([seed]), torch.tensor([position]), purpose).item() == expected


def test_tokens_with_a_probability_of_zero_are_never_sampled() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64).expand(4, -1)
    uniform = torch.tensor([0.0, 0.4999999, 0.5, 1 - 2**-53], dtype=torch.float64)
    assert categorical_ref(probs, uniform).tolist() == [1, 1, 3, 3]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    zeros, ones = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.float64)
    chosen = sample_ref(logits, temperatures, zeros, ones, torch.arange(4), zeros).token_ids
    assert chosen[[0, 2]].tolist() == logits.argmax(-1)[[0, 2]].tolist()
    alone = sample_ref(logits[1:2], temperatures[1:2], zeros[:1], ones[:1], torch.tensor([1]), zeros[:1])
    assert chosen[1] == alone.token_ids[0]
