"""How vLLM loads a draft with packed weights.

vLLM names a draft's modules after the target's layers: with a target of 36 layers, `layers.0` becomes
`model.layers.36`. A list of plain modules that names the draft's own layers, or `fc` alone, therefore matches nothing
in most methods. A draft that states `weight_block_size` may have fused matrices that share a block of rows; with
compressed-tensors vLLM stops there. Source: vLLM 0.33.0 models/qwen3_dflash.py, models/utils.py map_draft_quant_config,
layers/quantization, layers/linear.py _maybe_allow_fp8_block_shape_mismatch and adjust_block_scale_shard; run on the
drafts of tests/golden/quantised_verdicts.json.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.engines.packed_weights import (
    KEY,
    NOTHING,
    SCALAR,
    PackedLoad,
    PartsOf,
    awq,
    compressed_parts,
    fp8_parts,
    gptq,
    is_listed,
    load_packed,
    matrices,
    misread_blocks,
    needed,
    nibbles,
    with_scale,
)
from dflash_cli.rules.subject import Subject
from dflash_cli.rules.themes.tensors import FLOATS
from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.json_values import as_object, is_int

DEPRECATED = frozenset({"fbgemm_fp8", "fp_quant"})
UNMODELLED = frozenset(
    {
        "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "humming", "experts_int8", "quark", "moe_wna16", "torchao",
        "inc", "gpt_oss_mxfp4", "deepseek_v4_fp8", "online", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel",
        "int8_per_channel_weight_only", "nvfp4_per_token", "mxfp8",
    }
)  # fmt: skip
"""Methods of vLLM without a recording."""
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip
Method = tuple[PartsOf, Callable[[str, str], bool]]
"""The parts of a packed matrix, and whether vLLM packs a module of (its name in vLLM, its name in the file)."""


def stated_packing(subject: Subject) -> Any:
    """The settings of packed weights: of the config, or of Model-Optimizer's file if the config states none."""
    stated = next((item.value for item in subject.stated.statements(KEY) if item.value is not None), None)
    if stated is not None or subject.checkpoint is None or QUANTIZATION_FILE not in subject.files:
        return stated
    settings = subject.checkpoint.read_optional_json(QUANTIZATION_FILE) or {}
    is_modelopt = as_object(as_object(settings).get("producer")).get("name") == "modelopt"
    return {**settings, "quant_method": "modelopt"} if is_modelopt else None


def load_packing(subject: Subject, found: Mapping[str, Any], num_taps: int) -> PackedLoad | None:
    """The faults with which vLLM loads a draft's packed weights; None for a method without a model here.

    found  the keys of the config as the config class fills them in

    Raises:
        EngineStops: the key or the tensor at which it stops.
    """
    settings = stated_packing(subject)
    if settings == {} and isinstance(settings, dict):
        settings = None
    if settings is not None and not isinstance(settings, dict):
        raise EngineStops(KEY, f"found {settings!r}, expected an object")
    method = _method(settings or {}, subject)
    if method is None:
        return None
    parts, is_packed = method
    depth = subject.num_target_layers or 0

    def parts_of(module: str) -> PartsOf | None:
        return parts if is_packed(runtime_name(module, depth), module) else None

    sizes = matrices(found, num_taps)
    load = load_packed(subject, sizes, parts_of, is_strict=True, skipped=(".g_idx",) if settings else ())
    if subject.tensors is None:
        return load
    may_share = "weight_block_size" in (settings or {})
    misread = misread_blocks(sizes, parts_of, settings, FUSED, may_share_blocks=may_share)
    return replace(load, misread=(*load.misread, *misread))


def runtime_name(module: str, depth: int) -> str:
    """The name of the module in vLLM that holds a stored matrix."""
    parts = [FUSED.get(part, part) for part in module.split(".")]
    if parts[0] == "layers":
        parts[1] = str(int(parts[1]) + depth)
    return ".".join(["model", *parts])


def _method(settings: Mapping[str, Any], subject: Subject) -> Method | None:
    name = settings.get("quant_method", "")
    if not isinstance(name, str):
        raise EngineStops(f"{KEY}.quant_method", f"found {name!r}, expected a text")
    name = name.lower().replace("_", "-") if name == "compressed_tensors" else name.lower()
    if name in ("", "mxfp4"):  # mxfp4 packs experts only
        return NOTHING, lambda runtime, module: False
    if name in UNMODELLED:
        return None
    if name in DEPRECATED or name not in METHODS:
        raise EngineStops(f"{KEY}.quant_method", f"found {name!r}, which vLLM 0.33 does not load")
    return METHODS[name](settings, subject)


def _fp8(settings: Mapping[str, Any], subject: Subject) -> Method:
    """FP8 with a scale for each tensor, or for each block."""
    ignored = settings.get("ignored_layers") or settings.get("modules_to_not_convert") or []
    if not isinstance(ignored, list | str):
        raise EngineStops(f"{KEY}.modules_to_not_convert", f"found {ignored!r}, expected a list")
    return fp8_parts(settings), lambda runtime, module: runtime not in ignored


