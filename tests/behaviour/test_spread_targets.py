"""A hosted target spread over several devices generates the same text as on one device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash_cli.checkpoints.opening import open_target
from dflash_kernels.attention.softmax import PLAIN, Softmax
from dflash_runtime.device.setup import spreading
from dflash_runtime.device.setup.loading import load_pair
from dflash_runtime.device.setup.spreading import resolve_spread, share_out
from dflash_runtime.engine_config import EngineConfig
from dflash_runtime.errors import CheckpointNotFound, UnsupportedError, UsageError
from dflash_runtime.llm import LLM
from dflash_runtime.models.hosting import hosted
from dflash_runtime.scheduling.sampling_params import SamplingParams
from dflash_testing.hosted_models import make_model, plain_text
from dflash_testing.pairs import random_draft, random_llm, random_prompts
from dflash_testing.quantised_models import needs_accelerate
from dflash_testing.refusals import refuses

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
MODULES = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", *(f"model.layers.{n}" for n in range(4)))
READ_IN_STEPS = {
    "layers": ("model.layers.1", "model.layers.3"),
    "head": ("model.embed_tokens", "lm_head", "model.norm"),
    "all": MODULES,
}
"""Modules on disk, which are read in each forward. accelerate moves rows and weights for them as for a GPU."""


def write_map(path: Path, on_disk: tuple[str, ...] = (), **changes: Any) -> str:
    devices = {name: "disk" if name in on_disk else "cpu" for name in MODULES} | changes
    (path / "map.json").write_text(json.dumps(devices))
    return str(path / "map.json")


@needs_accelerate
@pytest.mark.parametrize(
    ("kind", "on_disk"),
    [
        *(("gemma3_text", on_disk) for on_disk in READ_IN_STEPS),
        ("llama", "all"),
        *(pytest.param("llama", on_disk, marks=pytest.mark.slow) for on_disk in READ_IN_STEPS if on_disk != "all"),
    ],
)
def test_a_spread_target_generates_transformers_text(kind: str, on_disk: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, kind)
    config = EngineConfig(
        device="cpu", device_map=write_map(tmp_path, READ_IN_STEPS[on_disk]), max_model_len=64, max_num_requests=4
    )
    pair = load_pair(open_target(tmp_path), None, config)
    assert pair.target_runtime == "transformers"
    assert any(item.is_meta for item in pair.target.decoder.parameters()) or on_disk == "head"  # type: ignore[attr-defined]
    prompts = random_prompts((3, 17, 9), pair.target.config.vocab_size)
    wanted = [plain_text(model, prompt, 12) for prompt in prompts]
    assert [list(output.token_ids) for output in LLM(pair).generate(prompts, PARAMS)] == wanted
    llm = random_llm(pair.target, random_draft(pair.target), 7, max_num_requests=4)
    assert [list(output.token_ids) for output in llm.generate(prompts, PARAMS)] == wanted


@needs_accelerate
@pytest.mark.parametrize("device_map", ["auto", "cpu"])
def test_a_map_that_is_a_word(device_map: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    pair = load_pair(open_target(tmp_path), None, EngineConfig(device="cpu", device_map=device_map, max_model_len=64))
    (prompt,) = random_prompts((9,), pair.target.config.vocab_size)
    (output,) = LLM(pair).generate([prompt], PARAMS)
    assert list(output.token_ids) == plain_text(model, prompt, 12)


def test_attention_runs_on_the_device_of_the_pages() -> None:
    """Rows move to the device of the pages (here `meta`), and attended rows move back to the layer's device."""
    seen: list[str] = []

    class Attend:
        def __call__(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, softmax: Softmax = PLAIN) -> Tensor:
            sinks = () if softmax.sinks is None else (softmax.sinks,)
            seen.extend(item.device.type for item in (query, keys, values, *sinks))
            return torch.ones(query.shape)

    rows = torch.zeros(3, 4, 8)
    attended = hosted._attend_on(torch.device("meta"), Attend())(1, rows, rows, rows, Softmax(sinks=torch.zeros(4)))  # type: ignore[arg-type]
    assert seen == ["meta"] * 4
    assert attended.device == rows.device


