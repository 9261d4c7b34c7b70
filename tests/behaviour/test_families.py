"""Each native target family against transformers' own class: hidden states, taps, logits, and text with a draft.

transformers makes and saves the random models, and the runtime loads them as any checkpoint.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_kernels.suite import REFERENCE, Kernels, triton_kernels
from dflash_runtime.checkpoint.layout import owned_shapes
from dflash_runtime.drafts.dflash import DFlashDraft
from dflash_runtime.drafts.draft import Draft
from dflash_runtime.errors import InvalidConfig, TensorMismatch, UnsupportedError
from dflash_runtime.models.layers import Attend
from dflash_runtime.models.placement import Placement
from dflash_runtime.models.target import Target, target_families
from dflash_runtime.models.target_loading import load_target
from dflash_runtime.models.weights import stack_projections
from dflash_runtime.scheduling.request_output import RequestOutput
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.pairs import (
    CPU,
    DenseAttention,
    ScriptedDraft,
    always_right,
    random_draft,
    random_draft_config,
    random_llm,
    random_prompts,
    random_weights,
)
from dflash_testing.refusals import refuses

Json = dict[str, Any]

VOCAB = 97
NUM_LAYERS = 4
NUM_DRAFTS = 4
TAPS = (0, 2, NUM_LAYERS - 1)
WINDOW = 6
SIZES: Json = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
EXPERTS: Json = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}
GPT_OSS: Json = {
    "model_type": "gpt_oss",
    "head_dim": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
FAMILIES: dict[str, Json] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama with biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "mistral with a window": {"model_type": "mistral", "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2 with windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
    },
    "qwen3 with biases": {"model_type": "qwen3", "attention_bias": True, "head_dim": 8},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "qwen3_moe, some layers dense": {
        **EXPERTS,
        "norm_topk_prob": False,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "gpt_oss": {**GPT_OSS, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss, limited": {
        **GPT_OSS, "layer_types": ["full_attention", *["sliding_attention"] * 3], "swiglu_limit": 0.4, "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}  # fmt: skip
"""Name -> the keys of its config other than the sizes."""

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65)


def make_model(path: Path, name: str) -> PreTrainedModel:
    """Return a random model of transformers, and save it. Its biases and norms are random too."""
    config = AutoConfig.for_model(**{**SIZES, **FAMILIES[name]})
    config._attn_implementation = "eager"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    if name == "gpt_oss, limited" and model.model.layers[0].mlp.experts.limit != config.swiglu_limit:
        pytest.skip("this release of transformers ignores swiglu_limit")
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(random * 0.3 + ("norm" in key))
    model.save_pretrained(path)
    return model


class Family:
    """A model as transformers runs it, and the same model as a target."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.model = make_model(path, name)
        self.target = self.load(REFERENCE)
        self._texts: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def load(self, kernels: Kernels) -> Target:
        return load_target(open_target(self.path), Placement(CPU, torch.float32, kernels, num_positions=256))

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return transformers' greedy text. All tests share one run per prompt and length."""
        key = tuple(prompt), num_tokens
        if key not in self._texts:
            self._texts[key] = self._generate(*key)
        return self._texts[key]

    def _generate(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        text = self.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        return list(text[0, len(prompt) :].tolist())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(tmp_path_factory.mktemp("family"), request.param)


class WindowedAttention(DenseAttention):
    """`DenseAttention` over each layer's window."""

    def __init__(self, windows: Sequence[int | None]) -> None:
        super().__init__(is_causal=True)
        self._windows = windows

    def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
        window = self._windows[layer]
        if window is None:
            return super().__call__(layer, query, keys, values, softmax)
        plain = super().__call__
        rows = [slice(max(0, row - window + 1), row + 1) for row in range(len(query))]
        # Causal attention over only the window; the last row is the wanted one.
        return torch.cat([plain(layer, query[at], keys[at], values[at], softmax)[-1:] for at in rows])

    read = __call__


class RightAtFirst(ScriptedDraft):
    """Right in the first rows of every block, and wrong in the others. Finds a block by its anchor and position."""

    def __init__(self, draft: Draft, sequences: Sequence[Sequence[int]], num_right: int) -> None:
        super().__init__(draft, lambda position: 0)
        self._ahead = {(at, text[at]): text[at + 1 :] for text in sequences for at in range(len(text))}
        self._num_right = num_right

    def logits(self, block_ids: Tensor, positions: Tensor, attend: Attend, num_drafts: int | None = None) -> Tensor:
        rows = [self._block(int(ids[0]), int(at[0]), len(at) - 1) for ids, at in zip(block_ids, positions, strict=True)]
        return torch.nn.functional.one_hot(torch.tensor(rows), VOCAB).float()[:, :num_drafts]

    def _block(self, anchor: int, position: int, length: int) -> list[int]:
        ahead = [*self._ahead.get((position, anchor), ()), *[0] * length][:length]
        return [token if index < self._num_right else (token + 1) % VOCAB for index, token in enumerate(ahead)]


def draft_texts(
    family: Family, draft: Draft, prompts: Sequence[Sequence[int]], num_tokens: int, batch: int = 1, **engine: Any
) -> list[RequestOutput]:
    llm = random_llm(family.target, draft, NUM_DRAFTS, max_num_requests=batch, **engine)
    return llm.generate(prompts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))


