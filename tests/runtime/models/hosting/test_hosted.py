"""Targets that transformers' code runs over our pages: their hidden states, the trial after loading, and refusals."""

import ast
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_cli.checkpoints.opening import open_target
from dflash_cli.checkpoints.references import tiny_directory
from dflash_runtime.checkpoint.targets import hosted_config, runs_here
from dflash_runtime.checkpoint.targets.hosted_refusals import NUM_STREAMS
from dflash_runtime.device.setup.early_refusals import refuse_early
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointError, TensorMismatch, UnsupportedError, UsageError
from dflash_runtime.models.head import ScaledHead
from dflash_runtime.models.hosting import hosted, hosted_loading
from dflash_runtime.models.hosting.hosted import HostedTarget
from dflash_runtime.models.hosting.hosted_attention import TRIAL, HostedAttention
from dflash_runtime.models.target_loading import find_target_runtime, load_target
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_tensors
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
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses

KINDS = [kind if kind in DEFAULT else pytest.param(kind, marks=pytest.mark.slow) for kind in SERVED]


@pytest.mark.parametrize("kind", KINDS)
def test_taps_are_the_hidden_states(kind: str, tmp_path: Path) -> None:
    """Taps have the requested order, the last layer's is before the final norm, and logits equal the model's own."""
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
    "olmo_hybrid": ({}, "linear_num_value_heads"),
    "lfm2": ({}, "conv_L_cache"),
    "mamba": ({}, "state_size"),
    "falcon_h1": ({}, "mamba_d_state"),
    "deepseek_v3": ({"head_dim": None, "v_head_dim": 256}, "v_head_dim"),
    "deepseek_v32": ({}, "index_topk"),
    "longcat_flash": ({}, "num_layers"),
    "llama4_text": ({}, "attention_chunk_size"),
    "mimo_v2_flash": ({}, "v_head_dim"),
    "olmo2": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
}
"""Model type -> changes to its config, and the key or value that the refusal names."""


@pytest.mark.parametrize("kind", NOT_OVER_PAGES)
def test_features_that_our_pages_do_not_support_are_named(kind: str, tmp_path: Path) -> None:
    """The target keeps its own cache instead."""
    changes, key = NOT_OVER_PAGES[kind]
    source = open_target(support.write_checkpoint(tmp_path, {**BODY, "model_type": kind, **changes}, {}))
    with refuses(UnsupportedError, "target-not-run", field="model_type", found=kind) as refused:
        hosted_config.read_hosted_config(source)
    assert re.search(rf"\b{key}\b", refused.value.message)
    assert find_target_runtime(source, "auto")[0] == "transformers-cache"


@pytest.mark.parametrize("kind", REFUSED)
def test_a_target_that_nothing_runs_is_refused(kind: str, tmp_path: Path) -> None:
    changes, id, named = REFUSED[kind]
    if named in NUM_STREAMS:
        skip_unknown(kind)
    target = support.write_checkpoint(tmp_path, {**BODY, "model_type": kind, **changes}, {})
    with refuses(UnsupportedError, id, field="model_type", found=kind, path=target) as refused:
        find_target_runtime(open_target(target), "auto")
    assert named in refused.value.message
    outcome = invoke("generate", "x", "-t", target, "-k", 0)
    assert outcome.code == 5, outcome.err
    assert refused.value.message in outcome.err


def test_the_reason_of_transformers_against_a_config_is_one_line(tmp_path: Path) -> None:
    skip_unknown("glm5_next")
    text = {**BODY, "num_attention_heads": 4, "num_key_value_heads": 2}
    target = support.write_checkpoint(tmp_path, {"model_type": "glm5_next", "text_config": text}, {})
    with refuses(CheckpointError, "config-refused-by-transformers", path=target / "config.json") as refused:
        find_target_runtime(open_target(target), "auto")
    assert "num_attention_heads" in refused.value.found
    assert "\n" not in refused.value.found


