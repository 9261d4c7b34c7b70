"""Top-k and top-p filters: they keep the tokens of the reference, write no distribution and skip unfiltered rows."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_kernels.launch_config import LISTED_TILE, VOCAB_GROUP, VOCAB_TILE
from dflash_kernels.logits import candidates, filters, logit_tiles, rejection, sampling
from dflash_kernels.logits.logit_tiles import launch_stats
from dflash_kernels.logits.sampling import argmax, filtered_probs_ref, sample, sample_ref
from dflash_kernels.suite import triton_kernels
from dflash_testing.distributions import filtered_probs, reject_probs
from dflash_testing.tensors import DEVICE, normal, real, whole

VOCAB = VOCAB_TILE + 1000
MANY = VOCAB // VOCAB_GROUP + 10
"""A top-k above the number of groups: the maxima of the groups give no bound."""

REQUESTS = [
    (0.0, 0, 1.0), (0.0, 20, 0.9), (0.7, 0, 1.0), (0.6, 20, 0.95), (1.0, 1, 1.0), (1.0, MANY, 1.0), (1.0, MANY, 0.3),
    (1.5, VOCAB - 1, 1.0), (1.0, 0, 0.95), (0.2, 0, 0.5), (40.0, 0, 0.999), (1.0, 0, 1 - 1e-12), (1e-5, 3, 0.9),
    (1.0, 0, 1e-9), (1.0, VOCAB, 1.0), (0.8, 300, 0.999),
]  # fmt: skip
"""Temperature, top_k, top_p: greedy, unfiltered, each filter, both; for flat and steep distributions."""

Values = tuple[Tensor, Tensor, Tensor]


def values() -> Values:
    temperatures, top_ks, top_ps = zip(*REQUESTS, strict=True)
    return real(*temperatures), whole(*top_ks), real(*top_ps)


def logits_of(kind: str, num_rows: int, dtype: torch.dtype) -> Tensor:
    logits = normal(num_rows, VOCAB, dtype=torch.float32)
    if kind == "steep":
        logits = logits * 6
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "low":
        logits = logits - 100
        logits[:, ::3] = float("-inf")
    return logits.to(dtype)


KINDS = ["steep", "flat", "ties", "low"]
FEW = [("ties", torch.float32), ("low", torch.float16)]
"""Default cases. Low temperatures make some of their rows steep."""


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *FEW,
        *(pytest.param("flat", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float32)),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind in KINDS
            for dtype in (torch.float32, torch.float16)
        ),
    ],
)
def test_mixed_requests_sample_the_tokens_of_the_reference(kind: str, dtype: torch.dtype) -> None:
    """Each request has two rows."""
    num_rows = 2 * len(REQUESTS)
    logits = logits_of(kind, num_rows, dtype)
    seeds = torch.arange(len(REQUESTS), device=DEVICE) * 977
    positions = torch.arange(num_rows, device=DEVICE)
    ours, expected = (draw(logits, *values(), seeds, positions) for draw in (sample, sample_ref))
    assert torch.equal(ours.token_ids, expected.token_ids)
    assert bool(ours.is_finite.all())
    assert torch.equal(ours.token_ids[:4], argmax(logits[:4]))


@pytest.mark.parametrize("kind", ["flat", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS)])
def test_mixed_requests_keep_the_tokens_of_the_reference(kind: str) -> None:
    logits = logits_of(kind, len(REQUESTS), torch.float32)
    probs, expected = (cut(logits, *values()) for cut in (filtered_probs, filtered_probs_ref))
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, atol=1e-14, rtol=1e-11)


def test_greedy_and_unfiltered_rows_are_not_searched() -> None:
    """They list no groups, and their masses still hold NaN of fresh memory."""
    logits = logits_of("flat", len(REQUESTS), torch.float32)
    temperatures, top_ks, top_ps = values()
    stats = launch_stats(logits, temperatures, top_ks, top_ps, is_greedy=False, has_filters=True)
    cut = filters.launch_cut(logits, temperatures, top_ks, top_ps, stats)
    is_cut = (temperatures > 0) & (((top_ks > 0) & (top_ks < VOCAB)) | (top_ps < 1))
    assert torch.equal(cut.num_listed > 0, is_cut)
    assert torch.equal(~cut.masses.isnan(), is_cut)
    # A top-k lists about as many groups as tokens, not the whole vocabulary.
    assert 0 < int(cut.num_listed[3]) <= 20


NUCLEI = [(0.6, 0.95), (0.6, 0.99), (0.3, 0.5), (1e-4, 0.9), (2.0, 1e-6), (0.6, 1 - 1e-9), (1.0, 0.9), (3.0, 0.999)]
"""Temperature and top_p that keep from one token to most tokens of the test's logits."""
NUM_NARROW = 5


