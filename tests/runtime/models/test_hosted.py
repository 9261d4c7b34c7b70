"""What transformers' own code is held to when it runs a target over our pages, and what is refused by name."""

import ast
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.terminal import documentation
from dflash_runtime.config import EngineConfig
from dflash_runtime.device.loading import load_pair
from dflash_runtime.errors import CheckpointError, TensorMismatch, UnsupportedError, UsageError
from dflash_runtime.models import hosted, hosted_config, hosted_loading
from dflash_runtime.models.hosted import HostedAttention, HostedTarget, ScaledHead
from dflash_runtime.models.target import find_target_runtime, load_target
from dflash_testing import checkpoints as support
from dflash_testing.hosted_models import (
    BODY,
    DEFAULT,
    REFUSED,
    SERVED,
    WindowedAttention,
    host,
    make_model,
    skip_unknown,
)
from dflash_testing.pairs import placement, random_target

KINDS = [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in SERVED]


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_the_hidden_states(kind: str, tmp_path: Path) -> None:
    """In the order they are asked for, the last layer's before the final norm; logits are the model's own too."""
    model, target = make_model(tmp_path, kind), host(tmp_path)
    last: list[Tensor] = []
    layers = next(item for item in model.get_decoder().children() if isinstance(item, nn.ModuleList))
    layers[3].register_forward_hook(lambda module, given, out: last.append(out if isinstance(out, Tensor) else out[0]))
    ids = torch.randint(0, BODY["vocab_size"], (23,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(ids[None], output_hidden_states=True, use_cache=False)
        attend = WindowedAttention(target.config.windows)
        hidden, features = target(ids, torch.arange(23), attend, (3, 0, 2))
        logits, nothing = target.head(hidden), target(ids, torch.arange(23), attend, ())[1]
    states = [last[0][0], wanted.hidden_states[1][0], wanted.hidden_states[3][0]]
    assert features is not None
    torch.testing.assert_close(features, torch.cat(states, dim=-1), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(logits, wanted.logits[0], rtol=1e-4, atol=1e-4 * float(wanted.logits.abs().max()))
    assert nothing is None
    assert not any(module._forward_hooks for module in target._layers)


def test_a_scaled_embedding_is_the_raw_one_times_its_scale(tmp_path: Path) -> None:
    model, target = make_model(tmp_path, "gemma3_text"), host(tmp_path)
    ids = torch.arange(9)
    looked_up = model.get_input_embeddings()(ids)
    torch.testing.assert_close(target.embedding[ids] * target.config.embedding_scale, looked_up)
    assert target.config.embedding_scale == 32**0.5


NOT_OVER_PAGES: dict[str, tuple[dict[str, Any], str]] = {
    "qwen3_next": ({}, "layer_types linear_attention, whose state would keep rejected tokens"),
    "qwen3_5_text": ({}, "linear attention, whose state would keep rejected tokens (linear_num_value_heads)"),
    "lfm2": ({}, "convolutions, whose state would keep rejected tokens (conv_L_cache)"),
    "mamba": ({}, "state-space layers, whose state would keep rejected tokens (state_size)"),
    "falcon_h1": ({}, "state-space layers, whose state would keep rejected tokens (mamba_d_state)"),
    "deepseek_v3": ({"head_dim": None}, "latent attention, whose KV are one vector for all heads (kv_lora_rank)"),
    "llama4_text": ({}, "layer_types chunked_attention, chunked attention (attention_chunk_size)"),
    "mimo_v2_flash": ({}, "values of another size than keys (v_head_dim)"),
    "olmo2": (
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "rope type dynamic, whose frequencies change with the length of the text",
    ),
}


@pytest.mark.parametrize("kind", NOT_OVER_PAGES)
def test_what_our_pages_do_not_do_is_named(kind: str, tmp_path: Path) -> None:
    """So that the target keeps its own cache."""
    changes, reason = NOT_OVER_PAGES[kind]
    source = open_target(support.write_checkpoint(tmp_path, {**BODY, "model_type": kind, **changes}, {}))
    with pytest.raises(UnsupportedError) as refused:
        hosted_config.read_hosted_config(source)
    assert reason in refused.value.message
    assert find_target_runtime(source, "auto")[0] == "transformers-cache"


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_missing_is_named(kind: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[kind]
    if "streams" in reason:
        skip_unknown(kind)
    target = support.write_checkpoint(tmp_path, {**BODY, "model_type": kind, **changes}, {})
    outcome = support.invoke("generate", "x", "-t", target, "-k", 0)
    assert outcome.code == 5, outcome.err
    assert f"does not run {kind} targets: " in outcome.err
    assert reason in outcome.err


def test_why_a_config_is_not_taken_is_said_in_one_line(tmp_path: Path) -> None:
    skip_unknown("glm5_next")
    text = {**BODY, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = support.write_checkpoint(tmp_path, {"model_type": "glm5_next", "text_config": text}, {})
    with pytest.raises(CheckpointError, match=r"validate_architecture': ValueError: num_attention_heads \(4\) must be"):
        find_target_runtime(open_target(target), "auto")


def test_an_adapter_is_not_followed(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(UnsupportedError, match="an adapter"):
        host(tmp_path)


def test_packed_weights_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedError, match="quantised weights"):
        host(tmp_path)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "sinks": ({"s_aux": torch.zeros(2)}, "attention sinks of shape [2] in layer 1"),
    "bias": ({"position_bias": torch.zeros(1)}, "a bias on attention (position_bias) in layer 1"),
    "dropout": ({"dropout": 0.1}, "an attention setting (dropout) in layer 1"),
    "unknown": ({"indices": [1]}, "an attention setting (indices) in layer 1"),
    "later tokens": ({"is_causal": False}, "attention to later tokens in layer 1"),
    "window": ({"sliding_window": 7}, "a window of 7 in layer 1, unlike its config"),
}


class Module(nn.Module):
    layer_idx = 1


def call(settings: dict[str, Any], *, num_heads: int = 4, mask: object = None) -> Tensor:
    attention = HostedAttention(random_target().config, lambda layer, query, keys, values, softmax: query)
    query, keys = torch.ones(1, num_heads, 3, 8), torch.ones(1, 2, 3, 8)
    return attention(Module(), query, keys, keys, mask, settings)


@pytest.mark.parametrize("name", CALLS)
def test_nothing_that_a_call_passes_is_ignored(name: str) -> None:
    settings, reason = CALLS[name]
    with pytest.raises(UnsupportedError) as refused:
        call(settings)
    assert reason in refused.value.message


def test_another_mask_or_other_heads_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a mask of its own making in layer 1"):
        call({}, mask=torch.zeros(1))
    with pytest.raises(UnsupportedError, match="layer 1 has 6 heads of 8, expected 4 of 8"):
        call({}, num_heads=6)


def test_another_scaling_is_put_on_the_query() -> None:
    usual = {"scaling": 8**-0.5, "dropout": 0.0, "sliding_window": None, "position_ids": torch.zeros(1)}
    assert call(usual).unique().tolist() == [1.0]
    torch.testing.assert_close(call({"scaling": 2 * 8**-0.5}).unique(), torch.tensor([2.0]))


def test_layers_that_differ_in_more_than_kv_heads_are_refused(tmp_path: Path) -> None:
    layers = {"per_layer_config": {"0": {"intermediate_size": 24}}}
    target = support.write_checkpoint(tmp_path, {**BODY, "model_type": "llama", **layers}, {})
    source = open_target(target)
    with pytest.raises(UnsupportedError, match="layers that differ in intermediate_size"):
        hosted_config.read_hosted_config(source)
    assert find_target_runtime(source, "transformers")[0] == "transformers-cache"


def test_images_alone_may_see_later_tokens(tmp_path: Path) -> None:
    make_model(tmp_path, "gemma4_text", use_bidirectional_attention="vision")
    config = find_target_runtime(open_target(tmp_path), "auto")[1]
    assert config.kv_shapes == ((4, 8), (1, 16)) * 2


class TestTrial:
    """What only running the model shows is found right after loading."""

    def test_attention_of_its_own(self, tmp_path: Path) -> None:
        make_model(tmp_path, "diffllama")
        with pytest.raises(UnsupportedError, match="do not ask for attention once through transformers"):
            host(tmp_path)

    def test_code_that_fails(self, tmp_path: Path) -> None:
        """Its norms of queries are as wide as the hidden states, which this head size contradicts."""
        make_model(tmp_path, "olmoe", hidden_size=16)
        with pytest.raises(UnsupportedError, match="its own code fails on four tokens: RuntimeError: The size of"):
            host(tmp_path)

    def test_a_window_unlike_the_config(self, tmp_path: Path) -> None:
        make_model(tmp_path, "mistral")
        source = open_target(tmp_path)
        config = replace(find_target_runtime(source, "transformers")[1], windows=(5, None, 5, 5))
        with pytest.raises(UnsupportedError, match="a window of 5 in layer 1, unlike its config"):
            hosted.load_hosted(source, config, placement())

    def test_a_mask_unlike_the_config(self, tmp_path: Path) -> None:
        """Attention calls of this family do not state a window; its mask does."""
        make_model(tmp_path, "llama")
        source = open_target(tmp_path)
        config = replace(find_target_runtime(source, "transformers")[1], windows=(None, 9, None, None))
        with pytest.raises(UnsupportedError, match="a mask over None tokens in layer 1, expected 9"):
            hosted.load_hosted(source, config, placement())

    def test_a_head_that_does_more(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_model(tmp_path, "cohere")
        monkeypatch.setattr(
            hosted, "read_head", lambda config, model, placed: ScaledHead(model.get_output_embeddings().weight)
        )
        with pytest.raises(UnsupportedError, match="a head that does more to its logits"):
            host(tmp_path)

    def test_rows_that_depend_on_others(self, tmp_path: Path) -> None:
        make_model(tmp_path, "llama")
        target = host(tmp_path)
        model = hosted_loading.load_model(open_target(tmp_path), target.config, placement(), hosted.TRIAL)
        model.get_decoder().layers[1].register_forward_hook(lambda module, given, out: out + 0.01 * out.roll(1, 1))
        with torch.inference_mode(), pytest.raises(UnsupportedError, match="rows that depend on others"):
            hosted._try_out(HostedTarget(target.config, model, placement()), model, torch.device("cpu"))


class TestTensors:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        make_model(tmp_path, "llama")
        return tmp_path

    def edit(self, folder: Path, **changes: Any) -> None:
        file = folder / "model.safetensors"
        arrays = {**load_file(file), **changes}
        save_file({name: value for name, value in arrays.items() if value is not None}, file, {"format": "pt"})

    def test_a_missing_one_is_named(self, folder: Path) -> None:
        """transformers would make it up."""
        self.edit(folder, **{"model.layers.2.mlp.up_proj.weight": None})
        with pytest.raises(TensorMismatch, match=r"missing tensors: model.layers.2.mlp.up_proj.weight"):
            host(folder)

    def test_one_that_is_not_applied_is_named(self, folder: Path) -> None:
        self.edit(folder, **{"model.layers.2.mlp.up_proj.scale": np.ones(3, dtype=np.float32)})
        with pytest.raises(UnsupportedError, match=r"model.layers.2.mlp.up_proj.scale"):
            host(folder)

    def test_a_misshapen_one_is_named(self, folder: Path) -> None:
        self.edit(folder, **{"model.norm.weight": np.ones(3, dtype=np.float32)})
        with pytest.raises(TensorMismatch, match=r"model.norm.weight: found \[3\], expected \[32\]"):
            host(folder)


class TestChoice:
    def test_native_where_a_family_serves_it(self, tmp_path: Path) -> None:
        source = open_target(support.make_target(tmp_path))
        assert find_target_runtime(source, "auto")[0] == "native"
        assert find_target_runtime(source, "transformers")[0] == "transformers"

    def test_both_read_the_same_of_a_target(self, tmp_path: Path) -> None:
        source = open_target(support.make_target(tmp_path))
        assert find_target_runtime(source, "native")[1] == find_target_runtime(source, "transformers")[1]

    def test_native_alone_refuses_the_others(self, tmp_path: Path) -> None:
        make_model(tmp_path, "olmoe")
        with pytest.raises(UnsupportedError, match="does not run olmoe targets") as refused:
            load_target(open_target(tmp_path), placement(), "native")
        assert "--target-runtime auto" in (refused.value.hint or "")

    def test_another_word_is_refused(self) -> None:
        with pytest.raises(UsageError, match="target_runtime 'vllm' is not one of auto, native, transformers"):
            EngineConfig(target_runtime="vllm")

    def test_it_is_said_to_be_slow(self, tmp_path: Path) -> None:
        make_model(tmp_path, "olmoe")
        pair = load_pair(open_target(tmp_path), None, EngineConfig(device="cpu", max_model_len=64))
        assert pair.target_runtime == "transformers"
        assert not pair.has_graphs
        (warning,) = pair.warnings
        assert "the olmoe target runs slowly: transformers' own code" in warning


def test_the_document_names_every_family_that_was_tried() -> None:
    text = documentation.text("hosted-targets")
    assert not [kind for kind in (*SERVED, *NOT_OVER_PAGES, *REFUSED) if f"`{kind}`" not in text]


@pytest.mark.parametrize("module", [hosted, hosted_config, hosted_loading], ids=["hosted", "config", "loading"])
def test_its_modelling_code_is_not_imported_at_start(module: ModuleType) -> None:
    """A start takes no longer for it."""
    assert module.__file__ is not None
    at_once = ast.parse(Path(module.__file__).read_text()).body
    assert not [node for node in at_once if isinstance(node, ast.ImportFrom) and "transformers" in str(node.module)]