def test_an_adapter_is_not_followed(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with refuses(UnsupportedError, "target-adapter", path=tmp_path):
        host(tmp_path)


def test_quantised_weights_without_scales_are_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", quantization_config={"quant_method": "fp8"})
    with refuses(UnsupportedError, field="quant_method", found="fp8"):
        host(tmp_path)


CALLS: dict[str, tuple[dict[str, Any], str, str]] = {
    "sinks": ({"s_aux": torch.zeros(2)}, "sinks", "[2]"),
    "bias": ({"position_bias": torch.zeros(1)}, "setting", "position_bias"),
    "dropout": ({"dropout": 0.1}, "setting", "dropout"),
    "unknown": ({"indices": [1]}, "setting", "indices"),
    "later tokens": ({"is_causal": False}, "later-tokens", ""),
    "window": ({"sliding_window": 7}, "window", "7"),
}
"""Arguments of an attention call, the end of the refusal's id, and the name or value in the refusal."""


class Module(nn.Module):
    layer_idx = 1


def call(settings: dict[str, Any], *, num_heads: int = 4, mask: object = None) -> Tensor:
    attention = HostedAttention(random_target().config, lambda layer, query, keys, values, softmax: query)
    query, keys = torch.ones(1, num_heads, 3, 8), torch.ones(1, 2, 3, 8)
    return attention(Module(), query, keys, keys, mask, settings)


@pytest.mark.parametrize("name", CALLS)
def test_no_argument_of_an_attention_call_is_ignored(name: str) -> None:
    settings, part, named = CALLS[name]
    with refuses(UnsupportedError, f"target-attention-{part}") as refused:
        call(settings)
    assert named in refused.value.message
    assert "layer 1" in refused.value.message


def test_another_mask_or_other_heads_are_refused() -> None:
    with refuses(UnsupportedError, "target-attention-own-mask"):
        call({}, mask=torch.zeros(1))
    with refuses(UnsupportedError, "target-attention-heads") as refused:
        call({}, num_heads=6)
    assert re.findall(r"\d+", refused.value.message)[-5:] == ["1", "6", "8", "4", "8"]


def test_another_scaling_is_applied_to_the_query() -> None:
    usual = {"scaling": 8**-0.5, "dropout": 0.0, "sliding_window": None, "position_ids": torch.zeros(1)}
    assert call(usual).unique().tolist() == [1.0]
    torch.testing.assert_close(call({"scaling": 2 * 8**-0.5}).unique(), torch.tensor([2.0]))


def test_layers_that_differ_in_more_than_kv_heads_are_refused(tmp_path: Path) -> None:
    layers = {"per_layer_config": {"0": {"intermediate_size": 24}}}
    target = support.write_checkpoint(tmp_path, {**BODY, "model_type": "llama", **layers}, {})
    source = open_target(target)
    with refuses(UnsupportedError, "target-not-run", found="llama") as refused:
        hosted_config.read_hosted_config(source)
    assert "intermediate_size" in refused.value.message
    assert find_target_runtime(source, "transformers")[0] == "transformers-cache"


def test_only_tokens_of_images_may_attend_to_later_tokens(tmp_path: Path) -> None:
    make_model(tmp_path, "gemma4_text", use_bidirectional_attention="vision")
    config = find_target_runtime(open_target(tmp_path), "auto")[1]
    assert config.kv_shapes == ((4, 8), (1, 16)) * 2


class TestTrial:
    """A run right after loading finds features that the config does not show."""

    def test_attention_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with a release of transformers without recorded trials."""
        monkeypatch.setattr(runs_here, "recorded_trials", dict)
        make_model(tmp_path, "diffllama")
        with refuses(UnsupportedError, "target-attention-not-asked", found="diffllama"):
            host(tmp_path)

    def test_code_that_fails(self, tmp_path: Path) -> None:
        """The model's query norm is as wide as the hidden states, which contradicts this head size."""
        make_model(tmp_path, "olmoe", hidden_size=16)
        with refuses(UnsupportedError, "target-code-fails", found="olmoe") as refused:
            host(tmp_path)
        assert "RuntimeError" in refused.value.message

    def test_a_window_unlike_the_config(self, tmp_path: Path) -> None:
        make_model(tmp_path, "mistral")
        source = open_target(tmp_path)
        config = replace(find_target_runtime(source, "transformers")[1], windows=(5, None, 5, 5))
        with refuses(UnsupportedError, "target-attention-window") as refused:
            hosted.load_hosted(source, config, placement())
        assert re.findall(r"\d+|None", refused.value.message) == ["5", "1", "None"]

    def test_a_mask_unlike_the_config(self, tmp_path: Path) -> None:
        """Attention calls of this family do not state a window; its mask does."""
        make_model(tmp_path, "llama")
        source = open_target(tmp_path)
        config = replace(find_target_runtime(source, "transformers")[1], windows=(None, 9, None, None))
        with refuses(UnsupportedError, "target-attention-mask") as refused:
            hosted.load_hosted(source, config, placement())
        assert re.findall(r"\d+|None", refused.value.message) == ["None", "1", "9"]

    def test_a_head_that_does_more(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_model(tmp_path, "cohere")
        monkeypatch.setattr(
            hosted, "read_head", lambda config, model, placed: ScaledHead(model.get_output_embeddings().weight)
        )
        with refuses(UnsupportedError, "target-head", found="cohere"):
            host(tmp_path)

    def test_rows_that_depend_on_others(self, tmp_path: Path) -> None:
        make_model(tmp_path, "llama")
        target = host(tmp_path)
        model = hosted_loading.load_model(open_target(tmp_path), target.config, placement(), TRIAL)
        model.get_decoder().layers[1].register_forward_hook(lambda module, given, out: out + 0.01 * out.roll(1, 1))
        with torch.inference_mode(), refuses(UnsupportedError, "target-rows-depend"):
            hosted._try_out(HostedTarget(target.config, model, placement()), model, torch.device("cpu"))


class TestTensors:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        make_model(tmp_path, "llama")
        return tmp_path

    def test_a_missing_tensor_is_named(self, folder: Path) -> None:
        """transformers would make the tensor up."""
        edit_tensors(folder, **{"model.layers.2.mlp.up_proj.weight": None})
        with pytest.raises(TensorMismatch) as refused:
            host(folder)
        assert refused.value.missing == ("model.layers.2.mlp.up_proj.weight",)

    def test_a_tensor_that_is_not_applied_is_named(self, folder: Path) -> None:
        edit_tensors(folder, **{"model.layers.2.mlp.up_proj.scale": torch.ones(3)})
        with refuses(UnsupportedError, "tensors-not-applied") as refused:
            host(folder)
        assert "model.layers.2.mlp.up_proj.scale" in refused.value.message

    @pytest.mark.parametrize("layer", [4, 61])
    def test_a_layer_that_predicts_further_tokens_is_left_out(self, folder: Path, layer: int) -> None:
        """Its number may be any, as in a target with fewer layers than it was trained with."""
        part = {f"model.layers.{layer}.{name}": torch.ones(3) for name in ("eh_proj.weight", "x")}
        edit_tensors(folder, **part, **{"model.mtp.0.weight": torch.ones(3)})
        assert host(folder).config.num_layers == 4

    def test_a_further_layer_of_another_kind_is_named(self, folder: Path) -> None:
        edit_tensors(folder, **{"model.layers.4.mlp.up_proj.weight": torch.ones(3)})
        with refuses(UnsupportedError, "tensors-not-applied"):
            host(folder)
        edit_tensors(folder, **{"model.layers.2.eh_proj.weight": torch.ones(3)})
        with refuses(UnsupportedError, "tensors-not-applied"):
            host(folder)

    def test_a_misshapen_tensor_is_named(self, folder: Path) -> None:
        edit_tensors(folder, **{"model.norm.weight": torch.ones(3)})
        with pytest.raises(TensorMismatch) as refused:
            host(folder)
        assert refused.value.wrong == {"model.norm.weight": ("[3]", "[32]")}


class TestChoice:
    def test_auto_chooses_a_native_family(self, tmp_path: Path) -> None:
        source = open_target(support.make_target(tmp_path))
        assert find_target_runtime(source, "auto")[0] == "native"
        assert find_target_runtime(source, "transformers")[0] == "transformers"

    def test_native_and_transformers_read_equal_configs(self, tmp_path: Path) -> None:
        source = open_target(support.make_target(tmp_path))
        assert find_target_runtime(source, "native")[1] == find_target_runtime(source, "transformers")[1]

    def test_native_refuses_other_families(self, tmp_path: Path) -> None:
        make_model(tmp_path, "olmoe")
        with refuses(UnsupportedError, "target-without-native-family", found="olmoe") as refused:
            load_target(open_target(tmp_path), placement(), "native")
        assert "--target-runtime" in (refused.value.hint or "")

    def test_an_unknown_runtime_is_refused(self) -> None:
        with refuses(UsageError, field="target_runtime", found="vllm") as refused:
            EngineConfig(target_runtime="vllm")
        assert "transformers-cache" in (refused.value.expected or "")

    def test_a_warning_says_that_it_is_slow(self, tmp_path: Path) -> None:
        make_model(tmp_path, "olmoe")
        pair = load_pair(open_target(tmp_path), None, EngineConfig(device="cpu", max_model_len=64))
        assert pair.target_runtime == "transformers"
        assert not pair.has_graphs
        (warning,) = pair.warnings
        assert "olmoe" in warning


def test_the_document_names_every_tested_family() -> None:
    text = (ROOT / "docs" / "reference" / "hosted-targets.md").read_text()
    assert not [kind for kind in (*SERVED, *NOT_OVER_PAGES, *REFUSED) if f"`{kind}`" not in text]


@pytest.mark.parametrize("module", [hosted, hosted_config, hosted_loading], ids=["hosted", "config", "loading"])
def test_modelling_code_of_transformers_is_imported_when_used(module: ModuleType) -> None:
    """Other targets start as fast without it."""
    assert module.__file__ is not None
    at_once = ast.parse(Path(module.__file__).read_text()).body
    assert not [node for node in at_once if isinstance(node, ast.ImportFrom) and "transformers" in str(node.module)]


@pytest.mark.parametrize("runtime", ["transformers", "transformers-cache"])
def test_a_lacking_target_of_a_native_family_is_refused_from_its_headers(runtime: str, tmp_path: Path) -> None:
    """Transformers may rename tensors, so it judges a target that has other names throughout."""
    target = shutil.copytree(tiny_directory() / "target", tmp_path / "target")
    weights = (target / "model.safetensors").read_bytes()
    config = EngineConfig(num_draft_tokens=0, target_runtime=runtime)
    refuse_early(open_target(target), None, config)
    for old, new in ((b"layers.1.self_attn.k_proj", b"layers.1.self_attn.x_proj"), (b"[192,512]", b"[512,192]")):
        (target / "model.safetensors").write_bytes(weights.replace(old, new, 1))
        with refuses(TensorMismatch):
            refuse_early(open_target(target), None, config)
    (target / "model.safetensors").write_bytes(weights.replace(b'"model.', b'"modex.'))
    refuse_early(open_target(target), None, config)