def test_hidden_states_taps_and_logits_equal_those_of_transformers(family: Family) -> None:
    (tokens,) = random_prompts([40], VOCAB)
    attend = WindowedAttention(family.target.config.windows)
    with torch.inference_mode():
        wanted = family.model(torch.tensor([tokens]), output_hidden_states=True)
        hidden, features = family.target(torch.tensor(tokens), torch.arange(len(tokens)), attend, TAPS)
        logits = family.target.head(hidden)
    assert features is not None
    # transformers' last hidden state is normalised; its state `tap + 1` is the output of layer `tap`.
    torch.testing.assert_close(hidden, wanted.hidden_states[-1][0], rtol=1e-4, atol=1e-4)
    for tap, feature in zip(TAPS[:-1], features.split(SIZES["hidden_size"], dim=-1), strict=False):
        torch.testing.assert_close(feature, wanted.hidden_states[tap + 1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, wanted.logits[0], rtol=1e-4, atol=1e-4)


def test_the_last_layer_can_be_tapped(family: Family) -> None:
    (tokens,) = random_prompts([9], VOCAB)
    outputs: list[Tensor] = []
    hook = family.model.model.layers[-1].register_forward_hook(lambda *parts: outputs.append(parts[-1]))
    attend = WindowedAttention(family.target.config.windows)
    with torch.inference_mode():
        family.model(torch.tensor([tokens]))
        _, features = family.target(torch.tensor(tokens), torch.arange(len(tokens)), attend, TAPS[-1:])
    hook.remove()
    assert features is not None
    torch.testing.assert_close(features, outputs[0][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 4])
def test_text_with_a_random_draft_is_that_of_transformers(family: Family, batch: int) -> None:
    prompts = random_prompts(LENGTHS, VOCAB)
    found = draft_texts(family, random_draft(family.target), prompts, 8, batch)
    assert [list(output.token_ids) for output in found] == [family.generate(prompt, 8) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("engine", [{"scheduling": "sync"}, {"scheduling": "async", "max_batched_tokens": 9}], ids=str)
def test_text_after_prompts_of_every_length(family: Family, engine: Json) -> None:
    prompts = random_prompts(range(1, 66), VOCAB)
    found = draft_texts(family, random_draft(family.target), prompts, 12, 4, **engine)
    assert [list(output.token_ids) for output in found] == [family.generate(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    "num_right", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (0, 2, NUM_DRAFTS - 1, NUM_DRAFTS))]
)
def test_every_number_of_tokens_is_accepted_and_dropped(family: Family, num_right: int) -> None:
    """Each request runs alone, and then all run in one batch.

    In a batch the draft confuses two requests that have the same anchor at the same position. By default the test
    leaves out the numbers that tests of random and right drafts cover.
    """
    num_tokens = 4 * NUM_DRAFTS
    prompts = random_prompts((3, 5, 14, 21), VOCAB)
    wanted = [family.generate(prompt, num_tokens) for prompt in prompts]
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, wanted, strict=True)]
    inner = random_draft(family.target)
    for prompt, text, tokens in zip(prompts, texts, wanted, strict=True):
        (alone,) = draft_texts(family, RightAtFirst(inner, [text], num_right), [prompt], num_tokens)
        assert list(alone.token_ids) == tokens
        assert set(alone.acceptance_lengths[:-1]) == {num_right + 1}
    together = draft_texts(family, RightAtFirst(inner, texts, num_right), prompts, num_tokens, 4)
    assert [list(output.token_ids) for output in together] == wanted
    assert all(num_right + 1 in output.acceptance_lengths for output in together)


def test_a_draft_that_is_right_is_accepted_whole(family: Family) -> None:
    (prompt,) = random_prompts([7], VOCAB)
    wanted = family.generate(prompt, 20)
    draft = always_right(random_draft(family.target), [*prompt, *wanted])
    (found,) = draft_texts(family, draft, [prompt], 20)
    assert list(found.token_ids) == wanted
    assert set(found.acceptance_lengths[:-1]) == {NUM_DRAFTS + 1}


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["qwen2 with windows", pytest.param("llama with biases", marks=pytest.mark.slow)])
def test_the_triton_kernels_serve_it(name: str, tmp_path: Path) -> None:
    """Families without head norms and with biases run in the interpreter."""
    family = Family(tmp_path, name)
    prompts = random_prompts((3, 9), VOCAB)
    wanted = [family.generate(prompt, 4) for prompt in prompts]
    family.target = family.load(triton_kernels())
    config = random_draft_config(family.target.config)
    weights = stack_projections(random_weights(owned_shapes(config), torch.float32, 1).items())
    draft = DFlashDraft(config, weights, family.target, Placement(CPU, torch.float32, triton_kernels(), 256))
    found = draft_texts(family, draft, prompts, 4, 2, kernels="triton", max_batched_tokens=8, num_pages=30)
    assert [list(output.token_ids) for output in found] == wanted


