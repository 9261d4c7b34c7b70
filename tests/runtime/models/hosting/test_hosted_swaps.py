"""Modules of hosted targets are swapped for our kernels where these agree, and stay as they are elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.suite import REFERENCE, triton_kernels
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.models import agreement
from dflash_runtime.models.agreement import agree, error_of, tolerance_of
from dflash_runtime.models.hosting import swapped_attention
from dflash_runtime.models.hosting.hosted_swaps import Swaps, swap_modules
from dflash_runtime.models.hosting.swapped_modules import Call, Setting, SwappedLinear
from dflash_runtime.models.layers import Linear
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.hosted_models import DEFAULT, SERVED, host, make_model, plain_text
from dflash_testing.pairs import random_draft, random_llm, random_prompts, random_target

WIDTH, INNER, ROWS = 16, 24, 4


class Norm(nn.Module):
    """An RMS norm. Its weight may be stored as a difference from 1."""

    def __init__(self, offset: float = 0.0, eps: float = 1e-6, real_eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, generator=torch.Generator().manual_seed(1)))
        self.eps, self._real_eps, self._offset = eps, real_eps, offset

    def forward(self, rows: Tensor) -> Tensor:
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._real_eps)
        return (wide * scale * (self._offset + self.weight.float())).to(rows.dtype)


class Centred(Norm):
    """A norm that subtracts the mean first."""

    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows - rows.mean(-1, keepdim=True))


class FeedForward(nn.Module):
    def __init__(self, gate: Callable[[Tensor], Tensor], *, is_swapped: bool = False) -> None:
        super().__init__()
        names = ("b", "a") if is_swapped else ("a", "b")
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, INNER, bias=False))
        self.c = nn.Linear(INNER, WIDTH, bias=False)
        self._gate = gate

    def forward(self, rows: Tensor) -> Tensor:
        a, b, c = (self.get_submodule(name) for name in "abc")
        return c(self._gate(a(rows)) * b(rows))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, rows: Tensor) -> Tensor:
        return self.module(rows)  # type: ignore[no-any-return]


def swap(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Decoder, Swaps]:
    """Swap what can be swapped in a decoder with one module."""
    torch.manual_seed(0)
    decoder = Decoder(module).to(dtype)
    rows = torch.randn(1, ROWS, WIDTH).to(dtype)
    with torch.no_grad():
        swaps = swap_modules(decoder, Setting(random_target().config, REFERENCE, {}), lambda: decoder(rows)[0])
    return decoder, swaps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "counts"),
    [
        (Norm, {"norm": 1}),
        (lambda: Norm(offset=1.0), {"norm": 1}),
        (lambda: Norm(offset=0.5), {}),
        (lambda: Norm(eps=1e-6, real_eps=1e-5), {}),
        (Centred, {}),
        (lambda: FeedForward(nn.functional.silu), {"feed-forward": 1}),
        (lambda: FeedForward(nn.functional.silu, is_swapped=True), {"feed-forward": 1}),
        (lambda: FeedForward(nn.functional.gelu), {"linear": 3}),
        (lambda: FeedForward(nn.GELU()), {"linear": 3}),
        (lambda: FeedForward(nn.GELU(approximate="tanh")), {"feed-forward": 1}),
        (lambda: FeedForward(nn.GELU(approximate="tanh"), is_swapped=True), {"feed-forward": 1}),
        (lambda: nn.Linear(WIDTH, INNER, bias=False), {"linear": 1}),
        (lambda: nn.Linear(WIDTH, INNER), {}),
        (lambda: nn.LayerNorm(WIDTH), {}),
    ],
)  # fmt: skip
def test_a_module_is_swapped_only_if_its_swap_agrees(
    make: Callable[[], nn.Module], counts: dict[str, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    module = make()
    decoder, swaps = swap(module, dtype)
    assert swaps.counts == counts
    rows = torch.randn(1, 9, WIDTH).to(dtype)
    with torch.no_grad():
        ours = decoder(rows)
        swaps.undo()
        assert agree(ours, decoder(rows))
    assert not [name for name, item in decoder.named_modules() if "forward" in vars(item)]


def test_stacked_weights_are_stored_once() -> None:
    module = FeedForward(nn.functional.silu)
    swap(module)
    first, second = module.get_parameter("a.weight"), module.get_parameter("b.weight")
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_module_with_a_hidden_effect_loses_all_swaps() -> None:
    """The comparison of one module does not see the effect; the comparison of the whole decoder does."""

    class Sly(Norm):
        def forward(self, rows: Tensor) -> Tensor:
            rows.mul_(1.0)
            seen.append(len(rows))
            return super().forward(rows)

    class Reader(Decoder):
        def forward(self, rows: Tensor) -> Tensor:
            seen.clear()
            return super().forward(rows) * (1 + len(seen))

    seen: list[int] = []
    decoder, rows = Reader(Sly()), torch.randn(1, ROWS, WIDTH)
    with torch.no_grad():
        swaps = swap_modules(decoder, Setting(random_target().config, REFERENCE, {}), lambda: decoder(rows)[0])
    assert not swaps.counts
    assert "forward" not in vars(decoder.module)


def test_the_tolerance_is_a_few_roundings_of_a_row() -> None:
    theirs = torch.tensor([[1.0, 100.0], [1e-3, 1e-5]], dtype=torch.bfloat16)
    eps = torch.finfo(torch.bfloat16).eps
    assert tolerance_of(torch.bfloat16) == agreement.ROUNDINGS * eps
    assert tolerance_of(torch.float32) == agreement.LEAST
    assert agree(theirs + torch.tensor([[0.5, 0.5], [0, 0]], dtype=torch.bfloat16), theirs)
    assert not agree(theirs + torch.tensor([[0, 0], [1e-3, 0]], dtype=torch.bfloat16), theirs)
    assert error_of(theirs * float("nan"), theirs) == float("inf")
    assert error_of(theirs.float(), theirs) == float("inf")


FAMILIES: dict[str, dict[str, int]] = {
    "qwen3": {"attention": 4, "feed-forward": 4, "norm": 9},
    "gemma2": {"attention": 4, "feed-forward": 4, "norm": 17},
    "gpt_oss": {"norm": 9},
    "phi3": {"attention": 4, "feed-forward": 4, "norm": 9},
    "cohere": {"attention": 4, "feed-forward": 4},
    "cohere2": {"attention": 4, "feed-forward": 4},
    "glm": {"attention": 4, "feed-forward": 4, "norm": 9},
    "stablelm": {"attention": 4, "feed-forward": 4},
    "smollm3": {"attention": 4, "feed-forward": 4, "norm": 9},
    "gemma4_text": {"linear": 20, "feed-forward": 4, "norm": 30},
}
"""Swapped modules of each kind. Cohere rotates adjacent pairs, GLM and StableLM a part of each head, and Cohere 2 and
SmolLM3 nothing in some layers. Of gpt-oss and Gemma 4 only parts are swapped."""


@pytest.mark.parametrize("kind", FAMILIES)
def test_modules_of_a_family(kind: str, tmp_path: Path) -> None:
    make_model(tmp_path, kind)
    assert host(tmp_path).swaps.counts == FAMILIES[kind]
    assert not host(tmp_path, has_swaps=False).swaps.counts


@pytest.mark.interpreter
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "phi3", "mixtral", "cohere", "cohere2", "glm", "smollm3"])
def test_the_triton_kernels_agree_with_as_many_modules(kind: str, tmp_path: Path) -> None:
    """Their text is transformers' text."""
    model = make_model(tmp_path, kind)
    target = host(tmp_path, kernels=triton_kernels())
    assert target.swaps.counts == host(tmp_path).swaps.counts
    assert target.uncaptured is None
    settings: dict[str, Any] = {"kernels": "triton", "max_num_requests": 2, "max_batched_tokens": 12, "num_pages": 30}
    (prompt,) = random_prompts((9,), target.config.vocab_size)
    (output,) = random_llm(target, random_draft(target), 7, **settings).generate(
        [prompt], SamplingParams(max_new_tokens=4)
    )
    assert list(output.token_ids) == plain_text(model, prompt, 4)


