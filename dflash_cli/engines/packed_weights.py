"""Packed weights as engines load them: the parts of each matrix, which an engine fills, misses, or stops at."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from dflash_cli.engines.config_class import EngineStops
from dflash_cli.formats.dialect import Format
from dflash_cli.rules.subject import BODY_SIZES, Subject, stand_in
from dflash_cli.rules.themes.tensors import FLOATS, WEIGHTS
from dflash_runtime.checkpoint.canonical_names import QUANTIZATION_FILE
from dflash_runtime.checkpoint.layout import body_shapes

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
    """What an engine makes of packed weights.

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
    stated = (item.value for item in subject.stated.statements(KEY))
    of_matrices = (
        info.dtype not in FLOATS for name, info in (subject.tensors or {}).items() if name.startswith(("layers.", "fc."))
    )
    is_stated = any(value not in (None, {}) for value in stated) or QUANTIZATION_FILE in subject.files
    return subject.format.family == Format.family and (is_stated or any(of_matrices))


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
) -> PackedLoad:
    """Compare the stored parts of each matrix with the parts that the engine has parameters for.

    parts_of   a module -> its parts if the engine takes it for packed, None if for plain
    is_strict  the engine stops at a tensor that it has no parameter for
    skipped    parts that the engine passes over

    Raises:
        EngineStops: a tensor has another shape, or no parameter.
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
            if not _fits(tuple(info.shape), expected[part]):
                why = f"found {tuple(info.shape)}, the engine expects {expected[part]}"
                raise EngineStops(place, why)
            if packed is None and info.dtype not in FLOATS:
                misread.append(f"{module}.{part}")
        unfilled += [f"{module}.{part}" for part in expected if part not in stored]
    return PackedLoad(unfilled=tuple(unfilled), misread=tuple(misread))


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
