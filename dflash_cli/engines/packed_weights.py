"""Packed weights as engines load them: the parts of each matrix, which an engine fills, misses, or stops at."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod
from typing import Any

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.formats.dialect import Format
from dflash_cli.rules.subject import BODY_SIZES, WEIGHTS, Subject, stand_in
from dflash_cli.rules.themes.tensors import FLOATS
from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.checkpoint.layout import body_shapes
from dflash_runtime.checkpoint.quantised.stated_quantization import block_structure, is_block
from dflash_runtime.json_values import as_object, is_int

KEY = "quantization_config"
Shape = tuple[int, ...]
Parts = Mapping[str, Shape]
"""The end of a tensor's name, after its module's -> the shape."""
PartsOf = Callable[[int, int], Parts]
"""(rows, columns) of a matrix -> the tensors that hold it."""
SCALAR: Shape = (1,)
"""A tensor of one value, of any number of dimensions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLoad:
    """The faults with which an engine loads packed weights.

    unfilled  parameters without a tensor in the file, which keep random values
    misread   matrices of packed numbers that the engine takes for plain ones
    """

    unfilled: tuple[str, ...] = ()
    misread: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[str, ...]:
        return (*self.unfilled, *self.misread)


def is_packed(subject: Subject) -> bool:
    """Whether a DFlash draft states packed weights, or has a matrix of another type than floats."""
    of_matrices = (
        info.dtype not in FLOATS
        for name, info in (subject.tensors or {}).items()
        if name.startswith(("layers.", "fc."))
    )
    return subject.format.family == Format.family and (states_packing(subject) or any(of_matrices))


def states_packing(subject: Subject) -> bool:
    """Whether the config of a draft, or Model-Optimizer's file, says that the weights are packed."""
    stated = (item.value for item in subject.stated.statements(KEY))
    return any(value not in (None, {}) for value in stated) or QUANTIZATION_FILE in subject.files


def matrices(found: Mapping[str, Any], num_taps: int) -> dict[str, tuple[int, int]]:
    """Module -> rows and columns of its matrix, for a config whose sizes are resolved."""
    sizes = {**{name: found[key] for key, name in BODY_SIZES.items() if key != "vocab_size"}, "vocab_size": 1}
    config = stand_in(sizes, num_taps)
    shapes = body_shapes(config) if config is not None else {}
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(("_proj.weight", "fc.weight"))
    }


def load_packed(
    subject: Subject,
    sizes: Mapping[str, tuple[int, int]],
    parts_of: Callable[[str], PartsOf | None],
    *,
    is_strict: bool,
    skipped: Collection[str] = (),
    cutting: tuple[str, ...] = (),
) -> PackedLoad:
    """Compare the stored parts of each matrix with the parts that the engine has parameters for.

    parts_of   a module -> its parts if the engine packs it, else None
    is_strict  whether the engine stops at a tensor without a parameter
    skipped    ends of names that the engine passes over
    cutting    ends of modules whose matrices the engine cuts to the columns that it expects

    Raises:
        EngineStops: a tensor has another shape, or the engine lacks a parameter for it.
    """
    if subject.tensors is None:
        return PackedLoad()
    unfilled, misread = [], []
    for module, (rows, columns) in sizes.items():
        packed = parts_of(module)
        expected = {"weight": (rows, columns)} if packed is None else packed(rows, columns)
        stored = {
            name[len(module) + 1 :]: info
            for name, info in subject.tensors.items()
            if name.startswith(f"{module}.") and not name.endswith((*skipped, ".bias"))
        }
        for part, info in stored.items():
            place = f"{WEIGHTS}:{module}.{part}"
            if part not in expected:
                if is_strict:
                    raise EngineStops(place, "the engine has no parameter for it")
                continue
            is_cut = module.endswith(cutting) if cutting else False
            if is_cut and _has_more_columns(tuple(info.shape), expected[part]):
                misread.append(f"{module}.{part}")
            elif not _fits(tuple(info.shape), expected[part]):
                why = f"found {tuple(info.shape)}, the engine expects {expected[part]}"
                raise EngineStops(place, why)
            elif packed is None and info.dtype not in FLOATS:
                misread.append(f"{module}.{part}")
        unfilled += [f"{module}.{part}" for part in expected if part not in stored]
    return PackedLoad(unfilled=tuple(unfilled), misread=tuple(misread))


