"""Native drafts, converted drafts and speculators' own model have equal logits. Wrong readings have others."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_cli.checkpoints.opening import DraftCheckpoint, open_draft, open_target
from dflash_cli.checkpoints.references import TINY, Role, fetch_directory
from dflash_cli.conversion.execute import convert_draft
from dflash_cli.conversion.logits import DraftBlock, verify_logits
from dflash_cli.conversion.plan import plan_conversion
from dflash_cli.conversion.spec import ConversionSpec
from dflash_kernels.suite import REFERENCE
from dflash_runtime.device.storage.kv import KVCache, PagedAttention
from dflash_runtime.errors import GateFailed
from dflash_runtime.models.target import Target
from dflash_runtime.models.target_loading import load_target
from dflash_testing import checkpoints as support
from dflash_testing.command_line import invoke
from dflash_testing.edits import edited_config
from dflash_testing.pairs import placement
from dflash_testing.paths import GOLDEN
from dflash_testing.refusals import refuses
from dflash_testing.walking_drafts import walking_folder

RECORDED = json.loads((GOLDEN / "speculators_logits.json").read_text(encoding="utf-8"))


def open_runtime_target(path: Path) -> Target:
    return load_target(open_target(path), placement())


def real_logits(draft: DraftCheckpoint, target: Target, prompt: list[int], anchor: int) -> torch.Tensor:
    """Draft logits after a forward of the target that captures the draft's tapped layers."""
    config = target.config
    cache = KVCache(config, 1, 16, placement())
    attend = PagedAttention.in_order(REFERENCE, cache, 0, (True,) * config.num_layers, config.windows)
    with torch.inference_mode():
        ids, positions = torch.tensor(prompt), torch.arange(len(prompt))
        _, features = target(ids, positions, attend, draft.config.target_layer_ids)
        assert features is not None
        return DraftBlock.after(draft, target, features, anchor).logits()


@pytest.mark.parametrize("name", support.LOGIT_CASES)
def test_speculators_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """The recorded logits are of speculators 0.9.0, from results of `convert --to speculators`."""
    source, target_path = support.make_logit_case(tmp_path, name)
    target = open_target(target_path)
    request = ConversionSpec(to="speculators", target=target, target_reference=str(target_path), verifier="acme/target")
    convert_draft(plan_conversion(open_draft(source), request), tmp_path / "converted")
    expected = torch.tensor(RECORDED["logits"][name])
    model = open_runtime_target(target_path)
    for path in (source, tmp_path / "converted"):
        found = real_logits(open_draft(path), model, RECORDED["prompt"], RECORDED["anchor"])
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_golden_cases_differ() -> None:
    """The recorded cases have different logits, so that the comparison above can fail."""
    logits = {name: torch.tensor(rows) for name, rows in RECORDED["logits"].items()}
    assert (logits["full"] - logits["sliding"]).abs().max() < 1e-5  # a window wider than the context changes nothing
    assert (logits["sliding"] - logits["sliding causal"]).abs().max() > 1e-3
    assert RECORDED["provenance"]["versions"]["speculators"] == "0.9.0"


@pytest.mark.parametrize("name", ["tiny", "tiny:reduced"])
def test_the_bundled_pair_converts_to_equal_logits(name: str, tmp_path: Path) -> None:
    target = fetch_directory(TINY, Role.TARGET)
    source = open_draft(fetch_directory(name, Role.DRAFT))
    request = ConversionSpec(to="speculators", target=open_target(target), target_reference=TINY)
    convert_draft(plan_conversion(source, request), tmp_path / "out")
    model = open_runtime_target(target)
    prompt = list(range(100, 140))
    ours = real_logits(source, model, prompt, 77)
    theirs = real_logits(open_draft(tmp_path / "out"), model, prompt, 77)
    assert torch.equal(ours, theirs)


class TestVerifyLogits:
    def convert(self, tmp_path: Path, to: str = "speculators", **changes: Any) -> tuple[DraftCheckpoint, Path]:
        source = support.make_native(tmp_path / "source", **changes)
        request = ConversionSpec(to=to, verifier="acme/target")
        convert_draft(plan_conversion(open_draft(source), request), tmp_path / "out")
        return open_draft(source), tmp_path / "out"

    def test_equal(self, tmp_path: Path) -> None:
        source, out = self.convert(tmp_path)
        found = verify_logits(source, open_draft(out))
        assert found.max_difference == 0
        assert found.same_best_share == 1
        assert found.largest_logit > 0

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("aux_hidden_state_layer_ids", [2, 3]),
            ("mask_token_id", 30),
            ("transformer_layer_config", {"rope_theta": 10000, "rope_parameters": None}),
            ("transformer_layer_config", {"rms_norm_eps": 0.1}),
            (
                "transformer_layer_config",
                {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "use_sliding_window": True},
            ),
        ],
    )
    def test_a_wrong_reading_is_caught(self, key: str, value: Any, tmp_path: Path) -> None:
        source, out = self.convert(tmp_path)
        with edited_config(out) as config:
            config[key] = {**config[key], **value} if isinstance(value, dict) else value
        with refuses(GateFailed, "logits-differ"):
            verify_logits(source, open_draft(out))

    @pytest.mark.parametrize(
        ("kind", "part"),
        [
            ("dflash2", "candidate_selector.predecessor_codebook"),
            ("dflash2", "layers.1.mlp_conv.base_kernel"),
            ("dspark", "markov_head.markov_w2.weight"),
            ("anchor-first", "markov_head.gate_proj.weight"),
        ],
    )
    def test_a_wrong_part_of_a_draft_that_walks_is_caught(self, kind: str, part: str, tmp_path: Path) -> None:
        folder = walking_folder(kind)
        tensors = load_file(folder / "model.safetensors")
        for change, name in ((0.0, "same"), (1.0, "other")):
            (tmp_path / name).mkdir()
            changed = {**tensors, part: tensors[part] + change * tensors[part].roll(1, 0)}
            save_file(changed, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
            (tmp_path / name / "config.json").write_text((folder / "config.json").read_text())
        assert verify_logits(open_draft(folder), open_draft(tmp_path / "same")).max_difference == 0
        with refuses(GateFailed, "logits-differ"):
            verify_logits(open_draft(folder), open_draft(tmp_path / "other"))

    def test_a_dropped_head_proposes_the_same_among_its_ids(self, tmp_path: Path) -> None:
        draft = support.make_speculators(tmp_path / "draft", support.REDUCED)
        target = support.make_target(tmp_path / "target", support.REDUCED)
        outcome = invoke(
            "convert", draft, tmp_path / "out", "--to", "native", "--target", target, "--verify", "logits", "--json",
            "--allow-lossy",
        )  # fmt: skip
        assert outcome.code == 0, outcome.err
        manifest = json.loads(outcome.out)
        assert manifest["verified"] == "logits"
        assert manifest["logits"]["max_difference"] < 1e-6
        assert manifest["logits"]["same_best_share"] == 1