def test_the_config_switches_swaps_off(tmp_path: Path) -> None:
    make_model(tmp_path, "gemma2")
    for is_on in (True, False):
        config = EngineConfig(device="cpu", max_model_len=64, target_runtime="transformers", module_swaps=is_on)
        target: Any = load_pair(open_target(tmp_path), None, config).target
        assert bool(target.swaps.modules) == is_on


def test_attention_that_hands_something_on_is_not_swapped() -> None:
    """Layers that share keys and values pass them in an argument of the call."""
    rows, tables = torch.zeros(1, ROWS, WIDTH), (torch.zeros(1, ROWS, 8), torch.zeros(1, ROWS, 8))
    plain = {"hidden_states": rows, "position_embeddings": tables, "attention_mask": None}
    for more, is_swapped in (({}, True), ({"shared_kv_states": {}}, False), ({"use_cache": True}, True)):
        call = Call((), {**plain, **more}, (rows, None))
        assert swapped_attention._is_attention_call(call, tables) == is_swapped


EVERY = [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in SERVED]


@pytest.mark.parametrize("kind", EVERY)
def test_the_forward_of_every_family_can_be_captured(kind: str, tmp_path: Path) -> None:
    make_model(tmp_path, kind)
    for has_swaps in (True, False):
        assert host(tmp_path, has_swaps=has_swaps).uncaptured is None


def test_rows_that_lie_across_in_memory() -> None:
    """A convolution over tokens may leave the rows of a text in columns."""
    weight, rows = torch.randn(INNER, WIDTH), torch.randn(1, WIDTH, ROWS).transpose(1, 2)
    assert agree(SwappedLinear(Linear(weight, None, triton_kernels()))(rows), rows @ weight.T)