@needs_accelerate
def test_a_module_without_a_device_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    devices = {name: "disk" if "layers" in name else "cpu" for name in MODULES if name != "model.layers.2"}
    (tmp_path / "map.json").write_text(json.dumps(devices))
    with refuses(UsageError, "device-map", field="--device-map", found=devices) as refused:
        load_pair(open_target(tmp_path), None, EngineConfig(device="cpu", device_map=str(tmp_path / "map.json")))
    assert "model.layers.2" in refused.value.message


@needs_accelerate
class TestMap:
    def test_devices_are_read(self, tmp_path: Path) -> None:
        spread = resolve_spread(write_map(tmp_path, ("lm_head",)))
        assert spread is not None
        assert spread.modules is not None
        assert (spread.modules["lm_head"], spread.modules["model.norm"]) == ("disk", "cpu")

    @pytest.mark.parametrize("value", [None, [0], "gpu0", True])
    def test_another_value_is_named(self, value: object, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as refused:
            resolve_spread(write_map(tmp_path, lm_head=value))
        assert all(named in refused.value.message for named in ("lm_head", repr(value), "cpu"))

    def test_an_unknown_word_is_named(self) -> None:
        with pytest.raises(UsageError) as refused:
            resolve_spread("gpus")
        assert all(named in refused.value.message for named in ("--device-map", "'gpus'", "cpu"))

    def test_a_missing_file_is_named(self) -> None:
        with pytest.raises(CheckpointNotFound) as refused:
            resolve_spread("none.json")
        assert all(named in refused.value.message for named in ("--device-map", "none.json"))


def test_without_accelerate_the_hint_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spreading, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError) as refused:
        resolve_spread("auto")
    assert all(named in refused.value.message for named in ("--device-map", "accelerate"))
    assert refused.value.hint == "pip install 'dflash-cli[big]'"


def test_the_native_runtime_refuses_a_device_map() -> None:
    assert EngineConfig(target_runtime="native").wanted_runtime == "native"
    with refuses(UsageError, "device-map-of-native-target", field="device_map", found="auto"):
        EngineConfig(device_map="auto", target_runtime="native")
    assert EngineConfig(device_map="auto").wanted_runtime == "transformers"


def test_each_device_takes_its_free_memory_less_steps_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (70, 100) if number < 2 else (5, 100))
    monkeypatch.setattr(spreading, "available_bytes", lambda: 1000)
    shares = share_out(torch.device("cuda", 1), left=40, withheld=6, utilization=1.0)
    assert shares == {0: 64, 1: 30, 2: 0, "cpu": 900}
    assert share_out(torch.device("cpu"), left=40, withheld=6, utilization=0.9) == {"cpu": 30}


@pytest.mark.gpu
@needs_accelerate
@pytest.mark.parametrize("devices", ["cpu", "layers on the host", "layers on two GPUs", "auto"])
def test_a_gpu_has_the_pages_of_layers_on_the_host(devices: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    if devices == "layers on two GPUs" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    if devices.startswith("layers"):
        elsewhere: Any = "cpu" if devices.endswith("host") else 1
        modules: dict[str, Any] = {name: elsewhere if "layers" in name else 0 for name in MODULES}
        devices = write_map(tmp_path, **modules)
    config = EngineConfig(device="cuda", dtype="float32", device_map=devices, max_model_len=64)
    pair = load_pair(open_target(tmp_path), None, config)
    (prompt,) = random_prompts((9,), pair.target.config.vocab_size)
    (output,) = LLM(pair).generate([prompt], PARAMS)
    assert list(output.token_ids) == plain_text(model, prompt, 12)
