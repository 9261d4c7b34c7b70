"""Record how engines' own code reads converted configs, for tests/behaviour/test_engine_readings.py.

Run it in a new environment with z-lab's package. The engines are not installed: the script reads source files of their
unpacked wheels.

    python -m venv zlab
    zlab/bin/pip install torch==2.13.0 transformers==5.15.0 tqdm numpy safetensors regex
    zlab/bin/pip install --no-deps dflash==0.1.0
    pip download --no-deps vllm==0.24.0     # and each of VLLM_RELEASES, and sglang==0.5.23; wheel or source
    unpack each into engines/vllm-0.24.0 and so on, engines/sglang
    export PYTHONPATH=.:runtime:kernels:tests
    zlab/bin/python tests/golden/engine_readings.py engines tests/golden/engine_readings.json

The script cuts an engine's functions and classes out of its source by name and runs them unchanged, because importing
their modules needs compiled kernels. `READERS` lists them. z-lab's loader runs whole.
"""

import argparse
import ast
import dataclasses
import json
import logging
import numbers
import tempfile
import typing
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from dflash import model as zlab
from transformers import AutoConfig, PretrainedConfig, Qwen3Config

from dflash_testing import checkpoints as support
from dflash_testing import dialects

Reading = dict[str, Any]
VLLM_RELEASES = ("0.24.0", "0.25.0", "0.26.0", "0.28.0", "0.33.0")
"""The first release with each way to read causality and windows, and the newest release."""


def cut(file: Path, names: Sequence[str], **known: Any) -> SimpleNamespace:
    """Run the named top-level definitions of a source file. They see only the names in `known`."""
    wanted = set(names)
    body = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if defined_name(node) in wanted]
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module(body=[*future, *body], type_ignores=[])
    scope: dict[str, Any] = {"__name__": "cut", **vars(typing), **known}
    exec(compile(ast.fix_missing_locations(module), str(file), "exec"), scope)
    missing = wanted - scope.keys()
    assert not missing, f"{file} has no {missing}"
    return SimpleNamespace(**{name: scope[name] for name in names})


def defined_name(node: ast.stmt) -> str | None:
    """Return the name that a top-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return next((target.id for target in targets if isinstance(target, ast.Name)), None)


class Vllm:
    """Config code of one vLLM release."""

    def __init__(self, root: Path) -> None:
        configs = root / "vllm/transformers_utils/configs"
        worker = root / "vllm/v1/worker/gpu/spec_decode"
        known = {
            "PreTrainedConfig": PretrainedConfig, "PretrainedConfig": PretrainedConfig, "AutoConfig": AutoConfig,
            "DeepseekV2Config": transformers.DeepseekV2Config, "without_trust_remote_code": lambda kwargs: kwargs,
            "fields": dataclasses.fields, "os": __import__("os"),
        }  # fmt: skip
        self.eagle = cut(configs / "eagle.py", ["EAGLEConfig"], **known).EAGLEConfig
        algos = cut(
            configs / "speculators/algos.py", ["SUPPORTED_SPECULATORS_TYPES", "register_speculator", "update_dflash"]
        )
        known["SUPPORTED_SPECULATORS_TYPES"] = algos.SUPPORTED_SPECULATORS_TYPES
        self.speculators = cut(configs / "speculators/base.py", ["SpeculatorsConfig"], **known).SpeculatorsConfig
        self.aux = cut(worker / "eagle/eagle3_utils.py", ["get_eagle3_aux_layers_from_config"])
        self.mask = cut(worker / "utils.py", ["get_parallel_drafting_token_id"])
        runner = SimpleNamespace(use_v2_model_runner=True)
        wanted = ["_SLIDING_ATTENTION", "_dflash_layer_causal", "_resolve_layer_attention"]
        model = root / "vllm/model_executor/models/qwen3_dflash.py"
        names = sorted(
            set(wanted) & set(map(defined_name, ast.parse(model.read_text(encoding="utf-8")).body)), key=wanted.index
        )
        self.layers = cut(model, names, get_current_vllm_config=lambda: runner)
        self.runner = None if wanted[1] in names else cut(worker / "dflash/utils.py", ["get_dflash_causal"])

    def native(self, path: Path) -> Reading:
        config = AutoConfig.from_pretrained(path)
        return self.describe(self.eagle(model=config, method="dflash", model_type="eagle"))

    def from_speculators(self, path: Path) -> Reading:
        stored = json.loads((path / "config.json").read_text())
        serving = self.speculators.extract_vllm_speculative_config(stored)
        return {**self.describe(self.speculators.from_pretrained(path)), "serving": serving}

    def describe(self, config: Any) -> Reading:
        """Return the values that model and runner read. Before 0.26, one flag of the runner is for all layers."""
        spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
        reading = {
            "architectures": config.architectures,
            "taps": [layer - 1 for layer in self.aux.get_eagle3_aux_layers_from_config(spec)],
            "mask_token_id": self.mask.get_parallel_drafting_token_id(config),
            "vocab_size": config.vocab_size,
            "draft_vocab_size": getattr(config, "draft_vocab_size", None) or config.vocab_size,
            "target_hidden_size": getattr(config, "target_hidden_size", None),
            "rope": dict(config.rope_parameters),
        }
        layers: list[tuple[int | None, bool]] = [(None, False)] * config.num_hidden_layers
        if hasattr(self.layers, "_resolve_layer_attention"):
            layers = [self.layers._resolve_layer_attention(config, at) for at in range(config.num_hidden_layers)]
        flag = self.runner.get_dflash_causal(SimpleNamespace(hf_config=config)) if self.runner is not None else None
        reading["windows"] = [window for window, _ in layers]
        reading["causal"] = [causal if flag is None else flag for _, causal in layers]
        return reading


class Sglang:
    """SGLang's parser of draft configs and its choice of attention by layer."""

    def __init__(self, root: Path) -> None:
        names = [
            "DEFAULT_DFLASH_MASK_TOKEN", "DFlashDraftConfig", "_cfg_get", "_get_dflash_config", "_get_text_config",
            "_parse_optional_int", "build_target_layer_ids", "get_dflash_attention_sliding_window_size",
            "get_dflash_layer_types", "parse_dflash_draft_config",
        ]  # fmt: skip
        known = {
            "dataclass": dataclasses.dataclass, "Integral": numbers.Integral, "Sequence": Sequence,
            "logger": logging.getLogger("sglang"),
        }  # fmt: skip
        self.utils = cut(root / "sglang/srt/speculative/dflash_utils.py", names, **known)
        kinds = SimpleNamespace(DECODER="causal", ENCODER_ONLY="non-causal")
        self.model = cut(
            root / "sglang/srt/models/dflash.py",
            ["_get_dflash_attention_type", "_get_dflash_layer_attention_params"],
            AttentionType=kinds,
            **vars(self.utils),
        )

    def native(self, path: Path) -> Reading:
        config = AutoConfig.from_pretrained(path)
        parsed = self.utils.parse_dflash_draft_config(draft_hf_config=config)
        layers = [self.model._get_dflash_layer_attention_params(config, at) for at in range(config.num_hidden_layers)]
        return {
            "architectures": config.architectures,
            "block_size": parsed.block_size,
            "num_target_layers": parsed.num_target_layers,
            "taps": parsed.target_layer_ids,
            "mask_token_id": parsed.mask_token_id,
            "vocab_size": config.vocab_size,
            "windows": [None if left < 0 else left + 1 for left, _ in layers],
            "causal": [kind == "causal" for _, kind in layers],
            "output_multiplier": parsed.output_multiplier,
            "final_logit_softcapping": parsed.final_logit_softcapping,
            "rope": dict(config.rope_parameters or {}),
        }