def _compressed(settings: Mapping[str, Any], subject: Subject) -> Method | None:
    """compressed-tensors with one group of settings for every linear layer."""
    ignored, parts = settings.get("ignore", []), compressed_parts(settings)
    if not isinstance(ignored, list):
        raise EngineStops(f"{KEY}.ignore", f"found {ignored!r}, expected a list")
    return (
        None
        if parts is None
        else (parts, lambda runtime, module: parts is not NOTHING and not is_listed(runtime, ignored))
    )


def _gptq(settings: Mapping[str, Any], subject: Subject) -> Method:
    """GPTQ. Without a list, vLLM takes the packed modules' names from the file. Its own modules have other names."""
    bits, group = needed(settings, "bits"), needed(settings, "group_size")
    for key in ("desc_act", "sym"):
        needed(settings, key)
    if settings["desc_act"] is True or settings["sym"] is not True or not is_int(bits) or bits not in (4, 8):
        wrong = "desc_act" if settings["desc_act"] is True else "sym" if settings["sym"] is not True else "bits"
        raise EngineStops(f"{KEY}.{wrong}", f"found {settings[wrong]!r}; vLLM packs 4 or 8 bits, symmetric, in order")
    listed = settings.get("modules_in_block_to_quantize") or []
    flat = [name for item in listed for name in (item if isinstance(item, list) else [item])]
    packed = flat or sorted({name.rpartition(".")[0] for name in _packed_names(subject)})
    return gptq(bits, group), lambda runtime, module: not packed or any(name in runtime for name in packed)


def _awq(settings: Mapping[str, Any], subject: Subject) -> Method:
    """AWQ. Without a list, modules with only plain tensors in the file are plain."""
    bits, group = needed(settings, "w_bit", "bits"), needed(settings, "q_group_size", "group_size")
    needed(settings, "zero_point")
    if bits != 4:
        raise EngineStops(f"{KEY}.bits", f"found {bits!r}, expected 4")
    listed = settings.get("modules_to_not_convert")
    packed = {name.rpartition(".")[0] for name in _packed_names(subject)}
    plain = sorted({name.rpartition(".")[0] for name in subject.tensors or ()} - packed)
    ignored = listed if isinstance(listed, list) and listed else plain
    return awq(4, group), lambda runtime, module: not any(name in runtime for name in ignored)


def _packed_names(subject: Subject) -> list[str]:
    return [name for name, info in (subject.tensors or {}).items() if info.dtype not in FLOATS]


def _modelopt(settings: Mapping[str, Any], subject: Subject) -> Method | None:
    """Model-Optimizer's FP8 and NVFP4. Its lists name the draft's own modules."""
    inner = settings.get("quantization", settings)
    algo = as_object(inner).get("quant_algo")
    if not algo:
        raise EngineStops(f"{KEY}.quant_algo", "missing")
    if str(algo).upper() not in MODELOPT:
        if str(algo).upper() in ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "W4A16_NVFP4", "MXFP8", "MIXED_PRECISION"):
            return None
        raise EngineStops(f"{KEY}.quant_algo", f"found {algo!r}, expected one of {', '.join(MODELOPT)}")
    ignored = (
        inner.get("exclude_modules", [])
        if inner is not settings
        else settings.get("ignore", settings.get("exclude_modules", []))
    )
    if not isinstance(ignored, list):
        raise EngineStops(f"{KEY}.ignore", f"found {ignored!r}, expected a list")
    depth = subject.num_target_layers or 0
    names = [_modelopt_name(item, depth) for item in ignored if isinstance(item, str)]
    return MODELOPT[
        str(algo).upper()
    ], lambda runtime, module: not any(name in runtime or fnmatch(runtime, name) for name in names)


def _modelopt_name(listed: str, depth: int) -> str:
    """A name or wildcard of a draft's module as vLLM rewrites it. Source: models/utils.py map_draft_quant_config."""
    moved = re.sub(r"^((?:model\.)?\*?layers\.)(\d{1,9})(?=\.|\*|$)", lambda at: f"{at[1]}{int(at[2]) + depth}", listed)
    return moved if re.match(r"\*|model(?:\.|\*|$)", moved) else f"model.{moved}"


MODELOPT: Mapping[str, PartsOf] = {
    "FP8": with_scale("weight_scale", lambda rows, columns: SCALAR, "input_scale"),
    "NVFP4": nibbles("weight", "weight_scale_2", "input_scale"),
}
METHODS: Mapping[str, Callable[[Mapping[str, Any], Subject], Method | None]] = {
    "fp8": _fp8, "compressed-tensors": _compressed, "gptq": _gptq, "auto_gptq": _gptq, "gptq_marlin": _gptq,
    "awq": _awq, "auto_awq": _awq, "awq_marlin": _awq, "modelopt": _modelopt,
}  # fmt: skip
