"""Load drafts with the engines' own, unchanged code on a CPU: the config, the modules, the weights."""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filled_parameters import Resized
from seen_gpu import hopper_of, seem_hopper, use_one_rank
from stand_ins import StandIn

from dflash_testing import checkpoints as support
from dflash_testing import config_cases

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1",
               "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_USE_V2_MODEL_RUNNER": "1"}  # fmt: skip

Reading = dict[str, Any]
Load = Callable[[Path, Path], Reading]
Own = Callable[[Any, Any, Path], Reading]
"""Reads what only drafts of one family have: (the model, its config, the draft's folder) -> fields."""
Prepare = Callable[[Any], None]
"""Changes a model before its weights are loaded."""
PAIR: Any = config_cases
"""The module that states SHAPE, the sizes of all drafts, and TARGET, the config of their target."""
OPERATORS: list[Any] = []
"""Libraries with operators that are declared and never called. A library that is freed takes them away."""


def nothing(model: Any, config: Any, draft: Path) -> Reading:
    """DFlash has no fields beside the fields of `Load`."""
    return {}


def leave(model: Any) -> None:
    """Change nothing."""


def start_zlab(own: Own = nothing) -> Load:
    """z-lab's loader on transformers."""
    import torch
    from dflash import model as zlab
    from transformers import Qwen3Config, Qwen3ForCausalLM

    whole = Qwen3ForCausalLM(Qwen3Config(**PAIR.TARGET)).eval()

    def load(draft: Path, target: Path) -> Reading:
        named = json.loads((draft / "config.json").read_text()).get("architectures") or []  # as benchmark.py:95
        found = zlab.DFlash2DraftModel if "DFlash2DraftModel" in named else zlab.DFlashDraftModel
        model, info = found.from_pretrained(draft, dtype=torch.float32, output_loading_info=True)
        layers = [layer.self_attn for layer in model.layers]
        ids = torch.zeros(1, 3, dtype=torch.long)
        zlab.dflash_generate(model, whole, ids, 4, None, block_size=PAIR.SHAPE.block)
        return {
            "missing": sorted(info["missing_keys"]),
            "taps": list(map(int, model.target_layer_ids)),
            "block_size": model.block_size,
            "mask_token_id": model.mask_token_id,
            "windows": [layer.sliding_window for layer in layers],
            "causal": [bool(layer.is_causal) for layer in layers],
            "rope": plain_rope(model.config),
            "eps": model.norm.variance_epsilon,
            **own(model, model.config, draft),
        }

    return load