@pytest.mark.parametrize("kind", ["normal", pytest.param("ties", marks=pytest.mark.slow), "adjacent"])
def test_top_p_searches_few_more_tokens_than_it_keeps(kind: str) -> None:
    """For any number of kept tokens, scattered or adjacent, and with lists of groups or tokens."""
    logits = normal(len(NUCLEI), 6 * VOCAB_TILE - 100, dtype=torch.float32) * 3
    if kind == "ties":
        logits = logits.round()
    if kind == "adjacent":
        logits[:, 640:700] += 9
    temperatures, top_ps = (real(*values) for values in zip(*NUCLEI, strict=True))
    rows = temperatures, whole(*[0] * len(NUCLEI)), top_ps
    stats = launch_stats(logits, *rows, is_greedy=False, has_filters=True)
    cut = filters.launch_cut(logits, *rows, stats)
    expected = filtered_probs_ref(logits, *rows)
    probs = filtered_probs(logits, *rows)
    assert torch.equal(probs > 0, expected > 0)
    torch.testing.assert_close(probs, expected, atol=1e-14, rtol=1e-11)
    num_kept = (expected > 0).sum(-1)
    num_read = torch.where(cut.has_tokens > 0, cut.num_listed, cut.num_listed * VOCAB_GROUP)
    assert bool((num_read >= num_kept).all())
    assert kind == "adjacent" or {bool(item) for item in cut.has_tokens} == {False, True}
    # If a row lists more groups than one read, its tokens are listed.
    assert bool((num_read <= 3 * num_kept + LISTED_TILE)[:NUM_NARROW].all())


class Allocations(TorchDispatchMode):
    """Records the number of elements of the largest new float64 tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float64:
            self.largest = max(self.largest, out.numel())
        return out


def test_sampling_writes_no_distribution() -> None:
    logits = logits_of("flat", len(REQUESTS), torch.float16)
    seeds = torch.arange(len(REQUESTS), device=DEVICE)
    with Allocations() as made:
        sample(logits, *values(), seeds, seeds)
    assert 0 < made.largest <= 2 * len(logits)
    with Allocations() as made:
        sample_ref(logits, *values(), seeds, seeds)
    assert made.largest == logits.numel()


class Counted:
    """A kernel that records its launches."""

    def __init__(self, kernel: Any, launches: list[str]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        self.launches.append(self.kernel.__name__)
        return self.kernel[grid]


def count_launches(modules: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    launches: list[str] = []
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Counted(getattr(module, name), launches))
    return launches


def test_number_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches sample, two more filter, three reject. Each costs a few microseconds in a captured step."""
    launches = count_launches((logit_tiles, candidates, filters, sampling, rejection), monkeypatch)
    logits = logits_of("flat", 2, torch.float32)
    rows = real(0, 1), whole(3, 3), real(1, 0.9), whole(1, 2), whole(3, 4)
    p = logits.softmax(-1).view(1, 2, -1)
    ones = whole(1)
    for call, expected in (
        (lambda: reject_probs(triton_kernels(), ones[None], p, p[:, 1:], ones, ones, ones), 3),
        (lambda: argmax(logits), 2),
        (lambda: sample(logits, *rows, is_greedy=True), 2),
        (lambda: sample(logits, *rows, has_filters=False), 2),
        (lambda: sample(logits, *rows), 4),
    ):
        launches.clear()
        call()
        assert len(launches) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0])
def test_a_whole_vocabulary_in_bfloat16(scale: float) -> None:
    logits = (normal(4 * len(REQUESTS), 151_936) * scale).to(torch.bfloat16)
    seeds = torch.arange(len(REQUESTS), device=DEVICE) * 31
    positions = torch.arange(len(logits), device=DEVICE)
    ours, expected = (draw(logits, *values(), seeds, positions) for draw in (sample, sample_ref))
    assert torch.equal(ours.token_ids, expected.token_ids)


@pytest.mark.gpu
def test_more_rows_per_request_compile_nothing() -> None:
    def run(num_repeats: int) -> None:
        logits = normal(2 * num_repeats, VOCAB, dtype=torch.bfloat16)
        positions = torch.arange(2 * num_repeats, device=DEVICE)
        sample(logits, real(1, 0), whole(5, 5), real(0.9, 0.9), whole(1, 2), positions)
        sample(logits, real(1, 0), whole(0, 0), real(1, 1), whole(1, 2), positions, has_filters=False)

    modules = logit_tiles, candidates, filters, sampling
    kernels = [kernel for module in modules for name, kernel in vars(module).items()
               if name.endswith("_kernel")]  # fmt: skip

    def num_compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    run(3)
    compiled = num_compiled()
    for num_repeats in (1, 2, 16, 32):
        run(num_repeats)
    assert num_compiled() == compiled > 0
