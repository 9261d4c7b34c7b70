"""How SGLang loads a draft with packed weights.

SGLang's DFlash model gives the layers of a draft no prefix: its modules are `qkv_proj`, `o_proj`, `gate_up_proj` and
`down_proj` in every layer. `fc` is always plain, so packed numbers of its shape are taken for plain ones. SGLang passes
over tensors without a parameter. Source: SGLang 0.5.23 models/dflash.py (supports_quantization) and
layers/quantization; run on the drafts of tests/golden/quantised_verdicts.json.
"""

from collections.abc import Callable, Mapping
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
from dflash_cli.engines.partial_loads import BY_INPUT
from dflash_cli.engines.vllm_packing import stated_packing
from dflash_cli.rules.subject import Subject
from dflash_runtime.json_values import as_object, is_int

UNMODELLED = frozenset(
    {
        "mxfp8", "minimax_m3_nvfp4", "blockwise_int8", "nvfp4_online", "modelopt_mixed", "w8a8_int8", "w8a8_fp8",
        "awq_marlin", "gguf", "gptq_marlin", "moe_wna16", "w4afp8", "petit_nvfp4", "quark", "quark_mxfp4",
        "auto-round", "auto-round-int8", "modelslim", "quark_int4fp8_moe", "humming", "mxfp_w4a8",
    }
)  # fmt: skip
"""Methods without a recording."""
MARLIN_GROUPS = (-1, 32, 64, 128)
"""Columns with one scale in the kernel of GPTQ and AWQ. Source: layers/quantization/marlin_utils.py:44."""
SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
FUSED = {shard: fused for fused, shards in SHARDS.items() for shard in shards}
Method = tuple[PartsOf, Callable[[str], bool]]
"""The parts of a packed matrix, and whether SGLang packs a module of this name."""


def load_packing(subject: Subject, found: Mapping[str, Any], num_taps: int) -> PackedLoad | None:
    """The faults with which SGLang loads a draft's packed weights; None for a method without a model here.

    Raises:
        EngineStops: the key or the tensor at which it stops.
    """
    settings = stated_packing(subject)
    if settings is not None and not isinstance(settings, dict):
        raise EngineStops(KEY, f"found {settings!r}, expected an object")
    method = (NOTHING, lambda module: False) if settings is None else _method(settings)
    if method is None:
        return None
    parts, is_packed = method

    def parts_of(module: str) -> PartsOf | None:
        last = module.rpartition(".")[2]
        return parts if last != "fc" and is_packed(FUSED.get(last, last)) else None

    sizes = matrices(found, num_taps)
    if subject.tensors is not None:
        misread_blocks(sizes, parts_of, settings, FUSED)
    return load_packed(subject, sizes, parts_of, is_strict=False, cutting=BY_INPUT)


def _method(settings: Mapping[str, Any]) -> Method | None:
    name = settings.get("quant_method", "")
    if name in ("", "modelopt"):
        name = _modelopt_method(settings) or name
    if not isinstance(name, str):
        raise EngineStops(f"{KEY}.quant_method", f"found {name!r}, expected a text")
    if name.lower() in UNMODELLED:
        return None
    if name.lower() == "modelopt":
        raise EngineStops(f"{KEY}.quant_algo", f"found {settings.get('quant_algo')!r}, expected FP8 or NVFP4")
    if name.lower() not in METHODS:
        raise EngineStops(f"{KEY}.quant_method", f"found {name!r}, which SGLang 0.5.23 does not load")
    return METHODS[name.lower()](settings)


def _modelopt_method(settings: Mapping[str, Any]) -> str | None:
    algo = as_object(settings.get("quantization", settings)).get("quant_algo")
    if isinstance(algo, str) and "FP4" in algo:
        return "modelopt_fp4"
    return {"FP8": "modelopt_fp8", "MIXED_PRECISION": "modelopt_mixed", "MXFP8": "mxfp8"}.get(str(algo))


def _fp8(settings: Mapping[str, Any]) -> Method:
    ignored = next((settings[key] for key in ("ignored_layers", "modules_to_not_convert") if key in settings), None)
    if ignored and not isinstance(ignored, list | str):
        raise EngineStops(f"{KEY}.modules_to_not_convert", f"found {ignored!r}, expected a list")
    names = {str(item).removeprefix("model.") for item in ignored or ()}
    return fp8_parts(settings), lambda module: not all(name in names for name in SHARDS.get(module, (module,)))


def _compressed(settings: Mapping[str, Any]) -> Method | None:
    ignored, parts = settings.get("ignore", []), compressed_parts(settings)
    if not isinstance(ignored, list):
        raise EngineStops(f"{KEY}.ignore", f"found {ignored!r}, expected a list")
    return None if parts is None else (parts, lambda module: parts is not NOTHING and not is_listed(module, ignored))


def _modelopt(parts: PartsOf) -> Callable[[Mapping[str, Any]], Method]:
    def read(settings: Mapping[str, Any]) -> Method:
        inner = as_object(settings.get("quantization"))
        ignored = inner.get("exclude_modules") if inner else settings.get("ignore")
        names = [item for item in ignored or () if isinstance(item, str)]
        return parts, lambda module: not any(fnmatch(module, name) for name in names)

    return read


def _gptq(settings: Mapping[str, Any]) -> Method:
    """GPTQ of 4 or 8 symmetric bits. Other settings stop SGLang (gptq/schemes/gptq_linear.py:32)."""
    bits, group = needed(settings, "bits"), needed(settings, "group_size")
    needed(settings, "desc_act")
    is_known = is_int(bits) and bits in (4, 8) and is_int(group) and group in MARLIN_GROUPS
    for key, is_right in (("bits", is_known), ("sym", settings.get("sym") is True)):
        if not is_right:
            raise EngineStops(f"{KEY}.{key}", f"found {settings.get(key)!r}; SGLang packs 4 or 8 bits, symmetric")
    return gptq(bits, group), lambda module: True


def _awq(settings: Mapping[str, Any]) -> Method:
    """AWQ of 4 bits. SGLang compares parts of names with its list of plain modules."""
    bits, group = needed(settings, "bits"), needed(settings, "group_size")
    needed(settings, "zero_point")
    if bits != 4 or not is_int(group) or group not in MARLIN_GROUPS:
        raise EngineStops(f"{KEY}.bits", f"found {bits!r} in groups of {group!r}, expected 4 in groups of 128")
    ignored = [item for item in settings.get("modules_to_not_convert") or () if isinstance(item, str)]
    return awq(4, group), lambda module: not any(name in module for name in ignored)


def _bitsandbytes(settings: Mapping[str, Any]) -> Method:
    """bitsandbytes, which SGLang loads with no model of a draft: its first step finds no state of the packed weights.

    Source: model_loader/loader.py:2871 and :4233, layers/quantization/bitsandbytes.py:301 and :378.
    """
    ignored = settings.get("llm_int8_skip_modules") or ()
    if not all(name in ignored for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")):
        raise EngineStops(f"{KEY}.quant_method", "bitsandbytes, which SGLang 0.5.23 loads for no DFlash draft")
    return NOTHING, lambda module: False


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method | None]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "modelopt_fp8": _modelopt(with_scale("weight_scale", lambda rows, columns: SCALAR, "input_scale")),
    "modelopt_fp4": _modelopt(nibbles("weight", "weight_scale_2", "input_scale")),
}