def start_vllm(own: Own = nothing, prepare: Prepare = leave, *, on_gpu: bool = False) -> Load:
    """vLLM: its speculative config, its model of the draft, its weight loader, and its V2 runner's checks.

    With `on_gpu`, the platform claims to be a GPU of compute capability 9.0 whenever vLLM chooses kernels.
    """
    import torch
    import vllm.config.vllm
    import vllm.model_executor.models.qwen3_dflash
    import vllm.model_executor.models.registry as registry
    import vllm.platforms as platforms
    from vllm.config import (
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
    from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

    release = vllm_release(Path(sys.argv[2]))
    vllm.config.vllm.HAS_TRITON = True  # releases before 0.33 refuse the V2 runner without a GPU's Triton
    if not hasattr(torch.ops._C, "silu_and_mul"):  # 0.28 to 0.30 look the compiled operator up, also on a CPU
        OPERATORS.append(torch.library.Library("_C", "FRAGMENT"))
        OPERATORS[-1].define("silu_and_mul(Tensor! out, Tensor x) -> ()")
    registry._run_in_subprocess = lambda function: function()
    platforms._current_platform = hopper_of(CpuPlatform)() if on_gpu else CpuPlatform()
    time.sleep = lambda seconds: None  # vLLM reads a refused config three times, with pauses
    rendezvous = tempfile.mkdtemp()

    def load(draft: Path, target: Path) -> Reading:
        config = ModelConfig(model=str(target), tokenizer=str(target), max_model_len=128, dtype=PAIR.TARGET["dtype"])
        method = "dspark" if draft.name.startswith("dspark") else "dflash"
        speculative = SpeculativeConfig(
            model=str(draft), method=method, num_speculative_tokens=3, target_model_config=config,
            target_parallel_config=ParallelConfig(),
        )  # fmt: skip
        whole = VllmConfig(
            model_config=config, speculative_config=speculative, device_config=DeviceConfig(device="cpu")
        )
        with set_current_vllm_config(whole):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{rendezvous}/store", 0, "gloo")
                initialize_model_parallel(1)
            drafted = speculative.draft_model_config.hf_config
            if release == (0, 28):  # dflash/utils.py:23 writes the style of the target, whose rope is in halves
                drafted.is_neox_style = True
            found, _ = registry.ModelRegistry.resolve_model_cls(drafted.architectures, speculative.draft_model_config)
            model = found(vllm_config=whole)
            prepare(model)
            model.load_weights(weights_of(draft))
        nested = getattr(drafted, "dflash_config", None) or {}
        if release >= (0, 27) and nested.get("sample_from_anchor", False):  # 0.27 dflash/speculator.py:64
            raise ValueError("dflash/speculator.py: sample_from_anchor")
        mask = get_parallel_drafting_token_id(drafted)
        aux = get_eagle3_aux_layers_from_config(speculative) or ()
        captured = [at - 1 for at in range(config.hf_config.num_hidden_layers + 1) if at in aux]
        width = len(captured) * PAIR.SHAPE.hidden
        if model.model.use_aux_hidden_state and model.model.fc.input_size != width:
            raise ValueError(f"combine_hidden_states: {model.model.fc.input_size} features, {width} captured")
        torch.nn.functional.embedding(torch.tensor([mask]), torch.zeros(PAIR.SHAPE.vocab, 2))
        layers = [layer.self_attn for layer in model.model.layers]
        rotary = layers[0].rotary_emb
        # 0.24 and 0.25 dflash/utils.py:14: one flag for all layers. 0.24 has no windows, 0.30 has no value scale.
        flag = nested.get("causal", False)
        return {
            "model": type(model).__name__,
            "taps": captured,
            "mask_token_id": mask,
            "windows": [getattr(layer, "sliding_window", None) for layer in layers],
            "causal": [bool(layer.causal if release >= (0, 26) else flag) for layer in layers],
            "rope": plain_rope(drafted),
            "neox": getattr(rotary, "is_neox_style", True),
            "eps": layers[0].q_norm.variance_epsilon,
            "value_scale": getattr(layers[0], "v_scale", None),
            "sinks": getattr(layers[0], "attention_sink_bias", None) is not None,
            "logit_scale": model.logits_processor.scale,
            "draft_vocab_size": drafted.draft_vocab_size,
            "maps_ids": model.draft_id_to_target_id is not None,
            **own(model, drafted, draft),
        }

    return load


def vllm_release(code: Path) -> tuple[int, ...]:
    """The release of the folder `vllm-0.33.0`, as (0, 33)."""
    return tuple(map(int, code.name.partition("-")[2].split(".")[:2]))


def let_sglang_import() -> None:
    """Let SGLang believe in a GPU, and import without its compiled libraries."""
    seem_hopper()
    sys.modules["sgl_kernel.scalar_type"] = None  # type: ignore[assignment]  # SGLang then uses its own names of types
    kernels = next(Path(path) / "sglang/kernels/jit" for path in sys.path if (Path(path) / "sglang/srt").is_dir())
    for folder in ("include", "csrc"):
        (kernels / folder).mkdir(exist_ok=True)


def start_sglang(own: Own = nothing, prepare: Prepare = leave) -> Load:
    """SGLang: its config of the draft, its parser, its model of the draft, and its weight loader.

    Only its attention is a stand-in, which keeps its settings. The rest of its worker's checks need a running server;
    the last lines of `load` repeat the two that depend on the draft's config.
    """
    import torch

    with contextlib.suppress(ImportError):
        import_module("bitsandbytes")  # its backend is chosen when it is imported
    let_sglang_import()
    import sglang.srt.models.dflash as dflash
    import vllm  # noqa: F401 a stand-in, whose rotary kernel nobody calls
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader.loader import _get_quantization_config
    from sglang.srt.model_loader.utils import get_model_architecture
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config

    class Attention(torch.nn.Module):
        def __init__(self, **given: Any) -> None:
            super().__init__()
            self.given = given

    dflash.get_parallel = lambda: SimpleNamespace(tp_size=1, tp_rank=0)
    use_one_rank()
    dflash.RadixAttention = Attention
    dflash.sharded_weight_loader = lambda *given, **named: lambda parameter, loaded: parameter.data.copy_(loaded)

    def load(draft: Path, target: Path) -> Reading:
        is_dspark = draft.name.startswith("dspark")
        parsed_model = ModelConfig(
            model_path=str(draft), is_draft_model=True, speculative_algorithm="DSPARK" if is_dspark else "DFLASH",
            dtype=PAIR.TARGET["dtype"],
        )  # fmt: skip
        config = parsed_model.hf_config
        parsed = parse_dflash_draft_config(draft_hf_config=config)
        depth = PAIR.SHAPE.target_layers
        taps = parsed.resolve_target_layer_ids(target_num_layers=depth, draft_num_layers=parsed.require_num_layers())
        block, mask = parsed.block_size, parsed.mask_token_id
        if is_dspark:  # spec_aux_hidden_state.py:260 and dspark_worker_v2.py:261
            import sglang.srt.speculative.dspark_components.dspark_config as dspark

            found_dspark = dspark.parse_dspark_draft_config(draft_hf_config=config)
            runtime = dspark.resolve_runtime_config(
                draft_hf_config=config, speculative_num_draft_tokens=4, target_vocab_size=PAIR.SHAPE.vocab
            )
            taps = taps if found_dspark.target_layer_ids is None else found_dspark.target_layer_ids
            block, mask = found_dspark.gamma, runtime.mask_token_id
        found, _ = get_model_architecture(parsed_model)
        torch.set_default_dtype(parsed_model.dtype)  # as model_loader/loader.py does
        model = found(config, quant_config=_get_quantization_config(parsed_model, LoadConfig()))
        prepare(model)
        resized = Resized(model, weights_of(draft))
        model.load_weights(resized.weights)
        for module in model.modules():  # bitsandbytes.py:301 and :378; only a loader of its own sets a state
            is_packed = type(getattr(module, "quant_method", None)).__name__ == "BitsAndBytesLinearMethod"
            if is_packed and not hasattr(module.weight, "bnb_quant_state"):
                raise ValueError("bitsandbytes.py: the first step finds no bnb_quant_state")
        model.set_block_size(PAIR.SHAPE.block)
        captured = [layer for layer in range(depth) if layer in taps]
        # models/qwen3.py captures before a layer, so never after the last one; project_target_hidden compares widths.
        width = len([layer for layer in captured if layer + 1 < depth]) * PAIR.SHAPE.hidden
        if model.fc.in_features != width:
            raise ValueError(f"project_target_hidden: {model.fc.in_features} features, {width} captured")
        # dflash_worker_v2.py _resolve_mask_token_id; without an id, the tokenizer decides
        if mask is not None and mask >= PAIR.SHAPE.vocab:
            raise ValueError("dflash_worker_v2.py: mask_token_id is outside the target's vocabulary")
        layers = [layer.self_attn for layer in model.layers]
        rotary = layers[0].rotary_emb
        return {
            "model": type(model).__name__,
            "taps": captured,
            "block_size": block,
            "mask_token_id": mask,
            "windows": [
                None if (left := layer.attn.given["sliding_window_size"]) < 0 else left + 1 for layer in layers
            ],
            "causal": [layer.attn.given["attn_type"].value == "decoder" for layer in layers],
            "rope": plain_rope(config),
            "neox": getattr(rotary, "is_neox_style", True),
            "eps": layers[0].q_norm.variance_epsilon,
            "gemma_norms": layers[0].use_gemma_norm,
            "value_scale": layers[0].v_scale,
            "sinks": layers[0].attention_sink_bias is not None,
            "output_multiplier": parsed.output_multiplier,
            "final_logit_softcapping": parsed.final_logit_softcapping,
            "cut": sorted(resized.cut),
            "padded": sorted(resized.padded),
            **own(model, config, draft),
        }

    return load


def start_llama() -> Load:
    """llama.cpp: the class of its converter that writes a draft's metadata, and its loader as read.

    `code` is conversion/qwen.py of August 2026. Its class runs with a writer that packs numbers as GGUF does. Loading
    follows conversion/base.py (load_hparams, get_model_architecture) and src/models/dflash.cpp at 01b78a15: lines 25 to
    27 need target_layers, lines 97 to 215 create every tensor, and common/speculative.cpp needs the mask token.
    """
    import ast
    import struct

    from transformers import AutoConfig

    class Writer:
        def __init__(self) -> None:
            self.found: Reading = {}

        def __getattr__(self, name: str) -> Callable[[Any], None]:
            def add(value: Any) -> None:
                for item in value if isinstance(value, list) else [value]:
                    struct.pack("<?" if isinstance(item, bool) else "<i" if isinstance(value, list) else "<I", item)
                self.found[name.removeprefix("add_")] = value

            return add

    class Base:
        def __init__(self, hparams: Reading) -> None:
            self.hparams, self.gguf_writer = hparams, Writer()

        def set_gguf_parameters(self) -> None:
            for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"):
                struct.pack("<I", self.hparams[key])

    source = Path(sys.argv[2]).read_text(encoding="utf-8")
    body = [node for node in ast.parse(source).body if getattr(node, "name", "") == "DFlashModel"]
    body[0].decorator_list = []  # type: ignore[attr-defined]
    scope: Reading = {"Qwen3Model": Base, "gguf": StandIn, "classmethod": classmethod}
    exec(compile(ast.Module(body=body, type_ignores=[]), "qwen.py", "exec"), scope)

    def load(draft: Path, target: Path) -> Reading:
        raw = json.loads((draft / "config.json").read_text())
        try:
            hparams = AutoConfig.from_pretrained(draft).to_dict()
        except Exception:  # load_hparams falls back to the file
            hparams = raw
        if hparams["architectures"][0] != "DFlashDraftModel":
            raise ValueError("get_model_architecture: not supported")
        model = scope["DFlashModel"](hparams)
        model.set_gguf_parameters()
        if (mask := hparams.get("dflash_config", {}).get("mask_token_id")) is not None:
            model.gguf_writer.add_mask_token_id(mask)
        found = model.gguf_writer.found
        if not found.get("target_layers") or "mask_token_id" not in found:
            raise ValueError(f"dflash.cpp: target_layers or mask token missing: {sorted(found)}")
        if max(found["target_layers"]) > PAIR.SHAPE.target_layers:
            raise ValueError("speculative.cpp: target layer input not extracted")
        sizes = {
            "hidden": hparams["hidden_size"], "inner": hparams.get("intermediate_size"), "bias": False,
            "layers": hparams["num_hidden_layers"], "heads": hparams["num_attention_heads"],
            "kv_heads": hparams.get("num_key_value_heads"), "head_dim": hparams.get("head_dim"),
            "taps": tuple(found["target_layers"]),
        }  # fmt: skip
        expected = support.body_shapes(replace(PAIR.SHAPE, **sizes))
        stored = {name: tuple(tensor.shape) for name, tensor in weights_of(draft)}
        extra = {name for name in stored.keys() - expected.keys() if not name.startswith(OPTIONAL_IN_LLAMA)}
        if extra or any(stored.get(name) != shape for name, shape in expected.items()):
            raise ValueError(f"dflash.cpp: create_tensor, or a tensor that cannot be mapped: {sorted(extra)[:1]}")
        if found["mask_token_id"] >= PAIR.SHAPE.vocab:  # no batch with such a token is decoded
            raise ValueError("llama-batch.cpp init: invalid token")
        pattern = found.get("sliding_window_pattern") or []  # dflash.cpp:86 checks no length
        pattern = [*pattern, *[False] * hparams["num_hidden_layers"]][: hparams["num_hidden_layers"]]
        return {
            "taps": [layer - 1 for layer in found["target_layers"]],
            "block_size": found["block_size"],
            "mask_token_id": found["mask_token_id"],
            "windows": [found["sliding_window"] if is_sliding else None for is_sliding in pattern],
        }

    return load


OPTIONAL_IN_LLAMA = ("embed_tokens.", "lm_head.", "rotary_emb.", "layers.0.self_attn.attention_sink_bias")
"""Tensors that the converter maps or skips, and that the loader does not need."""


def weights_of(draft: Path) -> Iterator[tuple[str, Any]]:
    from safetensors.torch import load_file

    yield from load_file(draft / "model.safetensors").items()


def plain_rope(config: Any) -> Reading:
    """The rope parameters that the engine builds its rotary embedding from."""
    return {key: value for key, value in (config.rope_parameters or {}).items() if key != "type"}