def _has_more_columns(found: Shape, expected: Shape) -> bool:
    return len(found) == len(expected) == 2 and found[0] == expected[0] and found[1] > expected[1]


def _fits(found: Shape, expected: Shape) -> bool:
    return found == expected or (expected == SCALAR and prod(found) == 1)


def with_scale(name: str, size: Callable[[int, int], Shape], *more: str) -> PartsOf:
    """A matrix of its own shape with scales, and further scalars."""
    return lambda rows, columns: {
        "weight": (rows, columns), name: size(rows, columns), **dict.fromkeys(more, SCALAR)
    }  # fmt: skip


def by_block(name: str, block: tuple[int, int]) -> PartsOf:
    """A matrix with a scale for each block."""
    return with_scale(name, lambda rows, columns: (-(-rows // block[0]), -(-columns // block[1])))


def nibbles(weight: str, *scalars: str) -> PartsOf:
    """Two values of four bits per byte, and a scale for 16 of them."""
    return lambda rows, columns: {
        weight: (rows, columns // 2), "weight_scale": (rows, columns // 16), **dict.fromkeys(scalars, SCALAR)
    }  # fmt: skip


def words(bits: int, group: int) -> PartsOf:
    """compressed-tensors' integers of few bits: columns packed into words of 32 bits."""
    return lambda rows, columns: {
        "weight_packed": (rows, columns * bits // 32),
        "weight_scale": (rows, columns // group if group > 0 else 1),
        "weight_shape": (2,),
    }


def gptq(bits: int, group: int) -> PartsOf:
    """GPTQ's integers: rows of the transposed matrix packed into words."""
    return lambda rows, columns: {
        "qweight": (columns * bits // 32, rows), **_zeros(rows, columns, bits, group),
    }  # fmt: skip


def awq(bits: int, group: int) -> PartsOf:
    """AWQ's integers: columns of the transposed matrix packed into words."""
    return lambda rows, columns: {
        "qweight": (columns, rows * bits // 32), **_zeros(rows, columns, bits, group),
    }  # fmt: skip


def _zeros(rows: int, columns: int, bits: int, group: int) -> Parts:
    groups = columns // group if group > 0 else 1
    return {"qzeros": (groups, rows * bits // 32), "scales": (groups, rows)}


def NOTHING(rows: int, columns: int) -> Parts:
    """No parts."""
    return {}


def first_scheme(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """How compressed-tensors packs the weights of its first group; empty for other methods."""
    groups = as_object(settings.get("config_groups"))
    return as_object(as_object(next(iter(groups.values()), None)).get("weights"))


def block_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """The rows and columns of a block of FP8 numbers with one scale; None without such blocks."""
    block = settings.get("weight_block_size", block_structure(first_scheme(settings)))
    return (block[0], block[1]) if is_block(block) else None


def misread_blocks(
    sizes: Mapping[str, tuple[int, int]], parts_of: Callable[[str], PartsOf | None], settings: Mapping[str, Any] | None,
    fused: Mapping[str, str], *, may_share_blocks: bool = False,
) -> tuple[str, ...]:  # fmt: skip
    """Return the packed weights with rows that get the scales of another matrix: a block of rows lies in both.

    Engines fuse q, k and v, and gate and up. So every matrix except the last needs whole blocks of rows. S52 judges
    the parts of several GPUs.
    Source: validate_fp8_block_shape in vLLM 0.33.0 and SGLang 0.5.23 layers/quantization.

    sizes             module -> rows and columns of its matrix
    parts_of          whether a module is packed, and how
    settings          the quantisation settings of the draft, None without them
    fused             last part of a module's name -> last part of the name of the fused module
    may_share_blocks  the engine continues if the fused matrix has enough scales

    Raises:
        EngineStops: names the matrix at which the engine stops.
    """
    stated = block_of(settings or {})
    if stated is None:
        return ()
    block, _ = stated
    rows = {module: size[0] for module, size in sizes.items() if parts_of(module) is not None}
    groups: dict[str, list[str]] = {}
    for module in rows:
        parent, _, last = module.rpartition(".")
        groups.setdefault(f"{parent}.{fused.get(last, last)}", []).append(module)
    misread: list[str] = []
    for members in groups.values():
        cut = next((at for at, module in enumerate(members[:-1]) if rows[module] % block), None)
        if cut is None:
            continue
        heights = [rows[module] for module in members]
        *begins, end = accumulate(heights, initial=0)
        lasts = [ceil(begin / block) + ceil(height / block) for begin, height in zip(begins, heights, strict=True)]
        if not may_share_blocks or max(lasts) > ceil(end / block):
            why = f"{heights[cut]} rows, expected whole blocks of {block}: the engine fuses it with other matrices"
            raise EngineStops(f"{WEIGHTS}:{members[cut]}.weight", why)
        misread += [f"{module}.weight" for module in members[cut + 1 :]]
    return tuple(misread)


def needed(settings: Mapping[str, Any], *keys: str) -> Any:
    """The value of the first key that is there.

    Raises:
        EngineStops: none is.
    """
    if all(key not in settings for key in keys):
        raise EngineStops(f"{KEY}.{keys[0]}", "missing")
    return next(settings[key] for key in keys if key in settings)


def fp8_parts(settings: Mapping[str, Any]) -> PartsOf:
    """The parts of a matrix in FP8 with a scale for each tensor, or for each block.

    Raises:
        EngineStops: the key that is wrong.
    """
    scheme, block = needed(settings, "activation_scheme"), settings.get("weight_block_size")
    if scheme not in ("static", "dynamic"):
        raise EngineStops(f"{KEY}.activation_scheme", f"found {scheme!r}, expected static or dynamic")
    if block is None:
        return with_scale(
            "weight_scale", lambda rows, columns: SCALAR, *(("input_scale",) if scheme == "static" else ())
        )
    if scheme == "static" or not is_block(block):
        raise EngineStops(f"{KEY}.weight_block_size", f"found {block!r}, expected two numbers, and dynamic activations")
    return by_block("weight_scale_inv", (block[0], block[1]))


def compressed_parts(settings: Mapping[str, Any]) -> PartsOf | None:
    """The parts of a matrix of compressed-tensors; NOTHING without groups, None for several groups.

    Raises:
        EngineStops: the key that is wrong.
    """
    groups = settings.get("config_groups", {})
    if not isinstance(groups, dict):
        raise EngineStops(f"{KEY}.config_groups", f"found {groups!r}, expected an object")
    group = as_object(next(iter(groups.values()), None))
    if not groups or len(groups) > 1 or group.get("targets") != ["Linear"]:
        return None if groups else NOTHING
    return _scheme(as_object(group.get("weights")), group.get("input_activations"), settings.get("format"))


def _scheme(weights: Mapping[str, Any], inputs: Any, form: Any) -> PartsOf | None:
    """The parts of a matrix in one of compressed-tensors' formats.

    Raises:
        EngineStops: the format is not the one of these weights.
    """
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if bits == 4 and kind == "int" and strategy in ("group", "channel") and inputs is None:
        if form != "pack-quantized":
            raise EngineStops(f"{KEY}.format", f"found {form!r}, expected 'pack-quantized'")
        size = weights.get("group_size")
        return words(4, size if is_int(size) else 0)
    if form == "nvfp4-pack-quantized":
        return nibbles("weight_packed", "weight_global_scale", "input_global_scale")
    if bits == 8 and form in ("float-quantized", "int-quantized") and strategy in ("channel", "tensor"):
        more = () if as_object(inputs).get("dynamic") else ("input_scale",)
        return with_scale("weight_scale", lambda rows, columns: (rows, 1) if strategy == "channel" else SCALAR, *more)
    block = block_structure(weights)
    if bits == 8 and form == "float-quantized" and strategy == "block" and is_block(block):
        return by_block("weight_scale", (block[0], block[1]))
    return None


def is_listed(name: str, patterns: Collection[Any]) -> bool:
    """Whether compressed-tensors' list names a module, as it is or by a regular expression."""
    texts = [item for item in patterns if isinstance(item, str)]
    return name in texts or any(re.match(item[3:], name) for item in texts if item.startswith("re:"))