def test_the_command_line_runs_it(tmp_path: Path) -> None:
    """`--check-lossless` compares every token with plain decoding."""
    family = Family(tmp_path / "target", "llama")
    shape = support.Shape(hidden=SIZES["hidden_size"], vocab=VOCAB, draft_vocab=VOCAB, mask=VOCAB - 1)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [7, 3, 5]}\n')
    draft = support.make_native(tmp_path / "draft", shape)
    pair = ("-d", draft, "-t", family.path, "--device", "cpu")
    outcome = invoke(
        "generate", "--prompts", prompts, "--output", "-", "-n", 9, "--ignore-eos", "--check-lossless", *pair
    )
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["token_ids"] == family.generate([7, 3, 5], 9)


def make_target(path: Path, **changes: Any) -> Path:
    """Save a model with changed keys in its config. None removes a key."""
    make_model(path, changes.pop("name", "llama"))
    config = json.loads((path / "config.json").read_text()) | changes
    support.write_config(path, {key: value for key, value in config.items() if value is not None})
    return path


class TestRefused:
    """A setting or tensor that the family does not compute is refused by name."""

    @pytest.mark.parametrize("name", ["llama", "mistral"])
    def test_layer_types_that_transformers_ignores(self, name: str, tmp_path: Path) -> None:
        kinds = ["sliding_attention", "full_attention"] * 2
        target = open_target(make_target(tmp_path, name=name, layer_types=kinds, sliding_window=WINDOW))
        with refuses(UnsupportedError, "layer-types-ignored", field="model_type", found=name):
            _ = target.config

    def test_a_decoder_within_another_model(self, tmp_path: Path) -> None:
        path = make_target(tmp_path)
        text = json.loads((path / "config.json").read_text())
        support.write_config(path, {"model_type": "llava", "text_config": text, "vision_config": {}})
        with refuses(UnsupportedError, "target-not-run", field="model_type", found="llama") as refused:
            load_target(open_target(path), Placement(CPU, torch.float32, REFERENCE, 256))
        assert "text_config" in refused.value.message
        outcome = invoke("generate", "x", "-t", path, "-k", 0, "-n", 2, "--target-runtime", "native")
        assert outcome.code == 5, outcome.err
        assert refused.value.message in outcome.err

    def test_biases_that_its_config_does_not_state(self, tmp_path: Path) -> None:
        path = make_target(tmp_path, name="llama with biases", attention_bias=False, mlp_bias=False)
        with refuses(UnsupportedError, "tensors-not-applied", path=path) as refused:
            load_target(open_target(path), Placement(CPU, torch.float32, REFERENCE, 256))
        assert len(refused.value.found) == 7 * NUM_LAYERS
        assert all(name.endswith("_proj.bias") for name in refused.value.found)

    def test_biases_that_are_stated_and_absent(self, tmp_path: Path) -> None:
        target = open_target(make_target(tmp_path, mlp_bias=True))
        with pytest.raises(TensorMismatch) as refused:
            load_target(target, Placement(CPU, torch.float32, REFERENCE, 256))
        assert "model.layers.0.mlp.down_proj.bias" in refused.value.missing

    def test_windows_from_a_layer_that_is_not_stated(self, tmp_path: Path) -> None:
        path = make_target(tmp_path, name="qwen2 with windows", layer_types=None, max_window_layers=None)
        with refuses(InvalidConfig, field="max_window_layers"):
            _ = open_target(path).config


def test_windows_are_read_without_layer_types(tmp_path: Path) -> None:
    """Qwen2.5 and Mistral are published without layer_types."""
    path = make_target(tmp_path, name="qwen2 with windows", layer_types=None)
    assert open_target(path).config.windows == (None, WINDOW, WINDOW, WINDOW)
    support.write_config(path, json.loads((path / "config.json").read_text()) | {"use_sliding_window": False})
    assert open_target(path).config.windows == (None,) * NUM_LAYERS


def test_every_family_is_compared() -> None:
    """`test_hybrid_targets.py` compares the families with recurrent layers, and `test_unlike_layers.py` Gemma 4."""
    hybrids = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"}
    gemmas = {"gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"}
    assert {item["model_type"] for item in FAMILIES.values()} | hybrids | gemmas == set(target_families())
