"""The answer to whether and how a target runs equals its load, for model types and configs that no draft is made for.

Models are small and random, of transformers' own classes.
"""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from dflash_cli.checkpoints.opening import open_target
from dflash_runtime.checkpoint.targets.hf_config import NATIVE_ROPES
from dflash_runtime.checkpoint.targets.hosted_config import open_decoder
from dflash_runtime.checkpoint.targets.recorded_types import recorded_types
from dflash_runtime.checkpoint.targets.runs_here import RunsHere, how_it_runs, recorded_host_reads, recorded_trials
from dflash_runtime.errors import UnsupportedError
from dflash_runtime.models import rope
from dflash_runtime.models.hosting.hosted import HostedTarget
from dflash_runtime.models.hosting.own_cache import OwnCacheTarget
from dflash_runtime.models.target import family_config
from dflash_runtime.models.target_loading import load_target
from dflash_testing import checkpoints as support
from dflash_testing.any_models import make_any
from dflash_testing.command_line import invoke
from dflash_testing.edits import edit_config
from dflash_testing.hosted_models import make_model
from dflash_testing.pairs import placement
from dflash_testing.paths import ROOT
from dflash_testing.refusals import refuses

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "transformers_trials.py"))
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
FEW = ("bert", "deepseek_vl_hybrid", "doge", "gptj", "xglm", "gpt2")
"""Types by which the default test compares the record: one is refused, four have their own attention, and the code of
one reads values on the host."""

MOST = [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in recorded_types()["decoders"]]


def one_answer(path: Path) -> RunsHere:
    """Return the answer of `inspect`, which must equal the answer of commands that run the target."""
    source = open_target(path)
    said, done = how_it_runs(source), how_it_runs(source, refuse_native=family_config, read_decoder=open_decoder)
    ids = [None if item.refusal is None else item.refusal.id for item in (said, done)]
    assert (said.runtime, ids[0]) == (done.runtime, ids[1])
    return said


def runtime_of(target: object) -> str:
    kinds: dict[type, str] = {HostedTarget: "transformers", OwnCacheTarget: "transformers-cache"}
    return kinds.get(type(target), "native")


@pytest.fixture(autouse=True)
def release() -> None:
    if pytest.importorskip("transformers").__version__ != recorded_types()["transformers"]:
        pytest.skip("the trials are recorded with another release of transformers")


@pytest.mark.parametrize("kind", MOST)
def test_the_recorded_end_of_a_trial_is_the_end_of_a_trial(kind: str) -> None:
    for name, recorded in (("trials", recorded_trials()), ("host_reads", recorded_host_reads())):
        assert SCRIPT["record"]([kind])[name] == {key: end for key, end in recorded.items() if key == kind}


def test_inspect_says_whether_steps_are_captured(tmp_path: Path) -> None:
    for kind, host_read in (("gpt2", "_local_scalar_dense"), ("gemma2", None)):
        make_any(tmp_path / kind, kind)
        answer = one_answer(tmp_path / kind)
        assert (answer.runtime, answer.host_read) == ("transformers", host_read)
        assert answer.words in " ".join(invoke("inspect", tmp_path / kind).out.split())
        assert ("without CUDA graphs" in answer.words) == (host_read is not None)
        target = load_target(open_target(tmp_path / kind), placement(), "auto")
        assert isinstance(target, HostedTarget)
        assert (target.uncaptured.field if target.uncaptured else None) == host_read


@pytest.mark.parametrize("kind", ["doge", "gptj", "llava_onevision"])
def test_a_type_with_attention_of_its_own_is_loaded_as_inspect_says(kind: str, tmp_path: Path) -> None:
    """A wrapper may pass arguments for its head down to attention."""
    make_any(tmp_path, kind)
    said = one_answer(tmp_path).runtime
    assert said == ("transformers" if kind == "llava_onevision" else "transformers-cache")
    assert runtime_of(load_target(open_target(tmp_path), placement(), "auto")) == said


def test_an_encoder_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    make_any(tmp_path, "bert")
    answer = one_answer(tmp_path)
    assert answer.refusal is not None
    (tmp_path / "model.safetensors").unlink()  # nothing loads it
    support.write_checkpoint(tmp_path, json.loads((tmp_path / "config.json").read_text()), {})
    with refuses(UnsupportedError, "target-layers-not-found", field="model_type", found="bert"):
        load_target(open_target(tmp_path), placement(), "auto")
    assert "runs here   refused: " in invoke("inspect", tmp_path).out


@pytest.mark.parametrize(
    ("kind", "change", "runtime"),
    [
        ("llama", {"hidden_act": "gelu"}, "transformers"),
        (
            "qwen3",
            {"rope_parameters": DYNAMIC},
            "transformers-cache",
        ),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "transformers-cache"),
    ],
    ids=["activation", "rope", "hybrid"],
)
def test_a_native_family_with_other_layers_runs_by_transformers(
    kind: str, change: dict[str, Any], runtime: str, tmp_path: Path
) -> None:
    """Native code computes one activation and four rope types. A config with another one is not called native."""
    make_model(tmp_path, kind, **change)
    assert one_answer(tmp_path).runtime == runtime
    assert runtime_of(load_target(open_target(tmp_path), placement(), "auto")) == runtime
    with refuses(UnsupportedError, "target-not-run", field="model_type", found=open_target(tmp_path).facts.model_type):
        load_target(open_target(tmp_path), placement(), "native")


@pytest.mark.parametrize(
    ("changes", "runtime"),
    [
        ({"global_head_dim": 16}, "transformers"),
        ({"global_head_dim": 15}, "transformers-cache"),
        ({"per_layer_config": {"1": {"head_dim": 15}, "3": {"head_dim": 15}}}, "transformers-cache"),
        ({"per_layer_config": {}}, "transformers"),
        ({"num_attention_heads": 32, "num_key_value_heads": 4, "global_head_dim": 16}, "transformers"),
    ],
    ids=str,
)
def test_layers_with_heads_of_two_sizes(changes: dict[str, Any], runtime: str, tmp_path: Path) -> None:
    """As published, Gemma 4 E2B states the head size of full layers once. transformers writes it for each of them."""
    make_model(tmp_path, "gemma4_text")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["per_layer_config"]
    support.write_config(tmp_path, {**config, **changes})
    assert one_answer(tmp_path).runtime == runtime


def test_native_rope_types_are_those_with_a_computation() -> None:
    assert set(NATIVE_ROPES) == set(rope.KINDS)


def test_a_stray_key_that_layers_differ_in_is_no_crash(tmp_path: Path) -> None:
    make_model(tmp_path, "gemma4_text")
    edit_config(tmp_path, v_head_dim=4)
    assert one_answer(tmp_path).runtime == "transformers-cache"
