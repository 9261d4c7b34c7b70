"""The one import of Triton, the checks before a launch, and every launch parameter.

A machine without Triton imports the kernel modules all the same, for their references; launching is what fails. Launch
parameters are plain tables instead of `@triton.autotune`, which needs a driver, differs from run to run and measures
inside captured graphs. The numbers were chosen by `examples/benchmarks/kernel_times.py`.
"""

import importlib
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What the floating point kernels take. float64 is the references' business."""

MIN_DOT = 16
"""`tl.dot` takes no side shorter than this."""


NOT_INSTALLED = "Triton is not installed, so no kernel can be launched: choose the reference kernels"


class _Absent:
    """Stands in for Triton, its language and its kernels: anything may be named, nothing may be launched."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __call__(self, *_: object, **__: object) -> "_Absent":
        return self

    def __getitem__(self, grid: object) -> "_Absent":
        raise RuntimeError(NOT_INSTALLED)


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return _Absent()


triton, tl = _import("triton"), _import("triton.language")
TensorDescriptor = _import("triton.tools.tensor_descriptor").TensorDescriptor
HAS_TRITON = not isinstance(triton, _Absent)
IS_INTERPRETED: bool = HAS_TRITON and triton.knobs.runtime.interpret
"""Whether kernels run on the CPU in Triton's interpreter; decided by TRITON_INTERPRET when Triton is imported."""

jit = triton.jit
constexpr = tl.constexpr


def check_tensors(*tensors: Tensor) -> None:
    """Raise unless Triton can reach all these tensors. A launcher never falls back to its reference by itself."""
    if not HAS_TRITON:
        raise RuntimeError(NOT_INSTALLED)
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"tensors on {device} and {tensor.device} in one launch")
    if device.type == "cuda":
        if device.index != torch.cuda.current_device():
            raise ValueError(f"tensors on {device}, but the current device is cuda:{torch.cuda.current_device()}")
    elif not (device.type == "cpu" and IS_INTERPRETED):
        raise ValueError(
            f"Triton kernels cannot run on {device}: choose the reference kernels, "
            "or set TRITON_INTERPRET=1 before Triton is imported"
        )


def check_dtypes(*tensors: Tensor) -> None:
    """Raise unless these are floats a kernel takes, all of one dtype: a mix would be promoted by the reference."""
    dtype = tensors[0].dtype
    if dtype not in FLOATS:
        raise TypeError(f"Triton kernels take float32, float16 and bfloat16, not {dtype}")
    for tensor in tensors:
        if tensor.dtype != dtype:
            raise TypeError(f"{dtype} and {tensor.dtype} in one launch")


def require(is_met: bool, requirement: str) -> None:
    """Raise ValueError naming what a launch needs. Only shapes and strides are asked, never values on the device."""
    if not is_met:
        raise ValueError(f"needed: {requirement}")