class Zlab:
    """z-lab's loader, which also loads weights."""

    def native(self, path: Path) -> Reading:
        config = Qwen3Config.from_pretrained(path)
        model, info = zlab.DFlashDraftModel.from_pretrained(
            path, config=config, dtype=torch.float32, output_loading_info=True
        )
        layers = [layer.self_attn for layer in model.layers]
        return {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "taps": list(model.target_layer_ids),
            "block_size": model.block_size,
            "mask_token_id": model.mask_token_id,
            "windows": [layer.sliding_window for layer in layers],
            "causal": [bool(layer.is_causal) for layer in layers],
            "rope": dict(config.rope_parameters or {}),
        }


def main() -> None:
    """Convert every case to every dialect that can state it, and let each engine read the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    vllm = {f"vllm {release}": Vllm(arguments.engines / f"vllm-{release}") for release in VLLM_RELEASES}
    late = vllm["vllm 0.33.0"]
    sglang, reference = Sglang(arguments.engines / "sglang"), Zlab()
    readers: dict[str, dict[str, Callable[[Path], Reading]]] = {
        "native": {"vllm 0.33.0": late.native, "sglang 0.5.23": sglang.native, "z-lab 0.1.0": reference.native},
        "vllm": {name: reader.native for name, reader in vllm.items()},
        "sglang": {"sglang 0.5.23": sglang.native},
        "mlx": {"z-lab 0.1.0": reference.native},
        "speculators": {name: reader.from_speculators for name, reader in vllm.items()},
    }
    readings = [entry for to in readers for name in dialects.CASES for entry in record(name, to, readers[to])]
    document = {
        "provenance": {
            "script": "tests/golden/engine_readings.py",
            "wheels": [*vllm, "sglang 0.5.23"],
            "versions": {name: version(name) for name in ("dflash", "transformers", "torch")},
        },
        "readings": readings,
    }
    arguments.output.write_text(dialects.one_line_each(document), encoding="utf-8")
    print(f"{len(readings)} readings")


def record(name: str, to: str, readers: dict[str, Callable[[Path], Reading]]) -> list[Reading]:
    """Return the reading of each reader of a dialect. The result is empty if the dialect cannot state the case."""
    from dflash_runtime.errors import LossyConversion

    with tempfile.TemporaryDirectory() as directory:
        source, out = dialects.make_case(Path(directory) / "source", name), Path(directory) / "out"
        try:
            support.convert(source, out, to, verifier="acme/target")
        except LossyConversion:
            return []
        digest = dialects.config_digest(out)
        return [
            {"case": name, "to": to, "reader": reader, "config_sha256": digest, "reading": attempt(read, out)}
            for reader, read in readers.items()
        ]


def attempt(read: Callable[[Path], Reading], path: Path) -> Reading:
    """Return a reading, or a note that the engine refuses the draft."""
    try:
        return read(path)
    except NotImplementedError:
        return {"refused": True}


if __name__ == "__main__":
    main()
