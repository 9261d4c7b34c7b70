"""Relatives of DFlash are refused by name, even if they are published as DFlash."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_cli.checkpoints.description import describe
from dflash_cli.checkpoints.opening import open_draft
from dflash_cli.formats.detection import detect_from, find_dialect
from dflash_cli.formats.dialect import servers_of
from dflash_cli.formats.relatives import Relative, served_in_words
from dflash_runtime.errors import UnknownFormat
from dflash_runtime.phrases import article
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.refusals import refuses

PATH = Path("config.json")


def native(architecture: str = "DFlashDraftModel", top: dict[str, Any] | None = None, **nested: Any) -> dict[str, Any]:
    config = support.native_config(architectures=[architecture], **(top or {}))
    config["dflash_config"] |= nested
    return config


BY_CONFIG = {
    "domino by architecture": ("domino", native("DominoDraftModel")),
    "domino under DFlash's name": ("domino", native(projector_type="domino", gru_hidden_dim=8)),
    "domino by its keys": ("domino", native(pure_draft_prefix_len=1, shift_label=False)),
    "xpress by its key": ("xpress", native(top={"xpress_topc": 4})),
    "hunyuan": ("hunyuan", native("HunYuanDenseV1ForCausalLM")),
    "hunyuan by its decoder": ("hunyuan", native(top={"model_type": "hunyuan_vl_text"})),
    "hunyuan in speculators": (
        "hunyuan",
        support.speculators_config(
            transformer_layer_config=support.body_config(support.SMALL) | {"model_type": "hunyuan_v1_dense"}
        ),
    ),
    "xpress": ("xpress", native("Qwen3XPressModel")),
    "xpress in speculators": ("xpress", support.speculators_config(speculators_model_type="xpress")),
    "lilicorr": ("lilicorr", native("LiLiCorrDraftModel")),
    "lilicorr with convolutions": ("lilicorr", native(lilicorr_num_layers=2, conv_kernel_size=2)),
    "lilicorr by its projector": ("lilicorr", native(projector_type="lilicorr")),
    "dflash 2 of beam": ("beam", native("DFlash2BeamDraftModel", conv_kernel_size=2)),
    "adaflash": ("adaflash", native(thresh_head_direct_len=True)),
    "jetspec": ("jetspec", support.speculators_config(speculators_model_type="jetspec")),
    "laguna": ("laguna", native("DFlashLagunaForCausalLM")),
    "muse": ("muse", native("MuseGlimmerAssistantModel")),
    "muse by its model type": ("muse", native(top={"model_type": "muse_glimmer_assistant"})),
    "eagle 3": ("eagle3", native("LlamaForCausalLMEagle3")),
    "eagle": ("eagle", native("EagleLlamaForCausalLM")),
    "domino, by its causal projector": ("domino", native(projector_type="causal_v5")),
    "eagle 3 in speculators": ("eagle3", support.speculators_config(speculators_model_type="eagle3")),
    "p-eagle in speculators": ("peagle", support.speculators_config(speculators_model_type="peagle")),
    "mtp in speculators": ("mtp", support.speculators_config(speculators_model_type="mtp")),
    "mtp": ("mtp", native("Qwen3NextMTP")),
    "dspark with layers of Gemma 4": ("dspark-variant", native("Gemma4DSparkModel", markov_rank=4)),
    "dflash 2 with unknown layers": ("dflash2-variant", native("OwnDFlash2Model", conv_kernel_size=2)),
}

BY_TENSORS = {
    "prefix_gru.weight_ih_l0": "domino",
    "embed_proj.0.weight": "domino",
    "markov_head.weight": "dspark",
    "confidence_head.weight": "dspark",
    "layers.0.attention_conv.base_kernel": "dflash2",
    "candidate_selector.predecessor_codebook": "dflash2",
    "midlayer.hidden_norm.weight": "eagle3",
    "aux_hidden_norms.0.weight": "laguna",
    "layers.0.self_attn.key_layernorm.weight": "hunyuan",
    "lilicorr.slot_embedding": "lilicorr",
    "xpress_head.mix.L": "xpress",
    "thresh_head_two_model.out.bias": "adaflash",
}


@pytest.mark.parametrize(("name", "config"), BY_CONFIG.values(), ids=BY_CONFIG)
def test_by_config(name: str, config: dict[str, Any]) -> None:
    found = detect_from(config, frozenset(), PATH)
    assert found.format.name == name
    assert isinstance(found.format, Relative)
    with refuses(UnknownFormat, "relative-of-dflash", found=name, path=PATH) as caught:
        found.format.read_config(config, PATH)
    assert found.format.title in caught.value.message
    assert served_in_words(found.format, config) in str(caught.value.hint)


@pytest.mark.parametrize(("tensor", "name"), BY_TENSORS.items())
def test_by_tensors_under_dflash_name(tensor: str, name: str) -> None:
    assert detect_from(native(), frozenset({"fc.weight", tensor}), PATH).format.name == name


def test_a_relative_is_recognised_under_prefixed_names() -> None:
    names = frozenset({"model.fc.weight", "model.prefix_gru.weight_ih_l0"})
    assert detect_from(native(), names, PATH).format.name == "domino"


def test_a_stated_speculators_type_decides_alone() -> None:
    config = support.speculators_config()
    assert detect_from(config, frozenset({"markov_head.weight"}), PATH).format.name == "speculators"


def test_a_checkpoint_on_disk_is_refused(tmp_path: Path) -> None:
    arrays = {**support.body_arrays(), "prefix_gru.weight_ih_l0": np.zeros((4, 4), dtype=np.float32)}
    path = support.write_checkpoint(tmp_path / "draft", native(), arrays)
    with refuses(UnknownFormat, "relative-of-dflash", found="domino", path=path / "config.json"):
        open_draft(path)


@pytest.mark.parametrize("case", ["dspark with layers of Gemma 4", "dflash 2 with unknown layers"])
def test_exit_codes(case: str, tmp_path: Path) -> None:
    name, config = BY_CONFIG[case]
    path = support.write_checkpoint(tmp_path / "draft", config, support.body_arrays())
    for command in (["inspect", path], ["convert", path, tmp_path / "out", "--to", "speculators"]):
        outcome = invoke(*command)
        assert outcome.code == 5
        assert detect_from(config, frozenset(), PATH).format.title in outcome.err
    report = invoke("validate", path)
    assert report.code == 5
    assert report.out.startswith("C01 error")
    assert not (tmp_path / "out").exists(), name


@pytest.mark.parametrize("case", ["hunyuan by its decoder", "hunyuan in speculators"])
def test_rope_before_the_norms_is_refused_by_every_command(case: str, tmp_path: Path) -> None:
    """Every tensor has a name and a shape of DFlash, so a DFlash reader would run another model."""
    draft = support.write_checkpoint(tmp_path / "draft", BY_CONFIG[case][1], support.body_arrays())
    target = support.make_target(tmp_path / "target")
    for command in (
        ["validate", draft, "--target", target],
        ["convert", draft, tmp_path / "out", "--to", "native", "--target", target],
        ["generate", "x", "-d", draft, "-t", target, "-n", "2"],
    ):
        outcome = invoke(*command)
        assert outcome.code == 5, command
        lines = [line for line in f"{outcome.out}{outcome.err}".splitlines() if "HunYuan DFlash" in line]
        assert len(lines) == 1, command
    assert not (tmp_path / "out").exists()


def test_a_switched_off_length_head_is_no_kind() -> None:
    config = native(thresh_head_direct_len=False, use_thresh_head_two_model=False)
    assert detect_from(config, frozenset(), PATH).format.name == "native"


def test_a_config_alone_is_refused_by_the_name_of_its_kind(tmp_path: Path) -> None:
    support.write_config(tmp_path, native("Qwen3XPressModel"))
    with refuses(UnknownFormat, "relative-of-dflash", found="xpress"):
        describe(tmp_path)


def test_a_head_of_eagle_is_no_target() -> None:
    """EAGLE and EAGLE-2 publish their head under the target's architecture."""
    config = support.target_config()
    names = frozenset({"fc.weight", "fc.bias", "embed_tokens.weight", "layers.0.self_attn.q_proj.weight"})
    assert detect_from(config, names, PATH).format.name == "eagle"
    assert find_dialect(config, frozenset({"model.embed_tokens.weight", "lm_head.weight"})) is None


def test_latent_attention_is_served_by_no_engine() -> None:
    config = native("DFlash2DraftModel", attention_mode="mla")
    assert servers_of(detect_from(config, frozenset(), PATH).format, config) == ()


@pytest.mark.parametrize(("title", "text"), [("EAGLE-3", "an EAGLE-3"), ("DSpark", "a DSpark"), ("MTP", "an MTP")])
def test_articles(title: str, text: str) -> None:
    assert article(title) == text