def power_of_2(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << max(value - 1, 0).bit_length()


def ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def warps_for(num_elements: int) -> int:
    """Warps for a program that covers this many elements: eight elements a thread, as far as that goes."""
    return min(max(power_of_2(num_elements) // 256, 1), 16)


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs run at once, at least. The interpreter's answer is small, so that tests split and combine."""
    if device.type != "cuda":
        return 8
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have; 0 where that is not known."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", 0))  # torch's type stubs lack it


@lru_cache
def has_tile_loads(device: torch.device) -> bool:
    """Whether a unit of its own loads tiles into shared memory (TMA); the interpreter does as if."""
    if device.type != "cuda":
        return IS_INTERPRETED
    return torch.cuda.get_device_capability(device) >= (9, 0)


def fitting_stages(wanted: int, stage_bytes: int, kept_bytes: int, device: torch.device) -> int:
    """How many tiles of a loop are on their way at once: fewer than `wanted` where shared memory does not hold them."""
    num_bytes = shared_memory(device)
    return max(1, min(wanted, (num_bytes - kept_bytes) // stage_bytes)) if num_bytes else wanted


ELEMENT_TILE = 1024
"""Elements a program covers in pointwise integer kernels."""

HEAD_TILE = 8
"""Heads of one token that a norm-and-rope program covers."""

VOCAB_TILE = 4096
"""Tokens a program covers in one pass over logits or probabilities."""

VOCAB_GROUP = 64
"""Tokens of which a filter knows the highest logit, and which it reads or passes over together."""

NUM_DEPTHS = 256
"""Logits that a filter tries as a bound of those it reads: so far below the highest, in steps of DEPTH_STEP."""

DEPTH_STEP = 3 / 32
"""Temperatures; between two bounds lie few tokens, and below the last hardly any weight."""

LISTED_TOKENS = 4
"""Tokens that a filter has room to list for each group of the vocabulary."""

LISTED_TILE = 2048
"""Tokens of listed groups that a filter reads at a time."""

MAX_GRID = 65_535
"""Programs along the second and third axis of a launch; only the first, where rows are, goes further."""

MIN_TEMPERATURE = 1e-5
"""Below this a row is greedy: dividing logits by less tells no two of them apart any better, and overflows."""


@dataclass(frozen=True, slots=True)
class VocabShape:
    """How a row of logits is cut into programs: the tokens and warps of each."""

    tile: int
    num_warps: int


def argmax_shape(num_rows: int) -> VocabShape:
    """For rows that are all greedy: few rows need many programs, and many rows few that do more each."""
    return VocabShape(4096, 4) if num_rows <= 64 else VocabShape(8192, 8)


def sampling_shape() -> VocabShape:
    return VocabShape(VOCAB_TILE, 4)


COMBINE_TILE = 4
"""Rows whose parts one program adds up, a warp each."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """How attention is cut into programs: a tile's packed rows (query heads x block rows) and keys, and the parts."""

    rows: int
    keys: int
    num_splits: int
    num_stages: int


MAX_SPLITS = 16
"""More parts than this cost more to add up than they gain."""


FEW_KEYS = constexpr(256)
"""With fewer keys a part, half of four or more parts are faster: one program on a multiprocessor, not two."""


def attention_shape(
    num_groups: int, num_packed: int, head_dim: int, itemsize: int, device: torch.device
) -> AttentionShape:
    """The cut for `num_groups` KV heads of requests with `num_packed` rows each; tiles fit in shared memory.

    It follows from shapes, not from lengths, so a graph captured with it serves every context: the parts share the
    tiles of the true length evenly, on the device. Where few programs have to fill the device, smaller tiles let four
    of those with the fewest rows share a multiprocessor.
    """
    row_bytes = power_of_2(head_dim) * itemsize
    rows = _packed_rows(num_packed, row_bytes, itemsize, device)
    num_programs = num_groups * ceil_div(num_packed, rows)
    is_light = rows == MIN_DOT and row_bytes <= 256
    num_splits = _num_splits(num_programs, 4 if is_light else 2, device)
    if row_bytes > 256:
        keys, num_stages = 16 if row_bytes > 512 else 32, 2
    else:
        keys, num_stages = 32 if is_light and num_splits > 1 else 64, 3
    num_stages = fitting_stages(num_stages, 2 * keys * row_bytes, rows * row_bytes, device)
    return AttentionShape(rows, keys, num_splits, num_stages)


def _packed_rows(num_packed: int, row_bytes: int, itemsize: int, device: torch.device) -> int:
    """Packed rows of a tile. On Hopper those of 64 take less time than those of 32, though half of them be empty."""
    if row_bytes > 512 or num_packed <= MIN_DOT:
        return MIN_DOT
    if itemsize == 2 and row_bytes <= 256 and has_tile_loads(device):
        return 64
    return min(power_of_2(num_packed), 64)


def _num_splits(num_programs: int, most_together: int, device: torch.device) -> int:
    """Parts that fill the device, with as many programs on a multiprocessor; four parts and more may be halved."""
    num_splits = most_together * num_multiprocessors(device) // num_programs
    if num_splits < 4:
        num_splits = 2 * num_multiprocessors(device) // num_programs
    return min(max(num_splits, 1), MAX_SPLITS)


@dataclass(frozen=True, slots=True)
class BalancedShape:
    """How attention of many requests is cut: as `AttentionShape`, but with the programs of a KV head and row tile.

    `combined_rows` are those whose parts one program adds up; `num_whole` how many whole requests each program has
    where their lengths are alike, 0 where that would leave too much of the device idle.
    """

    rows: int
    keys: int
    num_programs: int
    num_stages: int
    combined_rows: int = 16
    num_whole: int = 0


LEAST_SHARE = constexpr(4)
"""Tiles of keys that a program walks where there are so many: parts of fewer are not worth adding up."""


def balanced_shape(
    num_requests: int, num_kv: int, num_packed: int, head_dim: int, itemsize: int, device: torch.device
) -> BalancedShape | None:
    """The cut for requests with `num_packed` rows for each KV head; None where they do not fill the device alone.

    Measured on an H200 against one program for each request and KV head (`docs/measurements/attention.md`).
    """
    shape = attention_shape(num_requests * num_kv, num_packed, head_dim, itemsize, device)
    num_row_tiles, num_places = ceil_div(num_packed, shape.rows), num_multiprocessors(device)
    is_light = shape.rows == MIN_DOT and power_of_2(head_dim) * itemsize <= 256
    num_programs = (3 if is_light else 2) * num_places // (num_kv * num_row_tiles)
    if num_programs < 2 or num_requests * num_kv * num_row_tiles <= num_places:
        return None
    num_whole = ceil_div(num_requests, num_programs)
    fills_device = 10 * ceil_div(num_requests, num_whole) * num_kv * num_row_tiles >= 9 * 2 * num_places
    return BalancedShape(
        shape.rows, shape.keys, num_programs, shape.num_stages, num_whole=num_whole if fills_device else 0
    )


ROUTED_ROWS = 4
"""Rows whose experts one program chooses, a warp each."""

MAX_EXPERT_ROWS = 256
"""Rows up to which the products of chosen experts are ours; with more of them torch's grouped ones are as fast."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """How the products of experts are cut into programs: a tile's rows, columns and inner width.

    `sought_rows` are those among which a program looks for its own. By route, there is one for each expert that a
    row chose, and otherwise one for each expert.
    """

    rows: int
    columns: int
    depth: int
    num_stages: int
    sought_rows: int
    is_by_route: bool


def experts_shape(
    num_rows: int, num_chosen: int, num_experts: int, itemsize: int, device: torch.device
) -> ExpertsShape:
    """The cut for rows each of which chose as many experts; the same for all numbers of rows up to a power of two.

    Tiles are small enough for two programs on a multiprocessor: while one looks for its rows the other one reads.
    """
    sought_rows = 1 if num_rows == 1 else max(power_of_2(num_rows), MIN_DOT)
    is_by_route = power_of_2(num_rows) * num_chosen <= num_experts
    rows = MIN_DOT if sought_rows <= 64 else 32
    columns, depth = 128, 64
    num_stages = fitting_stages(5, (columns + rows) * depth * itemsize, 0, device)
    return ExpertsShape(rows, columns, depth, num_stages, sought_rows, is_by_route)


@dataclass(frozen=True, slots=True)
class RaggedShape:
    """Tiles of prefill: packed rows (query heads x rows) and keys, and the launch: one for a model.

    Long rows of keys are cut into parts as if so many programs ran together on a multiprocessor. `has_descriptors` is
    how tiles of the rows' own keys are loaded that need no mask: by the GPU's own unit for that (TMA), or by pointers.
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    num_together: int = 2
    has_descriptors: bool = False


RAGGED_SHAPES = (
    (2, 128, RaggedShape(rows=128, keys=64, num_warps=8, num_stages=3)),
    (2, 256, RaggedShape(rows=64, keys=32, num_warps=8, num_stages=2)),
    (2, 512, RaggedShape(rows=32, keys=32, num_warps=8, num_stages=2)),
    (4, 64, RaggedShape(rows=32, keys=32, num_warps=4, num_stages=2)),
    (4, 128, RaggedShape(rows=MIN_DOT, keys=32, num_warps=4, num_stages=2)),
    (4, 256, RaggedShape(rows=MIN_DOT, keys=16, num_warps=4, num_stages=2)),
)
"""For elements of so many bytes and heads up to this size: what fits in shared memory and, nearly, in registers.

`examples/benchmarks/ragged_shapes.py` compares others; none were compared for heads above 256.
"""


DESCRIBED_SHAPE = RaggedShape(rows=64, keys=64, num_warps=4, num_stages=3, num_together=1, has_descriptors=True)
"""For 16-bit heads of 128: 1 to 25% faster than the first of the shapes above (docs/measurements/prefill.md)."""

LONG_CONTEXT = 2048
"""Tokens from which on contexts have tiles of their own."""

LONG_SHAPE = RaggedShape(rows=128, keys=128, num_warps=8, num_stages=3)
"""Where they fit, 12% faster than those above for 2,048 rows after 14,336 tokens, and as fast after 2,048."""

LONG_SHAPE_BYTES = 227 * 1024
"""Shared memory that these take, and that not every GPU has."""


FEW_ROWS_SHAPE = RaggedShape(rows=64, keys=64, num_warps=4, num_stages=2, num_together=1)
"""The fastest of seven for 192 rows beside 62 requests (docs/measurements/mixed-load.md)."""


def few_rows_shape(head_dim: int, itemsize: int, device: torch.device) -> RaggedShape:
    """The tiles for few rows beside others, whose keys are all read in pages."""
    if (itemsize, power_of_2(head_dim)) == (2, 128):
        return FEW_ROWS_SHAPE
    return ragged_shape(head_dim, itemsize, 0, device)


def ragged_shape(head_dim: int, itemsize: int, longest_context: int, device: torch.device) -> RaggedShape:
    """The tiles for heads of this size; the references, which take any, are given the smallest."""
    is_long = longest_context >= LONG_CONTEXT and (itemsize, power_of_2(head_dim)) == (2, 128)
    if is_long and shared_memory(device) >= LONG_SHAPE_BYTES:
        return LONG_SHAPE
    fitting = (shape for size, limit, shape in RAGGED_SHAPES if size == itemsize and head_dim <= limit)
    shape, row_bytes = next(fitting, RAGGED_SHAPES[-1][-1]), power_of_2(head_dim) * itemsize
    if (itemsize, head_dim) == (2, 128) and has_tile_loads(device):
        shape = DESCRIBED_SHAPE
    num_stages = fitting_stages(shape.num_stages, 2 * shape.keys * row_bytes, shape.rows * row_bytes, device)
    return replace(shape, num_stages=num_stages)
