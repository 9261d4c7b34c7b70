"""Warnings about files beside the weights that change a model's output and are not loaded."""

import json
from pathlib import Path

import pytest

from dflash_cli.checkpoints.opening import open_draft, open_target
from dflash_runtime.checkpoint.stored.files import Checkpoint
from dflash_runtime.checkpoint.stored.ignored_files import ignored_code, ignored_files
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointError
from dflash_testing import checkpoints as support
from dflash_testing.command_line import run_main
from dflash_testing.refusals import refuses

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((), []),
        (("mask_embedding.safetensors", "consolidated.safetensors", ".tmp.safetensors", "tokenizer.json"), []),
        (("adapter_config.json", "adapter_model.safetensors"), [("adapter-ignored", "adapter_config.json")]),
        (("adapter_model.bin",), [("adapter-ignored", "adapter_model.bin")]),
        (("adapters.safetensors",), [("adapter-ignored", "adapters.safetensors")]),
        (("model-00001-of-00002.safetensors",), [("weights-ignored", "model-00001-of-00002.safetensors")]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_files_beside_the_weights(names: tuple[str, ...], found: list[tuple[str, str]], tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft")
    for name in names:
        (draft / name).write_text("{}")
    assert [(item.id, item.field) for item in ignored_files(open_draft(draft).checkpoint)] == found


@pytest.mark.parametrize(
    ("auto_map", "found"),
    [
        ({"AutoConfig": "configuration_x.X"}, []),
        ({"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}, ["code-ignored"]),
        ("modeling_x.X", []),
    ],
    ids=["config", "model", "malformed"],
)
def test_code_of_a_target_is_named(auto_map: object, found: list[str], tmp_path: Path) -> None:
    target = open_target(support.make_target(tmp_path / "target", auto_map=auto_map))
    assert [item.id for item in ignored_code(target.checkpoint)] == found


def test_an_adapter_is_never_read_as_weights(tmp_path: Path) -> None:
    """Without an index and `model.safetensors`, every other safetensors file is read."""
    draft = support.make_native(tmp_path / "draft")
    names = set(Checkpoint(draft).tensors)
    (draft / WEIGHTS).rename(draft / "weights.safetensors")
    (draft / "adapter_model.safetensors").write_bytes((draft / "weights.safetensors").read_bytes())
    assert set(Checkpoint(draft).tensors) == names
    (draft / "weights.safetensors").unlink()
    with refuses(CheckpointError, "no-weights") as raised:
        Checkpoint(draft).check_headers()
    assert "adapter_model.safetensors" in str(raised.value.hint)


def test_a_loaded_pair_warns_of_both_models(tmp_path: Path) -> None:
    from dflash_runtime.device.setup.loading import load_pair

    draft = support.make_native(tmp_path / "draft")
    target = support.make_target(tmp_path / "target", auto_map={"AutoModel": "modeling_x.X"})
    for folder in (draft, target):
        (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/other"}))
    pair = load_pair(open_target(target), open_draft(draft), EngineConfig(device="cpu"))
    found = [(item.id, str(tmp_path / "draft") in item) for item in pair.warnings]
    assert found == [("adapter-ignored", False), ("adapter-ignored", True)]


def test_descriptions_and_conversions_tell_too(tmp_path: Path) -> None:
    draft = support.make_native(tmp_path / "draft")
    (draft / "adapter_config.json").write_text("{}")
    assert "adapter-ignored" in run_main("inspect", draft).notices
    assert "adapter-ignored" in run_main("convert", draft, tmp_path / "out", "--to", "vllm").notices
